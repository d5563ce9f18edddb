"""The status of a call: a rank with a local error takes part in every collective, says so there, and raises then.

The status rides in the last row of the statistics, and in the last of the totals: infinity, or minus the number of the
failed rank minus 1. Minima travel through every merge, so that the highest failed rank arrives everywhere.
"""

from __future__ import annotations

import math

from torch import Tensor


def mark_failed(rows: Tensor, rank: int) -> Tensor:
    """``rows`` with a last row that says that ``rank`` failed; changed in place."""
    rows[-1:].clamp_(max=-(rank + 1.0))
    return rows


def failed_rank(status: float) -> int | None:
    """Which rank a status names, or None: no rank failed."""
    return None if math.isinf(status) else round(-status) - 1
