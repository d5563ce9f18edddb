#!/usr/bin/env bash
# Installs what the example needs into .venv-example, once, and trains: bash examples/run.sh [flags of train_grpo.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-example
requirements=requirements/example.txt
installed=$venv/installed.txt
if ! cmp --silent "$requirements" "$installed"; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable .
  cp "$requirements" "$installed"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/torchrun" --standalone --nproc-per-node "${NPROC_PER_NODE:-2}" examples/train_grpo.py \
  --use-tis \
  --custom-tis-function-path mis_ext.compute_mis_weights_with_cp \
  --custom-config-path yaml/mis.yaml \
  "$@"
