# SPDX-License-Identifier: Apache-2.0
# Makes the environment with SGLang on the first run, and sets $venv. To be sourced, from the repository's root.
# PYTHON chooses the interpreter (3.11 or newer), VENV the environment.
venv="${VENV:-.venv-sglang}"
# Written last, so that an interrupted installation is taken up again.
installed="$venv/.installed"

on_gpu() {
    command -v nvidia-smi > /dev/null && nvidia-smi --list-gpus 2> /dev/null | grep -q GPU
}

requirements=(requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt)
if [[ ! -e "$installed" || requirements/sglang-cpu.txt -nt "$installed" || requirements/sglang-cpu-nodeps.txt -nt "$installed" ]]; then
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    if on_gpu; then
        # SGLang's own CUDA packages; of the CPU requirements, only what the trainer needs.
        "$venv/bin/pip" install "$(grep '^sglang==' "${requirements[1]}")" \
            $(grep -E '^(megatron-core|matplotlib|pytest|pyyaml|rich|safetensors)==' "${requirements[0]}")
    else
        "$venv/bin/pip" install -r "${requirements[0]}"
        "$venv/bin/pip" install --no-deps -r "${requirements[1]}"
    fi
    "$venv/bin/pip" install --no-deps -e .
    touch "$installed"
fi
