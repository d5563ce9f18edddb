#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a tiny Qwen3 with unmodified slime and Megatron-LM on a CPU: without a correction, with slime's own TIS, with
# our three flags, and with our whole loss. Shows what slime logged, and fails where these do not agree.
#
#   bash lab/hosts/slime_cpu.sh [--all] [--record] [RUN ...]
#   SLIME_DIR=~/slime MEGATRON_DIR=~/Megatron-LM bash lab/hosts/slime_cpu.sh
#
# SLIME_DIR and MEGATRON_DIR are checkouts (without them git fetches both into .checkouts/); PYTHON is the interpreter
# (3.11), VENV the environment that is made on the first run. DRY_RUN=1 prints slime's command lines, and trains nothing.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
source lab/hosts/checkouts.sh

# The commit that slime's docker/Dockerfile names.
megatron_commit=1dcf0dafa884ad52ffb243625717a3471643e087
failed=""
checkout_at SLIME_DIR slime https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515 || failed=1
checkout_at MEGATRON_DIR Megatron-LM https://github.com/NVIDIA/Megatron-LM "$megatron_commit" || failed=1
[[ -z "$failed" ]] || exit 1

# slime's own changes to Megatron-LM. Given checkouts are never changed.
patch="$SLIME_DIR/docker/patch/latest/megatron.patch"
if [[ "$(git -C "$MEGATRON_DIR" rev-parse HEAD 2> /dev/null)" == "$megatron_commit" ]] \
    && ! git -C "$MEGATRON_DIR" apply --reverse --check "$patch" 2> /dev/null; then
    if [[ "$MEGATRON_DIR" != "$PWD/.checkouts/"* ]]; then
        echo "MEGATRON_DIR=$MEGATRON_DIR lacks slime's patch: git -C $MEGATRON_DIR apply $patch" >&2
        exit 1
    fi
    git -C "$MEGATRON_DIR" apply "$patch"
fi

venv="${VENV:-.venv-slime}"
install_host requirements/slime-cpu.txt

export SLIME_DIR MEGATRON_DIR
# Both hosts have a package "examples": ours is not on their path, only one folder of it. So is slime's, for its own
# example of a correction.
export PYTHONPATH="$MEGATRON_DIR:$SLIME_DIR:$SLIME_DIR/examples:$PWD/lab/hosts:$PWD/examples/grpo/sglang_cpu"
exec "$venv/bin/python" -m host_cpu.run slime "$@"
