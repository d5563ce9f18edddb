#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, types and tests, in a virtual environment of their own with pinned versions.
#
#   tests/run.sh [arguments of pytest ...]
#   tests/run.sh -m whole_run      # examples, the wheel, and tests of many seconds
#   tests/run.sh -m "not long_run" tests lab/tests   # those too, and the tests of the lab: what .ci/run runs
#
# VENV sets where the environment is; PYTHON the interpreter that makes it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}"
[ -x "${venv}/bin/python" ] || "${PYTHON:-python3}" -m venv "${venv}"
source "${venv}/bin/activate"
# What the installation follows from. Written last, so that an interrupted one is repeated.
installed="${venv}/.installed" wanted="${PWD} $(cat requirements/{example,test}.txt pyproject.toml mis_ext/__init__.py | cksum)"
if [ "${wanted}" != "$(cat "${installed}" 2> /dev/null)" ]; then
    python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
    python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
    echo "${wanted}" > "${installed}"
fi

ruff check .
ruff format --check .
# Beside the tests: the first time it takes a quarter of a minute, of one core.
types="$(mktemp)"
mypy > "$types" 2>&1 &
typing=$!
trap 'kill "$typing" 2> /dev/null || :; rm -f "$types"' EXIT
# Pytest compiles the tests with its own assertions, almost half of what collecting takes: once, not in each run.
unset PYTHONDONTWRITEBYTECODE
# Processes that each start a thread per core take turns waiting for each other's.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A file at a time per process: some files start processes of their own, once for all their tests. A process that died is
# not started again: pytest-xdist then waits for ever for the rest of its file.
tests=0
python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
    --timeout 300 -m "not whole_run and not long_run" "$@" || tests=$?
wait "$typing" || failed=$?
cat "$types"
exit "${failed:-$tests}"
