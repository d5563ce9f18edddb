#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains the example with SGLang as the rollout engine. Makes its environment on the first run; arguments go to
# train_grpo.py:
#   bash examples/run_sglang.sh --num-rollout 3
# See sglang_environment.sh for PYTHON and VENV; NPROC is the number of trainer ranks. DRY_RUN=1 prints what would be
# started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set -- --rollout-engine sglang "$@"
# What cannot run is refused before anything is installed.
"${PYTHON:-python3}" examples/train_grpo.py --check "$@"
[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || exit 0
source examples/sglang_environment.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" examples/train_grpo.py "$@"
