#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What corrections do to training, with SGLang on a GPU or with controlled engines anywhere. Makes its environment on
# the first run; arguments go to evidence.py:
#   bash lab/studies/evidence.sh list
#   bash lab/studies/evidence.sh run fp8_cache        # Ctrl-C, and the same again, goes on
#   bash lab/studies/evidence.sh report
#   bash lab/studies/evidence.sh run pretrained_floor --model FOLDER --workers 6    # runs side by side on one GPU
# See sglang_environment.sh for PYTHON and VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/sglang_environment.sh
exec "$venv/bin/python" lab/studies/evidence.py "$@"
