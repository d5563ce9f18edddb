#!/usr/bin/env bash
# Qwen3-4B on one 8-GPU node with Miles: Miles' own scripts/run_qwen3_4b.py plus three flags.
#
#   MILES_DIR=... examples/miles/run-qwen3-4b-mis.sh [CONFIG.yaml [arguments of run_qwen3_4b.py ...]]
#
# Install mis_ext where Miles runs first: pip install --no-deps -e <this repository>.
# DRY_RUN=1 prints the command and starts nothing.
set -euo pipefail

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
config="$(realpath -- "${1:-${repository}/yaml/mis.yaml}")"
shift || true
cd "${MILES_DIR:?set MILES_DIR to the Miles checkout}"
flags="--use-tis --custom-tis-function-path mis_ext.compute_mis_weights_with_cp --custom-config-path ${config}"
command=(python3 scripts/run_qwen3_4b.py --extra-args "${flags}" "$@")
printf '%q ' "${command[@]}"
echo
if [ -z "${DRY_RUN:-}" ]; then
    exec "${command[@]}"
fi
