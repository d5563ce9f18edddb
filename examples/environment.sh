# SPDX-License-Identifier: Apache-2.0
# Makes the examples' virtual environment on the first run, and sets $venv. To be sourced, from the repository's root.
# PYTHON chooses the interpreter (3.10 or newer), VENV the environment. A script may set $venv and $requirements before,
# and in $nodeps a file of what is installed without its dependencies.
venv="${VENV:-${venv:-.venv-example}}"
requirements="${requirements:-requirements/example.txt}"
# Written last, so that an interrupted installation is taken up again.
installed="$venv/.installed"
if [[ ! -e "$installed" || "$requirements" -nt "$installed" || "${nodeps:-$requirements}" -nt "$installed" ]]; then
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$requirements"
    [[ -z "${nodeps:-}" ]] || "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$nodeps"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
    touch "$installed"
fi
