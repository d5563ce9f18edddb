#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains the example. Makes its environment on the first run; arguments go to train_grpo.py:
#   bash examples/run.sh --num-rollout 20 --output-dir runs/short
# See environment.sh for PYTHON and VENV; NPROC is the number of trainer ranks. DRY_RUN=1 prints what would be started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# What cannot run is refused before anything is installed.
"${PYTHON:-python3}" examples/train_grpo.py --check "$@"
[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || exit 0
source examples/environment.sh

# Every rank is one thread: two that wait for each other's are slower than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" examples/train_grpo.py "$@"
