# SPDX-License-Identifier: Apache-2.0
"""Lets runs of a host that start side by side train one after the other, each alone on its machine.

slime and Miles call `wait` with ``--custom-megatron-before-train-step-hook-path slime_gpu.in_turn.wait``. The
first step of a run waits until the runs before it have ended: a lock on the file ``TURN_LOCK``, which ends with the
run's process.
"""

import fcntl
import os
from typing import Any, TextIO

_held: list[TextIO] = []


def wait(*_: Any) -> None:
    """Return at once where this process has its turn already."""
    if not _held:
        file = open(os.environ["TURN_LOCK"], "w")  # noqa: SIM115 (closed at the end of the process)
        fcntl.flock(file, fcntl.LOCK_EX)
        _held.append(file)
