#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows trainer and engine agree bit for bit. Makes its environment on the first run; arguments go to true_on_policy.py:
#   bash examples/true_on_policy.sh --size short --output-dir runs/short
# See environment.sh for PYTHON and VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

# Threads that wait for each other cost more than the small products of a CPU's models gain.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" examples/true_on_policy.py "$@"
