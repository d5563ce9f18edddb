"""Any point of statistics x reductions x actions x bounds, as a configuration and as the rules of the judge."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from cases import random_samples, sprinkle
from reference import Samples
from reference_rules import LOG_STATISTICS, STATISTICS, Rules
from reference_rules import Gate as JudgedGate

import mis_ext

Choice = TypeVar("Choice")
Choose = Callable[[Sequence], Choice]

LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric", "max": "max", "min": "min"}
# Bands that some tokens and some sequences of the tests are outside of, and that no exact number lies on the edge of.
BANDS = {
    "ratio": (0.6, 1.7),
    "abs_log_ratio": (0.05, 0.7),
    "k2": (0.003, 0.3),
    "k3": (0.003, 0.3),
    "probability_difference": (0.01, 0.3),
    "proximal_probability": (0.05, 0.9),
    "behavior_probability": (0.05, 0.9),
}
REDUCED_BANDS = {
    ("ratio", "sum"): (0.3, 3.1),
    ("ratio", "mean"): (0.91, 1.13),
    ("abs_log_ratio", "sum"): (0.1, 2.1),
    ("k2", "sum"): (0.01, 1.03),
    ("k3", "sum"): (0.01, 1.03),
    ("probability_difference", "sum"): (0.02, 0.77),
    ("proximal_probability", "sum"): (1e-4, 0.6),
    ("behavior_probability", "sum"): (1e-4, 0.6),
}
WEIGHT_BANDS = {"token": (0.75, 1.5), "sequence": (0.5, 2.5), "geometric": (0.95, 1.0625)}


class Point(NamedTuple):
    """What the package computes, and what the judge does."""

    config: mis_ext.CorrectionConfig
    rules: Rules


def draw_point(choose: Choose) -> Point:
    """A point; `choose` picks one of a list."""
    weight, condition = _draw_weight(choose)
    gates: list[mis_ext.Gate] = []
    for number in range(choose([1, 2, 3, 4])):
        gates.append(_draw_gate(choose, name=f"g{number}", earlier=gates))
    normalize_over = choose([None, "kept", "valid"]) if weight is not None else None
    config = mis_ext.CorrectionConfig(
        weight=weight,
        gates=tuple(gates),
        normalize_over=normalize_over,
        scope=choose(["micro_batch", "data_parallel"]),
        denominator=choose(["fixed", "kept"]),
        per_token_loss=choose([False, True]),
        metrics="all",
    )
    judged = [_judged(gate) for gate in gates]
    level, mode, (low, high) = "none", "unbounded", (0.5, 2.0)
    if weight is not None:
        level, mode, (low, high) = weight.level, weight.mode, WEIGHT_BANDS[weight.level]
    if mode == "mask":
        judged.insert(0, JudgedGate("tis_mask", level, low, high))
    rules = Rules(
        use_tis=True,
        level=level,
        mode=mode,
        low=low,
        high=high,
        gates=judged,
        normalize=normalize_over is not None,
        scope=config.scope,
        over=normalize_over or "kept",
        denominator=config.denominator,
        metric_max=config.metric_max,
        only_outside=None if condition is None else _judged(condition),
    )
    return Point(config, rules)


def _draw_weight(choose: Choose) -> tuple[mis_ext.Weight | None, mis_ext.Gate | None]:
    level = choose(["none", "token", "sequence", "geometric"])
    if level == "none":
        return None, None
    mode = choose(["truncate", "clip", "mask", "unbounded"])
    low, high = WEIGHT_BANDS[level]
    bounds = {"truncate": {"high": high}, "clip": {"low": low, "high": high}, "mask": {"low": low, "high": high}}
    condition = None
    if level != "token" and mode in ("truncate", "clip") and choose([False, True]):
        drawn = _draw_gate(choose, name="condition", earlier=[], reductions=("sum", "mean", "max", "min"))
        condition = dataclasses.replace(drawn, name=None, action="reject")
    return mis_ext.Weight(level=level, mode=mode, only_outside=condition, **bounds.get(mode, {})), condition


def _draw_gate(
    choose: Choose, *, name: str, earlier: Sequence[mis_ext.Gate], reductions: Sequence[str] = tuple(LEVELS)
) -> mis_ext.Gate:
    statistic, reduce = choose(list(STATISTICS)), choose(list(reductions))
    low, high = REDUCED_BANDS.get((statistic, reduce), BANDS[statistic])
    sides = choose([{"low": low}, {"high": high}, {"low": low, "high": high}])
    on_tokens = [gate.name for gate in earlier if gate.reduce == "token"]
    after = choose([None, *on_tokens]) if reduce != "token" else None
    action = choose(["reject", "zero"])
    return mis_ext.Gate(statistic=statistic, reduce=reduce, action=action, after=after, name=name, **sides)


def _judged(gate: mis_ext.Gate) -> JudgedGate:
    lowest = 0.0 if gate.statistic in LOG_STATISTICS else -math.inf
    return JudgedGate(
        name=gate.name,
        level=LEVELS[gate.reduce],
        low=lowest if gate.low is None else gate.low,
        high=math.inf if gate.high is None else gate.high,
        statistic=gate.statistic,
        action=gate.action,
        after=gate.after,
    )


def correct_point(point: Point, samples: Samples, *, device: torch.device | str = "cpu") -> mis_ext.Correction:
    """The package's answer, with the metrics of tokens."""
    lengths = [mask.numel() for mask in samples.masks]
    proximal_T, behavior_T, mask_R = (
        torch.cat([torch.zeros(0), *column]).to(device) for column in (samples.train, samples.rollout, samples.masks)
    )
    return mis_ext.compute_correction(
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=behavior_T,
        response_mask_R=mask_R,
        layout=mis_ext.PackedLayout.whole(lengths, device=device),
        config=point.config,
        token_metrics=True,
    )


def broken_batch(lengths: Sequence[int], *, seed: int) -> Samples:
    """Samples with tokens without a ratio."""
    return sprinkle(random_samples(lengths, seed=seed), seed=seed, share=0.03)
