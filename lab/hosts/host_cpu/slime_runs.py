# SPDX-License-Identifier: Apache-2.0
"""The runs of slime: Megatron-LM's trainer, our three flags, the whole loss, and slime's two other hooks."""

from pathlib import Path

from .cases import CHECK, CORE, HOOK, SAMPLES_PER_ROLLOUT, TRAINING, VERSION, Case, Host, flat, input_files
from .megatron_cases import CALLED, MODEL_FLAGS, OF_THE_OPTIMIZER, OURS, REFUSED, of_a_mixture, own_corrections
from .parallel_cases import in_bfloat16, on_two_ranks

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
            "tis_normalize_scope": "rollout",
        },
        metrics=CORE,
        says=(CALLED,),
        is_optional=True,
    ),
)

_LAGS = tuple(
    f"train/mis_{name}" for name in ("lag_mean", "lag_max", "k3_kl_fresh", "k3_kl_stale", "ess_ratio_token_stale")
)
_STALENESS = (
    Case(
        name="staleness",
        title="three flags, `mis_staleness`, two versions in each response",
        flags=("--use-tis", *HOOK, *CHECK, "--rollout-data-postprocess-path", "mis_ext.prepare_rollout"),
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
        flags=("--use-tis", *HOOK, *CHECK, "--rollout-data-postprocess-path", "mis_ext.prepare_rollout"),
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
        refusal="mis_staleness: needs --rollout-data-postprocess-path mis_ext.prepare_rollout",
        is_optional=True,
    ),
)

_ONE_RANK = (*own_corrections("slime", whose="slime's"), *OURS)
# By default one run has two ranks.
_TWO_RANKS = (in_bfloat16(OURS[0]), in_bfloat16(_STALENESS[1]), *on_two_ranks(_ONE_RANK))
_MIXTURE = of_a_mixture("--load", "inputs/mixture/model")

SLIME = Host(
    name="slime",
    package="slime",
    title="slime",
    script="lab/hosts/slime_cpu.sh",
    common=_common,
    cases=(*_ONE_RANK, *_HOOKS, *_STALENESS, *OF_THE_OPTIMIZER, *_TWO_RANKS, *_MIXTURE, *REFUSED),
    checkouts={"slime": "SLIME_DIR", "Megatron-LM": "MEGATRON_DIR"},
    patches={"Megatron-LM": "slime's docker/patch/latest/megatron.patch"},
    packages=("torch", "ray", "transformers", "sglang", "sglang-router", "numpy"),
    stand_ins={
        "CUDA": "its calls go to the CPU (device.py), NCCL's to gloo, by slime's own registry of accelerators",
        "torch.compile": "leaves functions as they are (device.py)",
        "bfloat16": "float32 in the runs in a layout, by an argument that the host has no flag for (train.py)",
        "process groups": "the host's wrapper of one passes on two collectives that torch 2.13 renamed (device.py)",
        "Transformer Engine": "a layer spec with its parameter names, and packed attention; with context parallelism "
        "each rank gathers all tokens (layers.py)",
        "the engine": "recorded rollouts in slime's own file format: random tokens, drawn mismatch (inputs.py). "
        "SGLang is imported, and samples nothing",
        "torchvision": "names that SGLang and transformers import (examples/grpo/sglang_cpu)",
    },
)
