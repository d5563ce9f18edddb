# SPDX-License-Identifier: Apache-2.0
"""Every number of the report against its definition, token by token in Python's own floats."""

import dataclasses
import math
import random
import statistics
from collections import defaultdict

import pytest
import torch

import mis_ext
from mis_ext.tools.report import Collector, Origin, Part
from mis_ext.tools.report.summary import Group, Mismatch
from mis_ext.tools.report.tally import k_hat
from mis_ext.tools.report.what_if import Outcome

QUANTILE = 0.012
"""Relative width of a bin: quantiles are read off bins."""

TOKENS, MEANS = "tokens: 0.7 <= rho_t <= 1.4", "means: 0.93 <= (prod_t rho_t)^(1/T) <= 1.07"
CONFIG = mis_ext.CorrectionConfig(
    weight=mis_ext.Weight(mode="clip", low=0.9, high=1.1),
    gates=(
        mis_ext.Gate(low=0.7, high=1.4, name="tokens"),
        mis_ext.Gate(reduce="mean", low=0.93, high=1.07, name="means"),
    ),
)


@dataclasses.dataclass
class Token:
    """A trained token with both log-probs."""

    d: float
    proximal: float
    behavior: float
    position: int
    turn: int
    advantage: float
    behind: float

    @property
    def ratio(self) -> float:
        return math.exp(self.d)


@dataclasses.dataclass
class Sample:
    """As it was drawn; ``tokens`` are those that have a ratio."""

    proximal: torch.Tensor
    behavior: torch.Tensor
    mask: torch.Tensor
    advantage: float
    origin: Origin
    step: str
    tokens: list[Token]

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())


