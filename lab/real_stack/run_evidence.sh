#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Studies of the pretrained model on all GPUs of a machine without a network, with what pack_evidence.sh carried there.
#
#   mkdir DIR && tar -xJf ARCHIVE -C DIR
#   lab/real_stack/run_evidence.sh DIR STUDY... [-- further arguments of evidence.py run, such as --seeds 1 2]
#
# WORKERS processes (4) share each GPU and take one run after the other, until none is left; seven took 110 GB of an H200.
# MPS=1 lets them compute at the same time (NVIDIA's Multi-Process Service): without it they take turns. What a run has so
# far, and what finished, lies in lab/evidence/results at any time; `lab/studies/evidence.py list` says how far each is.
# DRY_RUN=1 prints the commands.
set -euo pipefail
site="$(realpath -- "$1")"
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
studies=()
while [[ $# -gt 0 && "$1" != -- ]]; do studies+=("$1"); shift; done
[[ $# -eq 0 ]] || shift
[[ ${#studies[@]} -gt 0 ]] || { echo "which studies? lab/studies/evidence.py list names them" >&2; exit 1; }
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD:$site/site${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
gpus="$(nvidia-smi --list-gpus | wc -l)"
command=("$python" lab/studies/evidence.py run "${studies[@]}" --model "$site/smollm2" --workers "${WORKERS:-4}" "$@")
logs="$site/logs"
if [[ -n "${DRY_RUN:-}" ]]; then
    for ((gpu = 0; gpu < gpus; gpu++)); do echo "CUDA_VISIBLE_DEVICES=$gpu ${command[*]}"; done
    exit
fi
mkdir -p "$logs"
[[ -e "$site/smollm2/config.json" ]] || (cd lab/hosts && "$python" -m slime_gpu.model "$site/smollm2")
if [[ -n "${MPS:-}" ]]; then
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
workers=() status=0
for ((gpu = 0; gpu < gpus; gpu++)); do
    CUDA_VISIBLE_DEVICES="$gpu" "${command[@]}" > "$logs/gpu$gpu.log" 2>&1 &
    workers+=("$!")
done
trap 'kill "${workers[@]}" 2> /dev/null' INT TERM
for worker in "${workers[@]}"; do wait "$worker" || status=$?; done
[[ "$status" -eq 0 ]] || tail -n 20 "$logs"/gpu*.log >&2
"$python" lab/studies/evidence.py list "${studies[@]}"
exit "$status"
