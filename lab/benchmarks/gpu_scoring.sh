#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_scoring.py on one GPU, in steps that each end in time, so that a limit on the whole takes nothing with it.
#
#   lab/benchmarks/gpu_scoring.sh HOSTS OUTPUT_DIR [STEP...]
#
# HOSTS holds checkouts miles/ and slime/, flash_attn/cross_entropy.py (flash_attn/ops/triton/cross_entropy.py of
# flash-attention), and, where the network cannot be reached, wheels/ with what is not installed. Steps are alone,
# problems of part A, such as 8x2048:151936:float32, and such a problem with the ranks behind it: :tp2, :cp4,
# :tp2cp2, :cp2dp2, whose product is the number of GPUs. Without any: all on one GPU. SECONDS_IN_ALL bounds the whole (default 570), STEP_SECONDS one step (default 200), BUDGET
# the timed calls of a row (default 1), DEVICE is cuda unless it is set. On two GPUs, beside what each of them has to do:
#
#   lab/benchmarks/gpu_scoring.sh HOSTS OUTPUT_DIR 8x2048:151936:float32:tp2 8x2048:75968:float32 \
#       8x2048:151936:float32:cp2 8x1024:151936:float32
#
# On four, and with 8 in the place of 4 on eight:
#
#   lab/benchmarks/gpu_scoring.sh HOSTS OUTPUT_DIR 8x2048:151936:float32:tp4 8x2048:37984:float32 \
#       8x2048:151936:float32:cp4 8x512:151936:float32 8x2048:151936:float32:tp2cp2 8x2048:151936:float32:cp2dp2
#
# Every step adds to OUTPUT_DIR/scoring.json; OUTPUT_DIR/scoring.md has the tables, OUTPUT_DIR/scoring.log what was said.
set -uo pipefail
hosts="$(cd -- "$1" && pwd)"
mkdir -p "$2"
output="$(cd -- "$2" && pwd)"
shift 2
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
deadline=$((SECONDS + ${SECONDS_IN_ALL:-570}))
steps=("$@")
if [ "$#" -eq 0 ]; then
    steps=(8x2048:151936:float32 64x2048:64:float32 256x1024:64:float32 alone 8x2048:151936:bfloat16)
fi
export PYTHONUNBUFFERED=1 PYTHONPATH="${PWD}${PYTHONPATH:+:${PYTHONPATH}}"
if compgen -G "${hosts}/wheels/*.whl" > /dev/null; then
    site="$(mktemp -d)"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "${site}" \
        "${hosts}"/wheels/*.whl || exit
    export PYTHONPATH="${PYTHONPATH}:${site}"
fi
# New lengths at every call leave holes in the allocator's memory, as in training; slime's scripts set this too.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# On a machine without a network.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
status=0
for step in "${steps[@]}"; do
    left=$((deadline - SECONDS))
    if [ "${left}" -lt 20 ]; then
        echo "no time left for ${step}" | tee -a "${output}/scoring.log"
        status=1
        continue
    fi
    if [ "${left}" -gt "${STEP_SECONDS:-200}" ]; then
        left="${STEP_SECONDS:-200}"
    fi
    launch=(python3)
    case "${step}" in
        alone) chosen=(--parts B) ;;
        *:[tcd]p[0-9]*)
            by="${step##*:}" ranks=1
            chosen=(--parts A --problems "${step%:*}")
            while [[ "${by}" =~ ^([tcd]p)([0-9]+)(.*)$ ]]; do
                ranks=$((ranks * BASH_REMATCH[2]))
                # What the others leave is data-parallel.
                [[ "${BASH_REMATCH[1]}" == dp ]] || chosen+=("--${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}")
                by="${BASH_REMATCH[3]}"
            done
            [[ -z "${by}" ]] || { echo "${step}: ranks are tp, cp and dp with a number, as in tp2cp2" >&2; exit 1; }
            launch=(python3 -m torch.distributed.run --standalone --nproc-per-node "${ranks}")
            ;;
        *) chosen=(--parts A --problems "${step}") ;;
    esac
    echo "== ${step}, at most ${left} s" | tee -a "${output}/scoring.log"
    timeout "${left}" "${launch[@]}" lab/benchmarks/bench_scoring.py --device "${DEVICE:-cuda}" --miles "${hosts}/miles" \
        --slime "${hosts}/slime" --flash-attn "${hosts}/flash_attn/cross_entropy.py" --budget "${BUDGET:-1}" --keep-going \
        --json "${output}/scoring.json" ${EXTRA:-} "${chosen[@]}" 2>&1 | tee -a "${output}/scoring.log" || status=1
    python3 lab/benchmarks/bench_scoring.py --show "${output}/scoring.json" > "${output}/scoring.md" || status=1
done
exit "${status}"
