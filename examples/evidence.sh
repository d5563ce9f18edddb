#!/usr/bin/env bash
# What corrections do to training, with SGLang on a GPU or with controlled engines anywhere. Makes its environment on
# the first run; arguments go to evidence.py:
#   bash examples/evidence.sh list
#   bash examples/evidence.sh run fp8_cache        # Ctrl-C, and the same again, goes on
#   bash examples/evidence.sh report
#   bash examples/evidence.sh run pretrained_floor --model FOLDER --workers 6    # runs side by side on one GPU
# See sglang_environment.sh for PYTHON and VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/sglang_environment.sh
exec "$venv/bin/python" examples/evidence.py "$@"
