"""Whether the host has aborted its rollout: a flag that its own functions look at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mis_ext.rollout.custom_generate.http import host_of


def abort_flag(args: Any, sample: object, state: Any | None) -> Callable[[], bool]:
    """A function that says whether the host has aborted its rollout; always False where no host runs.

    The host aborts the requests of that moment, once. An episode that was with its environment then has none, and only
    the flag tells it.

    Args:
        args: The host's.
        sample: Its class tells the host.
        state: What newer versions of Miles hand over. None: the host's one ``GenerateState``, if its rollout is loaded.
    """
    if state is None:
        rollout = sys.modules.get(f"{host_of(sample)}.rollout.sglang_rollout")
        if rollout is None:
            return lambda: False
        # The one that exists: its class makes no second one.
        state = rollout.GenerateState(args)
    return lambda: bool(state.aborted)
