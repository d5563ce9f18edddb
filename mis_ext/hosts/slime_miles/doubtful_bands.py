"""Bands of gates that are legal and hardly meant: they reject by chance, or were chosen for another level."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from mis_ext.correction.gates import Gate

_NEAR_ONE = 0.02
"""The standard deviation of a token's log-ratio at a k3 of 2e-4, sqrt(2 * k3): chance alone moves a ratio so far."""
_USUAL = {"token": "0.5 and 2", "sequence": "0.5 and 2 for short responses", "geometric": "0.99 and 1.001"}


def warn_inherited_band(keys: Iterable[str], *, level: str, weight_level: str, low: float, high: float) -> None:
    """Warn where bounds of a gate come from a weight that has another level.

    Args:
        keys: The bounds that are not set.
        level: Of the gate.
        weight_level: Of the weight, ``none`` where there is no weight: then its bounds are the gate's alone.
        low: Lower bound of the weight.
        high: Upper bound of the weight.
    """
    unset = " and ".join(keys)
    if unset and weight_level not in (level, "none"):
        warnings.warn(
            f"{unset} of the {level}-level gate come from the {weight_level}-level tis bounds [{low:g}, {high:g}]: a "
            f"band of one level is too wide or too narrow at another. Set them (usual at this level: {_USUAL[level]}), "
            "or rs_level",
            stacklevel=5,
        )


def warn_narrow_bands(gates: Iterable[Gate]) -> None:
    """Warn of bands that only geometric means have, where something else is compared with them."""
    for gate in gates:
        if gate.statistic != "ratio" or gate.reduce.endswith("mean") or gate.target_accept is not None:
            continue
        if all(edge is not None and abs(edge - 1.0) < _NEAR_ONE for edge in (gate.low, gate.high)):
            warnings.warn(
                f"a gate on ratio, reduce: {gate.reduce}, with bounds {gate.low:g} to {gate.high:g} rejects much by "
                f"chance: at a k3 of 2e-4 the ratio of a token differs from 1 by {_NEAR_ONE:g}. Such a narrow band is "
                "for a geometric mean (reduce: mean, level: geometric)",
                stacklevel=5,
            )
