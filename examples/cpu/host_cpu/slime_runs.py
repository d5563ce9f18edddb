"""The runs of slime: Megatron-LM's trainer, our three flags, the whole loss, and slime's two other hooks."""

import shlex
from pathlib import Path

from .cases import (
    CHECK,
    CORE,
    HOOK,
    LOSS,
    MEASURED,
    MODEL,
    SAMPLES_PER_ROLLOUT,
    TRAINING,
    Case,
    Host,
    flat,
    input_files,
)

_QWEN3 = shlex.split("""
    --swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
    --qk-layernorm --attention-dropout 0 --hidden-dropout 0
""")
# Without Transformer Engine and CUDA kernels.
_ON_CPU = shlex.split("""
    --transformer-impl local --spec host_cpu.layers layer_spec --attention-backend auto
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
""")
_TWO_STEPS = ("--global-batch-size", str(SAMPLES_PER_ROLLOUT // 2))


def _common(inputs: Path) -> list[str]:
    files = input_files(inputs)
    model = flat({f"--{name}": value for name, value in MODEL.items()})
    return [*model, *_QWEN3, *_ON_CPU, *TRAINING, *flat(files | {"--load": files["--hf-checkpoint"]})]


_CALLED = "mis_ext: the host's own loss calls compute_mis_weights_with_cp"
_REPLACED = "mis_ext: policy_loss in place of the host's loss"

_CASES = (
    Case(name="nothing", title="no correction"),
    Case(
        name="slime_tis",
        title="slime's own TIS, cap 2",
        flags=("--use-tis", "--tis-clip", "2", "--tis-clip-low", "0"),
        is_alike=True,
    ),
    Case(
        name="example",
        title="slime's own example of a correction, cap 2",
        flags=("--use-tis", HOOK[0], "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"),
        # It reads all of them.
        config={
            **{"use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0},
            **dict.fromkeys(("tis_lower_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")),
            **{"use_rs": False, "rs_level": "token", "tis_batch_normalize": False},
        },
        is_alike=True,
        is_optional=True,
    ),
    Case(
        name="hook",
        title="three flags",
        flags=("--use-tis", *HOOK, *CHECK),
        config="mis.yaml",
        metrics=CORE,
        says=(_CALLED,),
        is_alike=True,
    ),
    Case(
        name="policy_loss",
        title="`policy_loss`",
        flags=("--use-tis", *LOSS, *CHECK),
        config="mis.yaml",
        metrics=CORE,
        says=(_REPLACED,),
        is_alike=True,
    ),
    Case(
        name="current",
        title="`policy_loss`, `mis_loss_proximal: current`",
        flags=("--use-rollout-logprobs", *LOSS, *CHECK),
        config={"mis_loss_proximal": "current", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=CORE,
        says=(_REPLACED,),
        is_alike=True,
        is_optional=True,
    ),
    Case(
        name="bypass",
        title="`policy_loss`, `mis_loss_mode: bypass`",
        flags=("--use-rollout-logprobs", *LOSS, *CHECK),
        config={"mis_loss_mode": "bypass", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=CORE,
        says=(_REPLACED, "mis_loss_mode: bypass"),
        is_optional=True,
    ),
    Case(
        name="method",
        title="`policy_loss`, `mis_loss_method: icepop`",
        flags=(*LOSS, *CHECK),
        config={"mis_loss_method": "icepop"},
        says=(_REPLACED, "mis_loss_method: icepop"),
        is_optional=True,
    ),
    Case(
        name="metrics_only",
        title="metrics only",
        flags=("--get-mismatch-metrics", *HOOK, *CHECK),
        config="metrics_only.yaml",
        metrics=MEASURED,
        says=(_CALLED, "measures only"),
        is_optional=True,
    ),
    Case(
        name="log_mismatch",
        title="three flags, `log_mismatch`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *_TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.log_mismatch"),
        steps_per_rollout=2,
        config="mis.yaml",
        metrics=CORE,
        says=(_CALLED, "mismatch of rollout 0"),
        is_optional=True,
    ),
    Case(
        name="prepare_rollout",
        title="three flags, `prepare_rollout`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *_TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.prepare_rollout"),
        steps_per_rollout=2,
        config={
            "tis_upper_bound": 2.0,
            "tis_batch_normalize": True,
            "tis_normalize_scope": "rollout",
        },
        metrics=CORE,
        says=(_CALLED,),
        is_optional=True,
    ),
    Case(
        name="misspelt_key",
        title="a misspelt key",
        flags=("--use-tis", *HOOK, *CHECK),
        config={"tis_uper_bound": 2.0},
        refusal="tis_uper_bound",
    ),
    Case(
        name="misspelt_value",
        title="a misspelt value of a flag",
        flags=("--use-tis", HOOK[0], "mis_ext.compute_mis_weight_with_cp", *CHECK),
        config="mis.yaml",
        refusal="compute_mis_weight_with_cp",
    ),
    Case(
        name="misspelt_flag",
        title="a misspelt flag",
        flags=("--use-tis", "--custom-tis-function-pth", HOOK[1], *CHECK),
        config="mis.yaml",
        refusal="mis_ext would not be called: --custom-tis-function-path is not set",
    ),
)


SLIME = Host(
    name="slime",
    common=_common,
    cases=_CASES,
    checkouts={"slime": "SLIME_DIR", "Megatron-LM": "MEGATRON_DIR"},
    patches={"Megatron-LM": "slime's docker/patch/latest/megatron.patch"},
    packages=("torch", "ray", "transformers", "sglang", "sglang-router", "numpy"),
    stand_ins={
        "CUDA": "its calls go to the CPU (device.py), NCCL's to gloo, by slime's own registry of accelerators",
        "torch.compile": "leaves functions as they are (device.py)",
        "Transformer Engine": "a layer spec with packed attention and its parameter names (layers.py)",
        "the engine": "recorded rollouts in slime's own file format: random tokens, drawn mismatch (inputs.py). "
        "SGLang is imported, and samples nothing",
        "torchvision": "names that SGLang and transformers import (examples/grpo/sglang_cpu)",
    },
)
