# SPDX-License-Identifier: Apache-2.0
"""The runs of Miles with its Megatron trainer: its fork of Megatron-LM, and a checkpoint that its own tool wrote."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .cases import CHECK, CLOSE_IN_BFLOAT16, CORE, HOOK, TRAINING, Case, Host, flat, input_files
from .megatron_cases import (
    CALLED,
    EXPERT_FLAGS,
    MODEL_FLAGS,
    OF_THE_OPTIMIZER,
    OURS,
    REFUSED,
    of_a_mixture,
    own_corrections,
)
from .miles_runs import MILES
from .parallel_cases import allgather_cp, on_two_ranks, with_experts
from .slime_runs import STALENESS, prompts

_BACKEND = ("--train-backend", "megatron", "--distributed-backend", "gloo")


def _checkpoint(inputs: Path) -> str:
    return str(inputs / "megatron")


def _common(inputs: Path) -> list[str]:
    return [*MODEL_FLAGS, *_BACKEND, *TRAINING, *flat(input_files(inputs) | {"--ref-load": _checkpoint(inputs)})]


def _conversions(inputs: Path) -> list[list[str]]:
    dense = [*MODEL_FLAGS, "--hf-checkpoint", input_files(inputs)["--hf-checkpoint"], "--save", _checkpoint(inputs)]
    mixture = inputs / "mixture"
    return [
        dense,
        [*MODEL_FLAGS, *EXPERT_FLAGS, *flat({"--hf-checkpoint": mixture / "model", "--save": mixture / "megatron"})],
    ]


def _refused() -> tuple[Case, ...]:
    """Miles' parser itself refuses a flag that it does not know."""
    *keys, flag = REFUSED
    return (*keys, replace(flag, refusal="unrecognized arguments: --custom-tis-function-pth"))


_WITHOUT_SCORING = Case(
    name="no_scoring_pass",
    title="three flags, `--skip-actor-forward-only`",
    flags=("--use-tis", "--skip-actor-forward-only", *HOOK, *CHECK),
    config="mis.yaml",
    metrics=CORE,
    says=(CALLED,),
    is_alike=True,
    is_optional=True,
)


def _of_rollouts() -> Iterator[Case]:
    """Features of both frameworks: lags of tokens, and baselines of prompts as rewards."""
    for case in STALENESS:
        if isinstance(case.config, dict) and case.refusal is None:
            yield replace(case, config={k: v for k, v in case.config.items() if k != "update_weight_start_version"})
    yield from (case for case in prompts() if case.name in ("group_rewards", "leave_one_out"))


_ONE_RANK = (*own_corrections("miles", whose="Miles'"), *OURS)


def _rounded(case: Case) -> Case:
    """Megatron-LM's fused cross-entropy, by which Miles scores, rounds its gradient to bfloat16. Ours does not."""
    return replace(case, close=CLOSE_IN_BFLOAT16) if case.name.startswith(("policy_loss", "no_logits")) else case


_TWO_RANKS = tuple(_rounded(case) for case in (*on_two_ranks(_ONE_RANK), *allgather_cp(_ONE_RANK)))
_MIXTURE = of_a_mixture("--ref-load", "inputs/mixture/megatron")
_MIXTURE += with_experts(_MIXTURE)

MILES_MEGATRON = Host(
    name="miles_megatron",
    package="miles",
    title="Miles' Megatron trainer",
    script="lab/hosts/miles_megatron_cpu.sh",
    common=_common,
    conversions=_conversions,
    cases=(*_ONE_RANK, _WITHOUT_SCORING, *_of_rollouts(), *OF_THE_OPTIMIZER, *_TWO_RANKS, *_MIXTURE, *_refused()),
    checkouts={"Miles": "MILES_DIR", "Megatron-LM, Miles' fork": "MILES_MEGATRON_DIR"},
    patches={},
    packages=(*(name for name in MILES.packages if name != "megatron-core"), "mbridge"),
    stand_ins={
        "CUDA": "its calls go to the CPU (device.py), NCCL's to gloo, by Miles' own flag",
        "torch.compile": "leaves functions as they are (device.py)",
        "bfloat16": "float32 in the runs in a layout, by an argument without a flag (train.py)",
        "process groups": "the framework's wrapper passes on two collectives that torch 2.13 renamed (device.py)",
        "Transformer Engine": "a layer spec with its parameter names, and packed attention; with context parallelism "
        "each rank gathers all tokens (layers.py)",
        "Megatron-Bridge": "is not installed: Miles' own tool converts the weights with mbridge (convert.py)",
        "Mooncake, and three names of Miles' own SGLang": "classes that do nothing, for weights sent from machine to "
        "machine (weight_transfer.py)",
        "the engine": MILES.stand_ins["the engine"],
        "torchvision": MILES.stand_ins["torchvision"],
    },
)
