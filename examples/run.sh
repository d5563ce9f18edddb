#!/usr/bin/env bash
# Trains the example. Makes the environment .venv-example on the first run; arguments go to train_grpo.py:
#   bash examples/run.sh --num-rollout 20 --output-dir runs/short
# PYTHON chooses the interpreter (3.10 or newer), VENV the environment, NPROC the number of trainer ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv-example}"
requirements=requirements/example.txt
# Written last, so that an interrupted installation is taken up again.
installed="$venv/.installed"
if [[ ! -e "$installed" || "$requirements" -nt "$installed" ]]; then
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$requirements"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
    touch "$installed"
fi

# Every rank is one thread: two that wait for each other's are slower than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/torchrun" --standalone --nproc-per-node "${NPROC:-2}" examples/train_grpo.py \
    --use-tis \
    --custom-tis-function-path mis_ext.compute_mis_weights_with_cp \
    --custom-config-path yaml/mis.yaml \
    "$@"
