# SPDX-License-Identifier: Apache-2.0
# What the runs of slime and of Miles on one GPU have in common: paths, the model, its tasks, and flags that both hosts
# know. To be sourced, from the repository's root, when host, host_dir and megatron_dir are set and "$@" are the flags of
# the user. Sets python, out, model, config, train_only, attention, layers, model_args, train_args, rollout_args,
# own_engine, mis_args.

root="$PWD"
python="${PYTHON:-python3}"
out="$(realpath -m -- "${OUT:-runs/${host}_gpu}")"
model="$(realpath -m -- "${MODEL:-$out/model}")"
config="${CONFIG-yaml/mis.yaml}"
train_only=""
[[ " $* " != *" --debug-train-only "* ]] || train_only=1

export ON_CPU="${ON_CPU:-}"
# Both hosts have a package "examples": ours is not on their path, only one folder of it.
export PYTHONPATH="$megatron_dir:$host_dir:$root:$root/lab/hosts:$root/examples/questions${PYTHONPATH:+:$PYTHONPATH}"
# Torchvision's names, where it is not installed.
[[ -z "$ON_CPU" ]] || export PYTHONPATH="$PYTHONPATH:$root/examples/grpo/sglang_cpu"
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
read -ra shape <<< "$("$python" lab/hosts/slime_gpu/shape.py "$model")"
model_args=(
    "${shape[@]}" --swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
)
train_args=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --hf-checkpoint "$model"
    --optimizer adam --lr 1e-5 --lr-decay-style constant --weight-decay 0 --adam-beta1 0.9 --adam-beta2 0.95
    --use-dynamic-batch-size --max-tokens-per-gpu 8192
    --use-tensorboard
)
rollout_args=(
    --prompt-data "$out/prompts.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --custom-rm-path arithmetic.reward
    --num-rollout 20 --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps-per-rollout 1
    --rollout-max-response-len 32 --rollout-temperature 1
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0 --kl-coef 0
)
# Of an engine that the host starts itself.
own_engine=(--rollout-num-gpus-per-engine 1 --sglang-dtype bfloat16 --sglang-sampling-backend pytorch --sglang-grammar-backend none
    --sglang-mem-fraction-static "${GPU_SHARE:-0.3}")
if [[ -n "$ON_CPU" ]]; then
    export SGLANG_USE_CPU_ENGINE=1
    # Overlapped, SGLang 0.5.17 overwrites the experts of a token before it keeps them: on a CPU it copies nothing.
    own_engine+=(--sglang-device cpu --sglang-attention-backend torch_native --sglang-max-total-tokens 16384
        --sglang-max-running-requests 32 --sglang-disable-overlap-schedule)
else
    own_engine+=(--sglang-attention-backend triton --sglang-max-running-requests 512 --sglang-disable-prefill-cuda-graph)
fi
mis_args=()
if [[ -n "$config" ]]; then
    read -ra mis_args <<< "$("$python" examples/launch_flags.py "$config")"
    mis_args+=(--custom-megatron-init-path mis_ext.check_setup)
fi

prepare_model() {
    mkdir -p "$out"
    [[ -e "$model/config.json" ]] || "$python" -m slime_gpu.model "$model"
}

# Says what is missing, and writes the model and the tasks.
prepare_inputs() {
    "$python" -m slime_gpu.check "$host"
    prepare_model
    [[ -e "$out/prompts.jsonl" ]] || "$python" -m arithmetic "$out/prompts.jsonl"
}

# Of the run's dumps, into OUT/report; without Jinja2 only the numbers.
write_report() {
    local report=("$python" -m mis_ext report "$out/dumps/train_data" --trust-pickle ${config:+--config "$config"})
    mkdir -p "$out/report"
    if "$python" -c 'import jinja2' 2> /dev/null; then
        report+=(--out "$out/report")
        "${report[@]}"
    else
        "${report[@]}" --json > "$out/report/summary.json"
    fi || echo "mis-ext report failed; the training did not" >&2
}
