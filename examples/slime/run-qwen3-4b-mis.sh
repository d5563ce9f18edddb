#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qwen3-4B on one 8-GPU node with slime: slime's own scripts/run-qwen3-4B.sh plus three flags, and a
# fourth one that checks them before the model loads.
#
#   SLIME_DIR=... examples/slime/run-qwen3-4b-mis.sh [CONFIG.yaml]
#
# Install mis_ext where slime runs first: pip install --no-deps -e <this repository>.
# What runs is a copy of slime's script beside it. DRY_RUN=1 prints the difference, writes nothing and starts nothing.
set -euo pipefail

examples="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
flags="$(python3 "${examples}/launch_flags.py" "${1:-${examples}/../yaml/mis.yaml}")"
check="--custom-megatron-init-path mis_ext.check_setup"
slime="$(realpath -- "${SLIME_DIR:?set SLIME_DIR to the slime checkout}")"
original="${slime}/scripts/run-qwen3-4B.sh"
# Beside the original, which finds its model arguments relative to itself.
ours="${slime}/scripts/run-qwen3-4B-mis_ext.sh"

launch='-- python3 train\.py \\$'
if [ "$(grep -c -- "${launch}" "${original}")" != 1 ]; then
    echo "${original}: expected one line '-- python3 train.py' with a backslash; add by hand: ${check} ${flags}" >&2
    exit 1
fi
with_flags() { sed "/${launch}/r /dev/stdin" "${original}" <<<"   ${check} ${flags} \\"; }

diff -u --label "${original}" --label "${ours}" "${original}" <(with_flags) || true
if [ -z "${DRY_RUN:-}" ]; then
    with_flags >"${ours}"
    cd -- "${slime}"
    exec bash "${ours}"
fi
