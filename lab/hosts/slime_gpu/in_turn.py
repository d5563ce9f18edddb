# SPDX-License-Identifier: Apache-2.0
"""Lets runs of a host that start side by side train one after the other, each alone on its machine.

slime and Miles call `wait` with ``--custom-megatron-before-train-step-hook-path slime_gpu.in_turn.wait``. The
first step of a run waits until the runs before it have ended: a lock on the file ``TURN_LOCK``, which ends with the
run's process.
"""

import fcntl
import os
from typing import Any, TextIO

from torch import distributed

_held: list[TextIO] = []


def wait(*_: Any) -> None:
    """Return at once where this process has its turn already, or another rank of its run waits for all of them."""
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    if not _held and is_first:
        file = open(os.environ["TURN_LOCK"], "w")  # noqa: SIM115 (closed at the end of the process)
        fcntl.flock(file, fcntl.LOCK_EX)
        _held.append(file)
