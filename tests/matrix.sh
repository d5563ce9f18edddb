#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that see a version of Python, torch, Megatron-Core or transformers, with other versions than the pinned
# ones, and prints the table of docs/reference/works_with.md.
#
#   tests/matrix.sh DIR [words of rows ...]    # such as: tests/matrix.sh ~/matrix 3.12 transformers==5.24.0
#
# Environments (pip, 2 to 6 GB each), logs and results lie in DIR. Rows that have a result are not run again: remove
# DIR/*.result to repeat them. A row whose Python is not on the PATH says so. "package" is what needs neither the examples
# nor continuous batching.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
dir="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
# Compiled graphs, the batch-invariant mode, routers and optimizers of Megatron-Core, caches of transformers; then masks,
# continuous batching, and the demonstration, which has all of them.
package=(loss/test_policy_loss_calls hosts/test_master_weights onpolicy/routing/test_routing
    onpolicy/routing/test_routing_replay onpolicy/batch_invariant/test_batch_invariant_mode
    onpolicy/invariance/test_sequence_invariance)
examples=(onpolicy/recording/test_recorder_transformers onpolicy/batch_invariant/test_batch_invariant_mixtures
    examples/test_true_on_policy)
# What a row pins itself, and what no test needs.
own='^(-r|(torch|triton|megatron-core|transformers|tokenizers|huggingface-hub|mypy|ruff|types-PyYAML)==)'

run() {  # PYTHON TESTS PIN...
    local venv="$dir/$1-${3/==/}" files=("${package[@]}")
    "python$1" -c '' 2> /dev/null || { echo "no python$1"; return; }
    [ -x "$venv/bin/python" ] || "python$1" -m venv "$venv"
    grep -hEv "$own" requirements/example.txt requirements/test.txt > "$venv/pins.txt"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${@:3}" -r "$venv/pins.txt" >&2 ||
        { echo "not installed"; return; }
    [ "$2" = package ] || files+=("${examples[@]}")
    files=("${files[@]/#/tests/}")
    files=("${files[@]/%/.py}")
    [ "$2" = package ] || files+=(lab/tests/test_model_zoo.py)
    PYTHONPATH="$PWD" OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q --timeout 600 "${files[@]}" 2>&1 |
        tee "$venv/last.log" >&2 || true
    # Not the last line: extension modules of newer Pythons have their say after it.
    sed -nE 's/^=* ?(([0-9]+ (passed|failed|skipped|deselected|errors?)(, )?)+) in .*/\1/p' "$venv/last.log" | tail --lines 1
}

echo "| Python | torch | Megatron-Core | transformers | tests of | result |"
echo "|---|---|---|---|---|---|"
while read -r python tests pins; do
    line="$python $tests $pins"
    for word in "$@"; do [[ " $line " == *" $word "* ]] || continue 2; done
    result="$dir/${line//[ =]/_}.result"
    if [ ! -s "$result" ]; then
        # shellcheck disable=SC2086  # A word for each pin.
        found="$(run "$python" "$tests" $pins < /dev/null)"
        if [[ "$found" == *passed* ]]; then echo "$found" > "$result"; fi
    else
        found="$(cat "$result")"
    fi
    read -r torch _ megatron transformers _ <<< "$pins"
    echo "| $python | ${torch#*==} | ${megatron#*==} | ${transformers#*==} | $tests | $found |"
done << 'END'
3.11 package torch==2.6.0 triton==3.2.0 megatron-core==0.16.1 transformers==5.0.0 tokenizers==0.22.2 huggingface-hub==1.33.0
3.11 examples torch==2.6.0 triton==3.2.0 megatron-core==0.16.1 transformers==5.18.0 tokenizers==0.23.3 huggingface-hub==2.4.0
3.11 examples torch==2.13.0 triton==3.7.1 megatron-core==0.16.1 transformers==5.24.0 tokenizers==0.23.3 huggingface-hub==2.4.0
3.12 examples torch==2.13.0 triton==3.7.1 megatron-core==0.17.1 transformers==5.18.0 tokenizers==0.23.3 huggingface-hub==2.4.0
3.12 examples torch==2.13.0 triton==3.7.1 megatron-core==0.18.2 transformers==5.18.0 tokenizers==0.23.3 huggingface-hub==2.4.0
3.12 examples torch==2.13.0 triton==3.7.1 megatron-core==0.19.2 transformers==5.24.0 tokenizers==0.23.3 huggingface-hub==2.4.0
3.13 examples torch==2.15.0 triton==3.9.0 megatron-core==0.19.2 transformers==5.24.0 tokenizers==0.23.3 huggingface-hub==2.4.0
END
