#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a tiny Qwen3 with unmodified Miles and its Megatron trainer on a CPU: without a correction, with Miles' own TIS,
# with our three flags, and with our whole loss. Shows what Miles logged, and fails where these do not agree.
#
#   bash lab/hosts/miles_megatron_cpu.sh [--all] [--record] [RUN ...]
#   MILES_DIR=~/miles MILES_MEGATRON_DIR=~/Megatron-LM-miles bash lab/hosts/miles_megatron_cpu.sh
#
# MILES_DIR and MILES_MEGATRON_DIR, a checkout of radixark/Megatron-LM, are checkouts (without them git fetches both into
# .checkouts/). PYTHON is the interpreter (3.11), VENV the environment that is made on the first run. DRY_RUN=1 prints
# Miles' command lines, and trains nothing.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
source lab/hosts/miles_checkouts.sh
venv="${VENV:-.venv-miles}"
install_host requirements/miles-cpu.txt

export MILES_DIR MILES_MEGATRON_DIR
# The hosts have a package "examples": ours is not on their path, only one folder of it. So is Miles', for its own
# example of a correction.
miles_examples="$MILES_DIR/examples/infra_features"
export PYTHONPATH="$MILES_MEGATRON_DIR:$MILES_DIR:$miles_examples:$PWD/lab/hosts:$PWD/examples/grpo/sglang_cpu"
exec "$venv/bin/python" -m host_cpu.run miles_megatron "$@"
