# SPDX-License-Identifier: Apache-2.0
"""The reference of all other tests: the correction in float64, one sequence at a time, written from the specification.

It imports nothing from `mis_ext`, and is not optimized: rules are in `reference_rules.py`, one response in
`reference_response.py`, metrics in `reference_metrics.py`. A call is a `Samples`: the whole responses that one
data-parallel rank passes to one hook call. `correct` takes the calls of all data-parallel ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from reference_metrics import Record, add_age_metrics, add_correction_metrics, add_mismatch_metrics
from reference_response import Response
from reference_rules import Rules

LAGS = [*[0.0] * 6, *[1.0] * 4, *[2.0] * 4, 3.0, math.nan]


@dataclass(frozen=True)
class Samples:
    """Whole responses of one call on one data-parallel rank: three lists of 1-D tensors.

    The lag of each token follows from its log-prob, so it does not depend on the rank or the order of samples.
    """

    train: list[torch.Tensor]
    rollout: list[torch.Tensor]
    masks: list[torch.Tensor]

    @property
    def lags(self) -> list[torch.Tensor]:
        """Updates since the weights that sampled each token; NaN for some, which are unknown."""
        steps = [(train.float().nan_to_num(0.0, 0.0, 0.0) * 64).round().long() % len(LAGS) for train in self.train]
        return [torch.tensor(LAGS, device=step.device)[step] for step in steps]

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(self.train + other.train, self.rollout + other.rollout, self.masks + other.masks)


@dataclass(frozen=True)
class Corrected:
    """What one call must return.

    `weights` and `masks` hold one float list per sample. `tokens[name]` is the metric as the hook spreads it over the
    whole response (to be compared on response tokens only), `values[name]` the metric as one number, NaN when nothing
    was measured. `margin` is the smallest distance of a log ratio from a bound it was compared with.
    """

    weights: list[list[float]]
    masks: list[list[float]]
    tokens: dict[str, list[list[float]]]
    values: dict[str, float]
    margin: float


def read(samples: Samples, rules: Rules) -> list[Response]:
    """The responses of one call. The exact values of any dtype are used."""
    return [
        Response(t.double().tolist(), r.double().tolist(), [m != 0 for m in mask.tolist()], lags.tolist(), rules)
        for t, r, mask, lags in zip(samples.train, samples.rollout, samples.masks, samples.lags, strict=True)
    ]


def mean_weight(responses: Iterable[Response], rules: Rules) -> float:
    """The normalizer: over tokens for token weights, else over sequences; 1 if nothing counts."""
    counted = []
    for response in responses:
        chosen = response.kept if rules.over == "kept" else response.usable
        weights = [w for w, c in zip(response.weight, chosen, strict=True) if c]
        counted += weights if rules.level == "token" else weights[:1]
    return math.fsum(counted) / len(counted) if counted else 1.0


def survivor_scale(responses: Sequence[Response], *, per_token_loss: bool) -> float:
    """The factor for rejected terms that stay in the framework's denominator; 1 if nothing is kept."""
    counts = [(sum(r.masked), sum(r.response)) for r in responses if any(r.response)]
    if not any(kept for kept, _ in counts):
        return 1.0
    if per_token_loss:
        return sum(total for _, total in counts) / sum(kept for kept, _ in counts)
    return len(counts) / math.fsum(kept / total for kept, total in counts)


def correct(
    calls: Sequence[Samples],
    keys: Mapping | Rules,
    *,
    per_token_loss: bool = False,
) -> list[Corrected]:
    """Correct the calls of all data-parallel ranks."""
    rules = keys if isinstance(keys, Rules) else Rules.from_keys(keys)
    ranks = [read(samples, rules) for samples in calls]
    group = [response for responses in ranks for response in responses]
    out = []
    for responses in ranks:
        scope = responses if rules.scope == "micro_batch" else group
        record = Record(responses, per_token_loss=per_token_loss)
        add_mismatch_metrics(record, group, rules)
        if rules.has_lags:
            add_age_metrics(record, group, rules)
        weights, masks = [], []
        if rules.use_tis:
            m = mean_weight(scope, rules) if rules.normalize else 1.0
            g = survivor_scale(scope, per_token_loss=per_token_loss) if rules.denominator == "kept" else 1.0
            weights = [
                [w / m * g if weighted else 0.0 for w, weighted in zip(r.weight, r.weighted, strict=True)]
                for r in responses
            ]
            masks = [[float(m) for m in response.masked] for response in responses]
            add_correction_metrics(record, group, g / m, rules)
            if rules.normalize:
                record.constant("batch_norm_factor", m)
            if rules.denominator == "kept":
                record.constant("denominator_factor", g)
        margin = min((x for response in group for x in response.margins), default=math.inf)
        out.append(Corrected(weights, masks, record.tokens, record.values, margin))
    return out
