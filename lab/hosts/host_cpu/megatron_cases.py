# SPDX-License-Identifier: Apache-2.0
"""Common parts of the Megatron trainers of slime and Miles: the flags of a small model on a CPU, and the runs."""

import shlex
from dataclasses import replace

from .cases import (
    CHECK,
    CLOSE_IN_BFLOAT16,
    CORE,
    EXPERTS,
    HOOK,
    LOSS,
    MEASURED,
    MODEL,
    PROVIDER,
    SAME,
    Case,
    flat,
)

# Without Transformer Engine and CUDA kernels.
MODEL_FLAGS = [
    *flat({f"--{name}": value for name, value in MODEL.items()}),
    *shlex.split("""
    --swiglu --group-query-attention --position-embedding-type rope --disable-bias-linear --normalization RMSNorm
    --qk-layernorm --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --spec host_cpu.layers layer_spec --attention-backend auto
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    """),
]

EXPERT_FLAGS = [
    *flat({f"--{name}": value for name, value in EXPERTS.items()}),
    *shlex.split("""
    --moe-router-score-function softmax --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall
    """),
]

CALLED = "mis_ext: the framework's loss calls compute_mis_weights_with_cp"
REPLACED = "mis_ext: policy_loss replaces the framework's loss"


def own_corrections(package: str, *, whose: str) -> tuple[Case, ...]:
    """Without a correction, and with those that a host ships: ``whose`` is ``"slime's"``."""
    return (
        Case(name="nothing", title="no correction"),
        Case(
            name=f"{package}_tis",
            title=f"{whose} own TIS, cap 2",
            flags=("--use-tis", "--tis-clip", "2", "--tis-clip-low", "0"),
            is_alike=True,
        ),
        Case(
            name="example",
            title=f"{whose} own example of a correction, cap 2",
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
    )


OURS = (
    Case(
        name="hook",
        title="three flags",
        flags=("--use-tis", *HOOK, *CHECK),
        config="mis.yaml",
        metrics=CORE,
        says=(CALLED,),
        is_alike=True,
    ),
    Case(
        name="policy_loss",
        title="`policy_loss`",
        flags=("--use-tis", *LOSS, *CHECK),
        config="mis.yaml",
        metrics=CORE,
        says=(REPLACED,),
        is_alike=True,
    ),
    Case(
        name="no_logits",
        title="`policy_loss`, `model_provider`",
        flags=("--use-tis", *LOSS, *CHECK, *PROVIDER),
        config="mis.yaml",
        metrics=CORE,
        says=(REPLACED, "mis_ext: model_provider makes no logits"),
        is_alike=True,
        # Logits are float32 there, and rounded to bfloat16 in the other runs.
        close=CLOSE_IN_BFLOAT16,
    ),
    Case(
        name="current",
        title="`policy_loss`, `mis_loss_proximal: current`",
        flags=("--use-rollout-logprobs", *LOSS, *CHECK),
        config={"mis_loss_proximal": "current", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=CORE,
        says=(REPLACED,),
        is_alike=True,
        is_optional=True,
    ),
    Case(
        name="bypass",
        title="`policy_loss`, `mis_loss_mode: bypass`",
        flags=("--use-rollout-logprobs", *LOSS, *CHECK),
        config={"mis_loss_mode": "bypass", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=CORE,
        says=(REPLACED, "mis_loss_mode: bypass"),
        is_optional=True,
    ),
    Case(
        name="method",
        title="`policy_loss`, `mis_loss_method: icepop`",
        flags=(*LOSS, *CHECK),
        config={"mis_loss_method": "icepop"},
        says=(REPLACED, "mis_loss_method: icepop"),
        is_optional=True,
    ),
    Case(
        name="metrics_only",
        title="metrics only",
        flags=("--get-mismatch-metrics", *HOOK, *CHECK),
        config="metrics_only.yaml",
        metrics=MEASURED,
        says=(CALLED, "measures only"),
        is_optional=True,
    ),
)


def of_a_mixture(load: str, path: str) -> tuple[Case, ...]:
    """A mixture of experts: three flags, without and with the host's replay of the experts that sampled, and the loss.

    Args:
        load: The host's flag for its checkpoint.
        path: That checkpoint, in the folder of a run.
    """
    flags = (
        *EXPERT_FLAGS,
        *flat({"--hf-checkpoint": "inputs/mixture/model", load: path}),
        *("--load-debug-rollout-data", "inputs/mixture/rollouts/{rollout_id}.pt"),
    )
    off = Case(
        name="mixture",
        title="three flags, 8 experts",
        flags=("--use-tis", *HOOK, *CHECK, *flags),
        config="mis.yaml",
        metrics=CORE,
        says=(CALLED,),
        is_optional=True,
    )
    replayed = replace(
        off,
        name="mixture_replayed",
        title="three flags, 8 experts, `--use-rollout-routing-replay`",
        flags=(*off.flags, "--use-rollout-routing-replay"),
    )
    loss = replace(
        off,
        name="mixture_loss",
        title="`policy_loss`, 8 experts",
        flags=("--use-tis", *LOSS, *CHECK, *flags),
        says=(REPLACED,),
    )
    return off, replayed, loss


_FP16 = Case(
    name="fp16",
    title="three flags, `--fp16`, a constant loss scale",
    flags=("--use-tis", *HOOK, *CHECK, "--fp16", "--loss-scale", "65536"),
    config="mis.yaml",
    metrics=CORE,
    says=(CALLED,),
    is_alike=True,
    # Its rounding differs from the other runs, which are in bfloat16.
    close=2 * CLOSE_IN_BFLOAT16,
    is_optional=True,
)
# The framework itself makes its gradients too small, so they differ.
_FP16_ADAPTS = replace(
    _FP16,
    name="fp16_adapts",
    title="three flags, `--fp16`, a loss scale that adapts",
    flags=(*_FP16.flags[:-2], "--initial-loss-scale", "65536"),
    is_alike=False,
    close=SAME,
)

OF_THE_OPTIMIZER = (_FP16, _FP16_ADAPTS)

REFUSED = (
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
