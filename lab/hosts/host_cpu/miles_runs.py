# SPDX-License-Identifier: Apache-2.0
"""The runs of Miles, with its FSDP trainer, which needs no Megatron-LM beside Megatron-Core's wheel.

That trainer does not call ``--custom-megatron-init-path``, so errors in our keys are raised in the first step.
"""

import shlex
from pathlib import Path

from .cases import CORE, HOOK, LOSS, MEASURED, TRAINING, Case, Host, flat, input_files

_ON_CPU = shlex.split("--train-backend fsdp --distributed-backend gloo --attn-implementation sdpa")


def _common(inputs: Path) -> list[str]:
    return [*_ON_CPU, *TRAINING, *flat(input_files(inputs))]


_CASES = (
    Case(name="nothing", title="no correction"),
    Case(
        name="miles_tis",
        title="Miles' own TIS, cap 2",
        flags=("--use-tis", "--tis-clip", "2", "--tis-clip-low", "0"),
        is_alike=True,
    ),
    Case(
        name="hook",
        title="three flags",
        flags=("--use-tis", *HOOK),
        config="mis.yaml",
        metrics=CORE,
        is_alike=True,
    ),
    Case(
        name="policy_loss",
        title="`policy_loss`",
        flags=("--use-tis", *LOSS),
        config="mis.yaml",
        metrics=CORE,
        is_alike=True,
    ),
    Case(
        name="bypass",
        title="`policy_loss`, `mis_loss_mode: bypass`",
        flags=("--use-rollout-logprobs", *LOSS),
        config={"mis_loss_mode": "bypass", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=CORE,
        is_optional=True,
    ),
    Case(
        name="method",
        title="`policy_loss`, `mis_loss_method: icepop`",
        flags=LOSS,
        config={"mis_loss_method": "icepop"},
        is_optional=True,
    ),
    Case(
        name="metrics_only",
        title="metrics only",
        flags=("--get-mismatch-metrics", *HOOK),
        config="metrics_only.yaml",
        metrics=MEASURED,
        is_optional=True,
    ),
    Case(
        name="misspelt_key",
        title="a misspelt key",
        flags=("--use-tis", *HOOK),
        config={"tis_uper_bound": 2.0},
        refusal="tis_uper_bound",
    ),
)

MILES = Host(
    name="miles",
    package="miles",
    title="Miles",
    script="lab/hosts/miles_cpu.sh",
    common=_common,
    cases=_CASES,
    checkouts={"Miles": "MILES_DIR"},
    patches={},
    packages=("torch", "ray", "transformers", "sglang", "sglang-router", "megatron-core", "numpy"),
    stand_ins={
        "CUDA": "its calls and meshes go to the CPU (device.py), NCCL's to gloo, by Miles' own flag",
        "torch.compile": "leaves functions as they are (device.py)",
        "the engine": "recorded rollouts in Miles' own file format: random tokens, drawn mismatch (inputs.py). "
        "SGLang is imported, and samples nothing",
        "torchvision": "names that SGLang and transformers import (examples/grpo/sglang_cpu)",
    },
)
