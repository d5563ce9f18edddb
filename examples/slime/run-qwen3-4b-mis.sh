#!/usr/bin/env bash
# Qwen3-4B on one 8-GPU node with slime: slime's own scripts/run-qwen3-4B.sh plus three flags.
#
#   SLIME_DIR=... examples/slime/run-qwen3-4b-mis.sh [CONFIG.yaml]
#
# Install mis_ext where slime runs first: pip install --no-deps -e <this repository>.
# DRY_RUN=1 prints the difference to slime's script and starts nothing.
set -euo pipefail

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
config="$(realpath -- "${1:-${repository}/yaml/mis.yaml}")"
scripts="${SLIME_DIR:?set SLIME_DIR to the slime checkout}/scripts"
original="${scripts}/run-qwen3-4B.sh"
# Beside the original, which finds its model arguments relative to itself.
ours="${scripts}/run-qwen3-4B-mis_ext.sh"

launch='-- python3 train\.py \\$'
if [ "$(grep -c -- "${launch}" "${original}")" != 1 ]; then
    echo "${original}: expected one line ending in '-- python3 train.py \\'; add the flags to it by hand" >&2
    exit 1
fi
sed "s|${launch}|&\\
   --use-tis \\\\\\
   --custom-tis-function-path mis_ext.compute_mis_weights_with_cp \\\\\\
   --custom-config-path ${config} \\\\|" "${original}" >"${ours}"
diff -u "${original}" "${ours}" || true
if [ -z "${DRY_RUN:-}" ]; then
    cd "${SLIME_DIR}"
    exec bash "${ours}"
fi
