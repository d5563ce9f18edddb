#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A few steps of TRL with mis_ext on a CPU. Makes its environment on the first run; arguments go to train.py:
#   bash examples/trl/run.sh yaml/mis.yaml
# PYTHON is the interpreter (3.11 or newer), VENV the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.venv-trl
requirements=requirements/trl.txt
source examples/environment.sh

exec "$venv/bin/python" examples/trl/train.py "$@"
