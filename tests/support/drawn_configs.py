# SPDX-License-Identifier: Apache-2.0
"""Any point of statistics x reductions x actions x bounds, as a configuration and as rules of the reference."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

import torch
from cases import random_samples, sprinkle
from reference import Samples, read
from reference_rules import LOG_STATISTICS, Rules
from reference_rules import Gate as JudgedGate

import mis_ext

Choice = TypeVar("Choice")
Choose = Callable[[Sequence], Choice]

LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric", "max": "max", "min": "min"}
LEVELS |= {"segment_sum": "segment_sum", "segment_mean": "segment_mean"}
OF_TOKENS = ("token", "segment_sum", "segment_mean")
WEIGHT_BANDS = {"token": (0.75, 1.5), "sequence": (0.5, 2.5), "geometric": (0.95, 1.0625)}


OUTSIDE = 0.15
"""Share of tokens or sequences of the tests below drawn bounds, and above them."""


@functools.cache
def _responses():
    samples = random_samples([1, 2, 3, 5, 9] * 40, seed=1, outliers=0.0)
    # Bounds of a probability are at most 1.
    samples = dataclasses.replace(samples, rollout=[rollout.clamp(max=-1 / 64) for rollout in samples.rollout])
    return read(samples, Rules.from_keys({}))


@functools.cache
def band(statistic: str, reduce: str) -> tuple[float, float]:
    """Bounds that exclude some of the samples according to the reference, and that no value equals."""
    found = []
    for response in _responses():
        values = zip(response.statistic(LEVELS[reduce], statistic), response.valid, strict=True)
        found += [value for value, is_valid in values if is_valid]
    found.sort()
    steps = [place for place, (value, following) in enumerate(itertools.pairwise(found)) if value < following]
    first = next(place for place in steps if place >= len(found) * OUTSIDE)
    last = next((place for place in steps if place >= len(found) * (1 - OUTSIDE) and place > first), steps[-1])
    # Halfway between a value outside and a value inside.
    low, high = ((found[place] + found[place + 1]) / 2 for place in (first, last))
    return (math.exp(low), math.exp(high)) if statistic in LOG_STATISTICS else (low, high)


class Balanced:
    """Returns the least used option of a list. Equal lists share their counts."""

    def __init__(self, random: Random, used: Counter | None = None) -> None:
        self.random, self.used = random, Counter(used)

    def __call__(self, options: Sequence[Choice]) -> Choice:
        chosen = min(options, key=lambda option: (self.used[repr((options, option))], self.random.random()))
        self.used[repr((options, chosen))] += 1
        return chosen


class Point(NamedTuple):
    """The results of the package and of the reference."""

    config: mis_ext.CorrectionConfig
    rules: Rules


def draw_file_config(choose: Choose) -> mis_ext.CorrectionConfig:
    """A configuration that keys of a file can describe: the framework has the flag of a per-token loss."""
    config = draw_point(choose).config.replace(per_token_loss=False)
    if config.scope == "micro_batch" and config.normalize_over is None and config.denominator == "fixed":
        config = config.replace(scope="data_parallel")
    return config


def draw_point(choose: Choose) -> Point:
    """A point; `choose` picks one of a list."""
    weight = _draw_weight(choose)
    gates: list[mis_ext.Gate] = []
    for number in range(choose([1, 2, 3, 4])):
        gates.append(_draw_gate(choose, name=f"g{number}"))
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
    if mis_ext.BOUNDS[mode].rejects:
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
        when="always" if weight is None else weight.when,
        has_lags=config.staleness,
    )
    return Point(config, rules)


def _draw_weight(choose: Choose) -> mis_ext.Weight | None:
    level = choose(["none", "token", "sequence", "geometric"])
    if level == "none":
        return None
    mode = choose(list(mis_ext.BOUNDS))
    bound, (low, high) = mis_ext.BOUNDS[mode], WEIGHT_BANDS[level]
    edges = ({"low": low} if bound.has_low else {}) | ({"high": high} if bound.has_high else {})
    when = choose(["always", "stale"]) if level == "token" and not bound.rejects else "always"
    return mis_ext.Weight(level=level, mode=mode, when=when, **edges)


def _draw_gate(choose: Choose, *, name: str) -> mis_ext.Gate:
    statistic, reduce = choose(list(mis_ext.STATISTICS)), choose(list(LEVELS))
    low, high = band(statistic, reduce)
    sides = choose([{"low": low}, {"high": high}, {"low": low, "high": high}])
    action = choose(["reject", "zero"])
    return mis_ext.Gate(statistic=statistic, reduce=reduce, action=action, name=name, **sides)


def _judged(gate: mis_ext.Gate) -> JudgedGate:
    lowest = 0.0 if gate.statistic in LOG_STATISTICS else -math.inf
    return JudgedGate(
        name=gate.name,
        level=LEVELS[gate.reduce],
        low=lowest if gate.low is None else gate.low,
        high=math.inf if gate.high is None else gate.high,
        statistic=gate.statistic,
        action=gate.action,
    )


def correct_point(point: Point, samples: Samples, *, device: torch.device | str = "cpu") -> mis_ext.Correction:
    """The package's result, with the metrics of tokens."""
    lengths = [mask.numel() for mask in samples.masks]
    proximal_T, behavior_T, mask_R, lag_T = (
        torch.cat([torch.zeros(0), *column]).to(device)
        for column in (samples.train, samples.rollout, samples.masks, samples.lags)
    )
    return mis_ext.compute_correction(
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=behavior_T,
        response_mask_R=mask_R,
        layout=mis_ext.PackedLayout.whole(lengths, device=device),
        config=point.config,
        token_metrics=True,
        lag_T=lag_T,
    )


def broken_batch(lengths: Sequence[int], *, seed: int) -> Samples:
    """Samples with tokens without a ratio."""
    return sprinkle(random_samples(lengths, seed=seed), seed=seed, share=0.03)
