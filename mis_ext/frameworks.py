# SPDX-License-Identifier: Apache-2.0
"""The frameworks that call mis_ext by the path of a function, and the function that finds the running one."""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple


class Framework(NamedTuple):
    """The modules of a framework that mis_ext uses.

    Attributes:
        name: The package.
        loss: The module with the function for log-probs. A process that has imported it is a trainer.
        rollout: The module with the state of the rollout.
        engine: The server that samples.
    """

    name: str
    loss: str
    rollout: str
    engine: Literal["sglang", "vllm"]


MILES = Framework(
    "miles", "miles.backends.training_utils.loss_hub.logit_processors", "miles.rollout.sglang_rollout", "sglang"
)
SLIME = Framework("slime", "slime.backends.megatron_utils.loss", "slime.rollout.sglang_rollout", "sglang")
VIME = Framework("vime", "vime.backends.megatron_utils.loss", "vime.rollout.vllm_rollout", "vllm")
"""slime with vLLM. Its loss module is that of slime without later additions."""
FRAMEWORKS = (MILES, SLIME, VIME)


def find_framework(sample: object = None) -> Framework | None:
    """Return the framework that runs, None if there is none.

    A trainer has imported the loss module of its framework. A rollout process may not have imported it, so pass a
    ``sample`` there: its class, or a base of it, is defined in a module of the framework.
    """
    if sample is None:
        return next((each for each in FRAMEWORKS if each.loss in sys.modules), None)
    packages = {cls.__module__.partition(".")[0] for cls in type(sample).__mro__}
    return next((each for each in FRAMEWORKS if each.name in packages), None)
