#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a tiny Qwen3 with unmodified Miles and its FSDP trainer on a CPU: without a correction, with Miles' own TIS, with
# our three flags, and with our whole loss. Shows what Miles logged, and fails where these do not agree.
#
#   bash lab/hosts/miles_cpu.sh [--all] [--record] [RUN ...]
#   MILES_DIR=~/miles bash lab/hosts/miles_cpu.sh
#
# MILES_DIR is a checkout (without it git fetches one into .checkouts/); PYTHON is the interpreter (3.11), VENV the
# environment that is made on the first run. DRY_RUN=1 prints Miles' command lines, and trains nothing.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
source lab/hosts/checkouts.sh

checkout_at MILES_DIR miles https://github.com/radixark/miles 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
venv="${VENV:-.venv-miles}"
install_host requirements/miles-cpu.txt

export MILES_DIR
# The hosts have a package "examples": ours is not on their path, only one folder of it.
export PYTHONPATH="$MILES_DIR:$PWD/lab/hosts:$PWD/examples/grpo/sglang_cpu"
exec "$venv/bin/python" -m host_cpu.run miles "$@"