def draw(seed: int) -> list[Sample]:
    """60 samples of two steps: masks with gaps, tokens without a ratio, equal log-probs, a sample without any token."""
    rng, samples = random.Random(seed), []
    for number in range(60):
        length = rng.randint(1, 40)
        behavior = torch.tensor([-4.0 * rng.random() ** 2 - 1e-3 for _ in range(length)])
        spread = rng.choice((0.03, 0.3))
        noise = torch.tensor([0.0 if rng.random() < 0.1 else rng.gauss(0.0, spread) for _ in range(length)])
        proximal = behavior + noise
        mask = torch.tensor([rng.random() < 0.8 for _ in range(length)]) & (number != 7)
        for index in range(length):
            if rng.random() < 0.02:
                rng.choice((proximal, behavior))[index] = rng.choice((math.nan, -math.inf))
        advantage = rng.choice((-1.5, 0.0, 0.5, math.nan))
        reward = rng.choice((0.0, 0.25, 1.0, math.nan))
        origin = Origin(
            reward=reward,
            versions_behind=rng.choice((0.0, 1.0, 3.0, math.nan)),
            group=None if number % 10 == 9 else number // 4,
        )
        tokens, turn = [], -1
        for index in range(length):
            if mask[index] and not (index and mask[index - 1]):
                turn += 1
            ours, theirs = float(proximal[index]), float(behavior[index])
            if mask[index] and math.isfinite(ours) and math.isfinite(theirs):
                tokens.append(Token(ours - theirs, ours, theirs, index, turn, advantage, origin.versions_behind))
        samples.append(Sample(proximal, behavior, mask, advantage, origin, str(number // 30), tokens))
    return samples


def collected(samples: list[Sample], **configs: mis_ext.CorrectionConfig) -> Collector:
    collector = Collector(configs)
    # A step in two parts, as of two files: with every second sample, so that both have some of each group.
    for step, part in (("0", 0), ("1", 0), ("1", 1), ("0", 1)):
        chosen = [sample for sample in samples if sample.step == step][part::2]
        collector.add(
            Part.of_lists(
                proximal=[sample.proximal for sample in chosen],
                behavior=[sample.behavior for sample in chosen],
                masks=[sample.mask for sample in chosen],
                advantages=[
                    None if math.isnan(sample.advantage) else torch.tensor(sample.advantage) for sample in chosen
                ],
                origins=[sample.origin for sample in chosen],
                step=step,
            )
        )
    return collector


def mean(values) -> float:
    values = [*values]
    return math.fsum(values) / len(values) if values else math.nan


def kish(weights) -> float:
    weights = [*weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight**2 for weight in weights))


def quantile(values, share: float) -> float:
    """The smallest of the values that a share of them is not above."""
    values = sorted(values)
    return values[math.ceil(share * len(values)) - 1]


def oracle_of_mismatch(samples: list[Sample]) -> dict[str, object]:
    tokens = [token for sample in samples for token in sample.tokens]
    measured = [sample for sample in samples if sample.tokens]
    gaps = [abs(token.d) for token in tokens]
    ratios = [token.ratio for token in tokens]
    products = [math.fsum(token.d for token in sample.tokens) for sample in measured]
    return {
        "num_sequences": len(samples),
        "num_tokens": len(tokens),
        "num_masked": sum(len(sample.mask) - sample.num_trained for sample in samples),
        "num_without_ratio": sum(sample.num_trained for sample in samples) - len(tokens),
        "mean_length": len(tokens) / len(measured),
        "k1": -mean(token.d for token in tokens),
        "k3": mean(ratio - 1 - token.d for ratio, token in zip(ratios, tokens, strict=True)),
        "reverse_k3": mean(ratio * token.d - ratio + 1 for ratio, token in zip(ratios, tokens, strict=True)),
        "abs_mean": mean(gaps),
        "abs_p50": pytest.approx(quantile(gaps, 0.5), rel=QUANTILE),
        "abs_p99": pytest.approx(quantile(gaps, 0.99), rel=QUANTILE),
        "abs_p999": pytest.approx(quantile(gaps, 0.999), rel=QUANTILE),
        "abs_max": max(gaps),
        "total_variation": mean(1 - min(1.0, ratio) for ratio in ratios),
        "ratio_mean": mean(ratios),
        "ess_token": kish(ratios),
        "ess_sequence": kish(map(math.exp, products)),
        # Against theory in test_report.py; here, that it is of the products.
        "k_hat": k_hat(torch.tensor(products, dtype=torch.float64)),
        "zero_share": mean(token.d == 0 for token in tokens),
        "reward": mean(sample.origin.reward for sample in samples if not math.isnan(sample.origin.reward)),
        "num_prompts": len({prompt(sample) for sample in measured}),
        "k3_error": error(measured, lambda sample: math.fsum(t.ratio - 1 - t.d for t in sample.tokens), num_tokens),
        "abs_mean_error": error(measured, lambda sample: math.fsum(abs(t.d) for t in sample.tokens), num_tokens),
        "mean_length_error": error(measured, num_tokens, lambda sample: 1),
        "reward_error": error(
            [sample for sample in samples if not math.isnan(sample.origin.reward)],
            lambda sample: sample.origin.reward,
            lambda sample: 1,
        ),
    }


def num_tokens(sample: Sample) -> int:
    return len(sample.tokens)


def prompt(sample: Sample) -> tuple[str, object]:
    # Its own, where it is not known. A group is one of a step.
    return sample.step, id(sample) if sample.origin.group is None else sample.origin.group


def error(samples: list[Sample], total, count) -> float:
    """The standard error of the ratio of two sums over prompts: of the residuals, as of a mean."""
    totals, counts = defaultdict(float), defaultdict(float)
    for sample in samples:
        totals[prompt(sample)] += total(sample)
        counts[prompt(sample)] += count(sample)
    ratio = math.fsum(totals.values()) / math.fsum(counts.values())
    residuals = [totals[key] - ratio * counts[key] for key in totals]
    return statistics.stdev(residuals) * math.sqrt(len(residuals)) / math.fsum(counts.values())


def octave(number: int) -> int:
    return int(math.log2(number + 1))


def octave_name(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def label_of_decile(token: Token) -> tuple[str, float, float]:
    decile = int(math.exp(token.behavior) * 10)
    return f"{decile / 10:.1f} to {(decile + 1) / 10:.1f}", decile / 10, (decile + 1) / 10


def label_of_octave(number: int, *, base: int) -> tuple[str, float, float]:
    first, last = 2 ** octave(number) - 1 + base, 2 ** (octave(number) + 1) - 2 + base
    return octave_name(first, last), first, last


GROUPS = {
    "by_probability": label_of_decile,
    "by_position": lambda token: label_of_octave(token.position, base=0),
    "by_turn": lambda token: label_of_octave(token.turn, base=1),
    "by_version": lambda token: None if math.isnan(token.behind) else (f"{token.behind:g} behind", *[token.behind] * 2),
}


def oracle_of_groups(samples: list[Sample], label) -> list[dict[str, object]]:
    tokens = defaultdict(list)
    for sample in samples:
        for token in sample.tokens:
            if (found := label(token)) is not None:
                tokens[found].append(token)
    k3 = {name: [token.ratio - 1 - token.d for token in group] for name, group in tokens.items()}
    total = math.fsum(math.fsum(values) for values in k3.values())
    return [
        {
            "name": found[0],
            "low": found[1],
            "high": found[2],
            "num_tokens": len(group),
            "mean_abs_difference": mean(abs(token.d) for token in group),
            "mean_log_ratio": mean(token.d for token in group),
            "k3": mean(k3[found]),
            "k3_share": math.fsum(k3[found]) / total,
        }
        for found, group in sorted(tokens.items(), key=lambda item: item[0][1])
    ]


def oracle_of_outcome(samples: list[Sample]) -> dict[str, object]:
    """Of CONFIG: ratios clipped to [0.9, 1.1], tokens outside of [0.7, 1.4] rejected, and samples by their mean."""
    num_trained = sum(sample.num_trained for sample in samples)
    removed, weights, factors, residuals = defaultdict(int), [], [], []
    lost, signed = defaultdict(int), defaultdict(int)
    squares = weighted_squares = 0.0
    kept_of = {}
    for index, sample in enumerate(samples):
        geometric = math.exp(mean(token.d for token in sample.tokens)) if sample.tokens else 1.0
        # A token without a ratio is rejected, and with a gate on sequences its sample: no weight of it is defined.
        num_plain = sample.num_trained - len(sample.tokens)
        inside = 0.93 <= geometric <= 1.07 and not num_plain
        sign = 0 if math.isnan(sample.advantage) else (sample.advantage > 0) - (sample.advantage < 0)
        factors += [0.0] * num_plain
        removed["no finite ratio"] += num_plain
        kept = 0
        for token in sample.tokens:
            weight = 0.0 if num_plain else min(max(token.ratio, 0.9), 1.1)
            passes = 0.7 <= token.ratio <= 1.4
            if not passes or not inside:
                name = "two or more gates" if not passes and not inside else MEANS if passes else TOKENS
                removed[name] += 1
            factor = weight if passes and inside else 0.0
            kept += factor > 0
            weights.append(weight)
            factors.append(factor)
            residuals.append(abs(factor - token.ratio))
        signed[sign] += sample.num_trained
        lost[sign] += sample.num_trained - kept
        if not math.isnan(sample.advantage):
            squares += sample.num_trained * sample.advantage**2
            own = factors[len(factors) - sample.num_trained :]
            weighted_squares += math.fsum((factor * sample.advantage) ** 2 for factor in own)
        kept_of[index] = kept
    trained = [index for index, sample in enumerate(samples) if sample.num_trained]

    return {
        "kept_tokens": sum(kept_of.values()) / num_trained,
        "live_tokens": sum(factor != 0 for factor in factors) / num_trained,
        "kept_sequences": sum(kept_of[index] > 0 for index in trained) / len(trained),
        "removed_by": pytest.approx({name: count / num_trained for name, count in removed.items() if count}, rel=1e-6),
        "weight_max": max(weights),
        "learning_rate": math.fsum(factors) / num_trained,
        "ess": math.fsum(factors) ** 2 / (num_trained * math.fsum(factor**2 for factor in factors)),
        "variance": weighted_squares / squares,
        "residual": mean(residuals),
        "removed_positive": lost[1] / signed[1],
        "removed_negative": lost[-1] / signed[-1],
    }


def check(found, oracle: dict[str, object], kind: type) -> None:
    assert [*oracle] == [field.name for field in dataclasses.fields(kind)]
    for name, expected in oracle.items():
        if isinstance(expected, (int, float)):
            # Log-probs are subtracted in float32: of a difference of 0.03 that is the sixth digit.
            expected = pytest.approx(expected, rel=2e-5, abs=1e-6, nan_ok=True)
        assert getattr(found, name) == expected, name


@pytest.mark.parametrize("seed", range(2))
def test_every_number_of_a_mismatch_and_of_its_groups_is_its_definition(seed) -> None:
    samples = draw(seed)
    summary = collected(samples).summary()
    check(summary.overall, oracle_of_mismatch(samples), Mismatch)
    assert [*summary.steps] == ["0", "1"]
    for step, found in summary.steps.items():
        check(found, oracle_of_mismatch([sample for sample in samples if sample.step == step]), Mismatch)
    for name, label in GROUPS.items():
        groups, expected = getattr(summary, name), oracle_of_groups(samples, label)
        assert len(groups) == len(expected) > 1, name
        for found, oracle in zip(groups, expected, strict=True):
            check(found, oracle, Group)


@pytest.mark.parametrize("seed", range(2))
def test_every_number_of_an_outcome_is_its_definition(seed) -> None:
    samples = draw(seed)
    # Before the summary: both finish what is running.
    (outcome,) = collected(samples, tried=CONFIG).outcomes().values()
    check(outcome, oracle_of_outcome(samples), Outcome)
    assert len(outcome.removed_by) >= 3
