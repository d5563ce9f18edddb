#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows trainer and SGLang agree bit for bit. Makes its environment on the first run; arguments go to
# true_on_policy.py:
#   bash examples/true_on_policy_sglang.sh --dtypes float32 --compare all stale
# See sglang_environment.sh for PYTHON and VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/sglang_environment.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" examples/true_on_policy.py --engines sglang --timing-repeats 0 "$@"
