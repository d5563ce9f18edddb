#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows that mis_ext.rollout.generate gives the trainer exactly what SGLang sampled, on a CPU. Makes its environment on
# the first run; arguments go to on_policy_tokens.py:
#   bash examples/on_policy_tokens.sh --conversations 8
# See sglang_environment.sh for PYTHON and VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/sglang_environment.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" examples/on_policy_tokens.py "$@"
