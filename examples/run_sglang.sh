#!/usr/bin/env bash
# Trains the example with SGLang as the rollout engine. Makes its environment on the first run; arguments go to
# train_grpo.py:
#   bash examples/run_sglang.sh --num-rollout 3
# See sglang_environment.sh for PYTHON and VENV; NPROC is the number of trainer ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/sglang_environment.sh
source examples/run_flags.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/torchrun" --standalone --nproc-per-node "${NPROC:-2}" examples/train_grpo.py \
    --rollout-engine sglang \
    "${flags[@]}" "$@"
