# SPDX-License-Identifier: Apache-2.0
"""The runs of slime: Megatron-LM's trainer, our three flags, the whole loss, and slime's two other hooks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .by_hand import ByHand
from .cases import (
    CHECK,
    CORE,
    FAN_OUT,
    HOOK,
    LOSS,
    SAMPLES_PER_ROLLOUT,
    TRAINING,
    VERSION,
    Case,
    Host,
    flat,
    input_files,
)
from .megatron_cases import CALLED, MODEL_FLAGS, OF_THE_OPTIMIZER, OURS, REFUSED, of_a_mixture, own_corrections
from .parallel_cases import DP, ONE, in_bfloat16, on_two_nodes, on_two_ranks, with_experts

_TWO_STEPS = ("--global-batch-size", str(SAMPLES_PER_ROLLOUT // 2))


def _common(inputs: Path) -> list[str]:
    files = input_files(inputs)
    return [*MODEL_FLAGS, *TRAINING, *flat(files | {"--load": files["--hf-checkpoint"]})]


_HOOKS = (
    Case(
        name="log_mismatch",
        title="three flags, `log_mismatch`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *_TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.log_mismatch"),
        steps_per_rollout=2,
        config="mis.yaml",
        metrics=CORE,
        says=(CALLED, "mismatch of rollout 0"),
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
            "mis_denominator": "kept",
        },
        metrics=CORE,
        says=(CALLED,),
        is_optional=True,
    ),
)

_PREPARED = ("--rollout-data-postprocess-path", "mis_ext.prepare_rollout")
_LAGS = tuple(f"train/mis_{name}" for name in ("lag_mean", "lag_max", "k3_kl_fresh", "k3_kl_stale"))
STALENESS = (
    Case(
        name="staleness",
        title="three flags, `mis_staleness`, two versions in each response",
        flags=("--use-tis", *HOOK, *CHECK, *_PREPARED),
        config={"tis_upper_bound": 2.0, "mis_staleness": True, "update_weight_start_version": int(VERSION)},
        metrics=(*CORE, *_LAGS),
        says=(CALLED,),
        # The metrics change nothing.
        is_alike=True,
        is_optional=True,
    ),
    Case(
        name="max_staleness",
        title="three flags, `rs_max_staleness: 0`, two versions in each response",
        flags=("--use-tis", *HOOK, *CHECK, *_PREPARED),
        config={
            "tis_upper_bound": 2.0,
            "tis_when": "stale",
            "rs_max_staleness": 0,
            "mis_staleness": True,
            "update_weight_start_version": int(VERSION),
        },
        metrics=(*CORE, *_LAGS),
        says=(CALLED,),
        is_optional=True,
    ),
    Case(
        name="no_versions",
        title="`mis_staleness` without `prepare_rollout`",
        flags=("--use-tis", *HOOK, *CHECK),
        config={"tis_upper_bound": 2.0, "mis_staleness": True},
        refusal="mis_staleness needs --rollout-data-postprocess-path mis_ext.prepare_rollout",
        is_optional=True,
    ),
)
_REWARDS = ("--custom-reward-post-process-path", "mis_ext.group_rewards")
_BAND = (0.92, 1.05)
_GATE = {
    "use_tis": True,
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": _BAND[0],
    "rs_upper_bound": _BAND[1],
}


def _of_prompts(name: str, title: str, by_hand: ByHand, *flags: str, **keys: object) -> Case:
    return Case(
        name=name,
        title=title,
        flags=("--use-tis", *LOSS, *CHECK, *flags),
        config={"use_tis": True, "tis_upper_bound": 2.0} | keys,
        metrics=CORE,
        layout=ONE.title,
        is_float32=True,
        is_optional=True,
        by_hand=by_hand,
    )


def prompts() -> Iterator[Case]:
    """Samples that share a prompt or a trajectory, with slime's own baseline and with ours."""
    fan_out = ("--load-debug-rollout-data", f"inputs/{FAN_OUT}/{{rollout_id}}.pt")
    counted = ByHand(folder=FAN_OUT, over="trained")
    yield _of_prompts(
        "fan_out", "a trajectory of two samples, slime's own baseline", replace(counted, over="batch"), *fan_out
    )
    yield _of_prompts("group_rewards", "the same, `group_rewards`", counted, *fan_out, *_REWARDS)
    yield _of_prompts(
        "leave_one_out",
        "the same, `group_rewards`, `mis_group_baseline: leave_one_out`",
        replace(counted, leave_one_out=True),
        *fan_out,
        *_REWARDS,
        mis_group_baseline="leave_one_out",
    )
    off = ByHand(folder="rollouts", over="all", band=_BAND)
    yield _of_prompts("gate", "a gate that rejects samples", off, **_GATE)
    kept = replace(off, over="kept", prompt_mean=True)
    keys = _GATE | {"mis_group_over": "kept", "mis_prompt_mean": True}
    of_kept = _of_prompts("kept", "the same, `mis_group_over: kept`, `mis_prompt_mean`", kept, *_PREPARED, **keys)
    yield of_kept
    yield replace(of_kept, name="kept_dp2", layout=DP.title, flags=(*of_kept.flags, *DP.flags))


_ONE_RANK = (*own_corrections("slime", whose="slime's"), *OURS)
# By default one run has two ranks.
_TWO_RANKS = (in_bfloat16(OURS[0]), in_bfloat16(STALENESS[1]), *on_two_ranks(_ONE_RANK), *on_two_nodes(OURS[0]))
_MIXTURE = of_a_mixture("--load", "inputs/mixture/model")
_MIXTURE += with_experts(_MIXTURE)

SLIME = Host(
    name="slime",
    package="slime",
    title="slime",
    script="lab/hosts/slime_cpu.sh",
    common=_common,
    cases=(*_ONE_RANK, *_HOOKS, *STALENESS, *prompts(), *OF_THE_OPTIMIZER, *_TWO_RANKS, *_MIXTURE, *REFUSED),
    checkouts={"slime": "SLIME_DIR", "Megatron-LM": "MEGATRON_DIR"},
    patches={"Megatron-LM": "slime's docker/patch/latest/megatron.patch"},
    packages=("torch", "ray", "transformers", "sglang", "sglang-router", "numpy"),
    stand_ins={
        "CUDA": "its calls go to the CPU (device.py), NCCL's to gloo, by slime's own registry of accelerators",
        "torch.compile": "leaves functions as they are (device.py)",
        "bfloat16": "float32 in the runs in a layout, by an argument without a flag (train.py)",
        "process groups": "the framework's wrapper passes on two collectives that torch 2.13 renamed (device.py)",
        "Transformer Engine": "a layer spec with its parameter names, and packed attention; with context parallelism "
        "each rank gathers all tokens (layers.py)",
        "the engine": "recorded rollouts in slime's own file format: random tokens, drawn mismatch (inputs.py). "
        "SGLang is imported, and samples nothing",
        "torchvision": "names that SGLang and transformers import (examples/grpo/sglang_cpu)",
    },
)
