#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the documentation into site/, in its own virtual environment with pinned versions.
#
#   bash docs/run.sh            # what CI does: any broken link, anchor or reference is an error
#   bash docs/run.sh serve      # http://127.0.0.1:8000, again after each change
#
# VENV sets where the environment is; PYTHON the interpreter that makes it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv-docs}"
# Written last, so that an interrupted installation is repeated.
installed="$venv/.installed"
if [[ ! -e "$installed" || requirements/docs.txt -nt "$installed" ]]; then
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r requirements/docs.txt
    touch "$installed"
fi
# Material's authors announce here that MkDocs 2 will be another program; we pin 1.6.
export NO_MKDOCS_2_WARNING=1
exec "$venv/bin/mkdocs" "${1:-build}" --strict
