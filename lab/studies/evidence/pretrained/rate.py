# SPDX-License-Identifier: Apache-2.0
"""A learning rate that falls as k3 grows: a slower learner in place of a correction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# k3 of the first steps is what its mean over the last few is compared with.
FIRST_STEPS, LAST_STEPS = 10, 5
LOWEST = 0.1


def share(k3: Sequence[float]) -> float:
    """Of the learning rate that is taken after these steps: k3 that is twice what it was at first halves it.

    Never above 1, never below `LOWEST`.
    """
    first, lately = float(np.mean(k3[:FIRST_STEPS])), float(np.mean(k3[-LAST_STEPS:]))
    return 1.0 if lately <= first else max(LOWEST, first / lately)
