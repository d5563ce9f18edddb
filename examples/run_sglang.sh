#!/usr/bin/env bash
# Trains the example with SGLang as the rollout engine. Makes the environment .venv-sglang on the first run; arguments
# go to train_grpo.py:
#   examples/run_sglang.sh --num-rollout 3
# PYTHON chooses the interpreter (3.11 or newer), VENV the environment, NPROC the number of trainer ranks.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${VENV:-.venv-sglang}"
# Written last, so that an interrupted installation is taken up again.
installed="$venv/.installed"

on_gpu() {
    command -v nvidia-smi > /dev/null && nvidia-smi --list-gpus 2> /dev/null | grep -q GPU
}

requirements=(requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt)
if [[ ! -e "$installed" || requirements/sglang-cpu.txt -nt "$installed" || requirements/sglang-cpu-nodeps.txt -nt "$installed" ]]; then
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    if on_gpu; then
        # SGLang's own CUDA packages; of the CPU requirements, only what the trainer needs.
        "$venv/bin/pip" install "$(grep '^sglang==' "${requirements[1]}")" \
            $(grep -E '^(megatron-core|matplotlib|pytest|pyyaml|rich|safetensors)==' "${requirements[0]}")
    else
        "$venv/bin/pip" install -r "${requirements[0]}"
        "$venv/bin/pip" install --no-deps -r "${requirements[1]}"
    fi
    "$venv/bin/pip" install --no-deps -e .
    touch "$installed"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/torchrun" --standalone --nproc-per-node "${NPROC:-2}" examples/train_grpo.py \
    --rollout-engine sglang \
    --use-tis \
    --custom-tis-function-path mis_ext.compute_mis_weights_with_cp \
    --custom-config-path yaml/mis.yaml \
    "$@"
