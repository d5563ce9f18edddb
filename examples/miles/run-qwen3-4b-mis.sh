#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qwen3-4B on one 8-GPU node with Miles: Miles' own scripts/run_qwen3_4b.py plus three flags, and a
# fourth one that checks them before the model loads.
#
#   MILES_DIR=... examples/miles/run-qwen3-4b-mis.sh [CONFIG.yaml [arguments of run_qwen3_4b.py ...]]
#
# Install mis_ext where Miles runs first: pip install --no-deps -e <this repository>.
# Further flags of Miles' train.py go into MILES_SCRIPT_EXTRA_ARGS. DRY_RUN=1 prints the command and starts nothing.
set -euo pipefail

if [[ " ${*:2}" == *" --extra-args"* ]]; then
    echo "--extra-args would replace our flags: put yours into MILES_SCRIPT_EXTRA_ARGS" >&2
    exit 2
fi
examples="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
flags="$(python3 "${examples}/launch_flags.py" "${1:-${examples}/../yaml/mis.yaml}")"
shift || true
# Before yours: of two of them Miles takes the last.
check="--custom-megatron-init-path mis_ext.check_setup"
cd -- "${MILES_DIR:?set MILES_DIR to the Miles checkout}"
command=(python3 scripts/run_qwen3_4b.py --extra-args "${check} ${MILES_SCRIPT_EXTRA_ARGS:+${MILES_SCRIPT_EXTRA_ARGS} }${flags}" "$@")
printf '%q ' "${command[@]}"
echo
if [ -z "${DRY_RUN:-}" ]; then
    exec "${command[@]}"
fi
