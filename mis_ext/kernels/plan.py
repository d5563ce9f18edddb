"""What a configuration means to the kernels: their compile-time arguments, and so which kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from mis_ext.config import Band, CorrectionConfig, GateFactor
from mis_ext.kernels.launch import BoundKernel
from mis_ext.kernels.metric_rows import metric_rows
from mis_ext.kernels.output_kernels import output_kernel
from mis_ext.kernels.rows import GEOMETRIC_LEVEL, NO_LEVEL, SEQUENCE_LEVEL, TOKEN_LEVEL
from mis_ext.kernels.sequence_kernels import decisions_kernel
from mis_ext.kernels.tiles import TILE
from mis_ext.kernels.token_kernels import keep_bits_kernel, token_statistics_kernel
from mis_ext.metric_names import PREFIX

_LEVELS = {None: NO_LEVEL, "token": TOKEN_LEVEL, "sequence": SEQUENCE_LEVEL, "geometric": GEOMETRIC_LEVEL}

SEQUENCES_PER_BLOCK = 256


class Plan(NamedTuple):
    """The kernels of a configuration, and the public names of the rows that ``outputs`` writes.

    The kernel for ``decisions`` depends on how many ranks share the sequences.
    """

    token_statistics: BoundKernel
    keep_bits: BoundKernel
    decisions: Callable[[int], BoundKernel]
    outputs: BoundKernel
    metric_names: tuple[str, ...]


@functools.lru_cache(maxsize=16)
def plan_of(config: CorrectionConfig, *, host_metrics: bool, is_whole: bool) -> Plan:
    """The plan of ``config``, with metric rows or without, for whole responses or parts of them."""
    weight_constants = _weight_constants(config)
    token_low, token_high = _intersection(config, "token")
    token_gate = {"TOKEN_LOW": token_low, "TOKEN_HIGH": token_high}
    rows = metric_rows(config) if host_metrics else []
    names = config.selected_metrics if host_metrics else ()
    return Plan(
        token_statistics=BoundKernel(
            token_statistics_kernel,
            **weight_constants,
            **token_gate,
            TILE=TILE,
        ),
        keep_bits=BoundKernel(keep_bits_kernel, **token_gate, TILE=TILE),
        decisions=functools.cache(functools.partial(_decisions, config)),
        outputs=BoundKernel(
            output_kernel,
            **weight_constants,
            **token_gate,
            IS_CORRECTED=not config.metrics_only,
            IS_WHOLE=is_whole,
            IS_NORMALIZED=config.normalize_over is not None,
            HAS_KEPT_DENOMINATOR=config.denominator == "kept",
            SCOPE_IS_GROUP=config.scope == "data_parallel",
            SCOPE_IS_ROLLOUT=config.scope == "rollout",
            OPERATIONS=tuple(row.operation.value for row in rows),
            POPULATIONS=tuple(row.population.value for row in rows),
            SOURCES=tuple(row.source.value for row in rows),
            BOUNDS=tuple(row.bound for row in rows),
            METRIC_MAX=float(config.metric_max),
            TILE=TILE,
        ),
        metric_names=tuple(PREFIX + name for name in names),
    )


def _decisions(config: CorrectionConfig, num_ranks: int) -> BoundKernel:
    return BoundKernel(
        decisions_kernel,
        **_weight_constants(config),
        **_sequence_gates(config),
        REJECTS_WHOLE_SEQUENCES=config.rejects_whole_sequences,
        NORMALIZE_OVER_KEPT=config.normalize_over == "kept",
        PER_TOKEN_LOSS=config.per_token_loss,
        NUM_RANKS=num_ranks,
        BLOCK=SEQUENCES_PER_BLOCK,
    )


def _weight_constants(config: CorrectionConfig) -> dict[str, float]:
    weight = config.weight
    band = Band() if weight is None else weight.clip_band
    return {
        "WEIGHT_LEVEL": _LEVELS[None if weight is None else weight.level].value,
        "WEIGHT_LOW": float(band.low),
        "WEIGHT_HIGH": float(band.high),
    }


def _sequence_gates(config: CorrectionConfig) -> dict[str, float]:
    sequence_low, sequence_high = _intersection(config, "sequence")
    geometric_low, geometric_high = _intersection(config, "geometric")
    return {
        "SEQUENCE_LOW": sequence_low,
        "SEQUENCE_HIGH": sequence_high,
        "GEOMETRIC_LOW": geometric_low,
        "GEOMETRIC_HIGH": geometric_high,
        "VETO_LOW": _intersection(config, "sequence_min")[0],
        "VETO_HIGH": _intersection(config, "sequence_max")[1],
        "VETO_PROBABILITY": _intersection(config, "sequence_min", statistic="proximal_probability")[0],
    }


def _intersection(config: CorrectionConfig, level: str, *, statistic: str = "ratio") -> tuple[float, float]:
    """Log edges of what all gates of a level and statistic let through."""
    gates: list[GateFactor] = [g for g in config.all_gates if g.level == level and g.statistic == statistic]
    low = max((gate.band.log_low for gate in gates), default=-math.inf)
    high = min((gate.band.log_high for gate in gates), default=math.inf)
    return low, high
