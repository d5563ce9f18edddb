# SPDX-License-Identifier: Apache-2.0
"""Does rejection bias the baseline of a group? Exactly: a policy whose answers, and groups of answers, can be listed.

GRPO compares an answer with the other answers to its question. An answer that a gate rejects has no gradient, but it
may still count in the mean and the deviation of its group (*in*), or not (*out*). With a reward of 0 or 1 an answer is
one of four kinds: kept or rejected, right or wrong. Answers are drawn independently, so all that matters of a group is
how many it has of each kind, and the mean and the variance of its gradient are sums over these numbers.

So are those of other baselines (:class:`Rule`), of answers whose reward is lost, and of trajectories of several turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

import mis_ext

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .pictures import save

WORDS, MAX_LENGTH, SPREAD, END = 2, 9, 0.7, -1.5
"""Words besides the end of the answer, the most tokens of an answer, how much logits differ, and those of its end."""
GROUP = 8
NUM_POLICIES = 20
NOISES = (0.1, 0.3, 0.8)
REJECTED = 0.12
GATES = ("product", "geometric mean", "veto", "product, wrong answers alone")
"""What is compared with 1: the product of an answer's ratios, their geometric mean, or, from below, the smallest. The
last is the case in which it matters most whether rejected answers count."""
BASELINES = ("in", "out")
Case = tuple[str | None, str | None, str | None]
CASES: list[Case] = [
    *((weight, None, None) for weight in (None, "token", "sequence")),
    *itertools.product(("token", "sequence"), GATES, BASELINES),
]
"""Weight, gate, and whether rejected answers count."""
AGREEMENTS = {"independent": 0.0, "likely answers are right": 1.0}
"""How much the log-probability of an answer has to do with its reward."""
LENGTHS = ((1, 3), (4, 6), (7, 9))
REAL_LENGTHS = (256, 1024, 4096)
LAW_K3S = (1e-4, 1e-3, 1e-2)


def report(output: Path) -> None:
    """Write ``group_baseline.md`` and its picture."""
    found = {
        (agreement, noise): [Question(noise, seed, agreement=AGREEMENTS[agreement]) for seed in range(NUM_POLICIES)]
        for agreement in AGREEMENTS
        for noise in NOISES
    }
    medians = {}
    for setting, questions in found.items():
        by_case = zip(*(question.moments(CASES) for question in questions), strict=True)
        for case, moments in zip(CASES, by_case, strict=True):
            medians[(*setting, *case)] = _median(moments)
    lines = [
        "# Does rejection bias the baseline of my group?",
        "",
        "`python lab/studies/evidence.py baseline`; no GPU, nothing is drawn.",
        "",
        *_answer(medians),
        "",
        "## How it is computed",
        "",
        f"{NUM_POLICIES} random policies over all answers of up to {MAX_LENGTH} tokens; the engine's logits have",
        "noise.",
        f"A reward is 0 or 1, a group has {GROUP} answers, an advantage is (reward - mean) / deviation, a gradient is",
        "divided by the whole group.",
        f"Each gate is as wide as rejects {REJECTED:.0%} of the answers. *In*: rejected answers count in mean and",
        "deviation. *Out*: they do not. The token weight is that of `mis`, at most 2. The sequence weight is the",
        "product of all ratios: with it the gate is the only error.",
        "The true gradient is that of the same GRPO without mismatch and gate. With two rewards it is exactly",
        "parallel to the policy gradient.",
        "",
        "- *Scale*: the length of the mean gradient along the true one, by which a gate changes the learning rate.",
        "- *Bias*: what the mean gradient has across the true one, over the scale.",
        "- *Noise*: the root of the summed variances of one group's gradient, over the scale.",
        "- *Groups*: as many must be averaged until the bias is as large as the noise.",
        "",
        "Medians over the policies.",
        "",
        "| reward | noise, k3 | weight | gate | baseline | scale | bias | noise | groups |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(key, medians[key], found[key[:2]]) for key in medians),
        "",
        "![bias of the gradient](group_baseline.png)",
        "",
        *_lost(found),
        *_by_real_length(),
        *_choices(found),
        *_lost_rewards(),
        *_turns(),
    ]
    _draw(medians, output / "group_baseline.png")
    (output / "group_baseline.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(output / "group_baseline.md")


@dataclass(frozen=True)
class Moments:
    """Of the gradient of a group, over the length of the true gradient.

    Attributes:
        scale: Of its mean along the true gradient.
        bias: Of its mean across the true gradient, over ``scale``.
        noise: Root of the summed variances, over ``scale``.
    """

    scale: float
    bias: float
    noise: float

    @property
    def groups(self) -> float:
        """As many have a noise as large as the bias."""
        return (self.noise / self.bias) ** 2


@dataclass(frozen=True)
class Rule:
    """How an advantage comes from the rewards of a group.

    Attributes:
        counts_rejected: Whether rejected answers count.
        leaves_out: Whether an answer is compared with the others alone; without any, its advantage is 0.
        deviation: Whether the difference is divided by the deviation of all that count.
        has_baseline: Without one, the advantage is the reward.
        divides_by_kept: Whether the gradient is divided by the kept answers, not by the whole group.
    """

    counts_rejected: bool = True
    leaves_out: bool = False
    deviation: bool = True
    has_baseline: bool = True
    divides_by_kept: bool = False


RULES = {
    "mean and deviation, in": Rule(),
    "mean and deviation, out": Rule(counts_rejected=False),
    "mean, in": Rule(deviation=False),
    "mean, out": Rule(counts_rejected=False, deviation=False),
    "leave-one-out, in": Rule(leaves_out=True, deviation=False),
    "leave-one-out, out": Rule(counts_rejected=False, leaves_out=True, deviation=False),
    "leave-one-out and deviation, out": Rule(counts_rejected=False, leaves_out=True),
    "no baseline": Rule(deviation=False, has_baseline=False),
    "mean and deviation, in, over kept answers": Rule(divides_by_kept=True),
}


@dataclass(frozen=True)
class Kind:
    """Answers that are alike in all that a baseline looks at.

    Attributes:
        share: ``[N]``, the probability that an answer is drawn, and is of this kind.
        reward: Of each.
        kept: Whether its gradient counts.
        size: Samples that a trajectory is cut into, each of which counts in the mean.
    """

    share: Tensor
    reward: float
    kept: bool = True
    size: int = 1


class Question:
    """All answers of one random policy, of an engine whose logits differ by noise, and which of them are right."""

    def __init__(self, noise: float, seed: int, *, agreement: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        nodes = (WORDS**MAX_LENGTH - 1) // (WORDS - 1)
        logits = SPREAD * torch.randn(nodes, WORDS + 1, generator=generator, dtype=torch.float64)
        logits[:, WORDS] += END
        noisy = logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        self._tokens, self._nodes = _answers()
        self.mask = self._nodes >= 0
        self._softmax = logits.softmax(-1)
        self.proximal, self.behavior = (self._log_probs(each) for each in (logits, noisy))
        likely = self.proximal.sum(1)
        mean = (likely.exp() * likely).sum()
        deviation = (likely.exp() * (likely - mean).square()).sum().sqrt()
        luck = torch.randn(len(likely), generator=generator, dtype=torch.float64)
        self.is_right = luck + agreement * (likely - mean) / deviation > 0
        self.lengths = self.mask.sum(1)

    @property
    def probability(self) -> Tensor:
        """``[N]``: with which the engine gives each answer."""
        return self.behavior.sum(1).exp()

    @property
    def k3(self) -> float:
        """Mean per token of the engine's answers."""
        d = self.proximal - self.behavior
        per_answer = torch.where(self.mask, d.exp() - 1 - d, 0.0).sum(1)
        return float((self.probability * per_answer).sum() / (self.probability * self.lengths).sum())

    def distance(self, gate: str) -> Tensor:
        """``[N]``: how far each answer is from what a gate keeps, in nats; those that are further go."""
        d = torch.where(self.mask, self.proximal - self.behavior, 0.0)
        if gate == "veto":
            return -d.amin(1)
        if gate == "geometric mean":
            return d.sum(1).abs() / self.lengths
        far = d.sum(1).abs()
        return torch.where(self.is_right, -1.0, far) if gate == "product, wrong answers alone" else far

    def bound(self, gate: str) -> float:
        """The distance beyond which lies :data:`REJECTED` of what the engine gives, between two answers."""
        # Answers that share a token may be as far.
        distances, which = self.distance(gate).round(decimals=9).unique(return_inverse=True)
        beyond = torch.zeros_like(distances).index_add(0, which, self.probability).flip(0).cumsum(0).flip(0)
        index = int((beyond - REJECTED).abs().argmin())
        return float(distances[index - 1 : index + 1].mean())

    def kept(self, gate: str) -> Tensor:
        """``[N]``: which answers it keeps."""
        return self.distance(gate) < self.bound(gate)

    def moments(self, cases: Sequence[Case]) -> list[Moments]:
        """Of the engine's groups, with gradients of the answers that are kept, for each of the ``cases``."""
        return [
            self.compared(self.group(weight, gate), Rule(counts_rejected=baseline != "out"))
            for weight, gate, baseline in cases
        ]

    def group(self, weight: str | None, gate: str | None) -> Group:
        """The engine's: answers are kept or rejected, right or wrong."""
        kept = torch.ones_like(self.is_right) if gate is None else self.kept(gate)
        return Group(_kept_and_right(self.probability, kept, self.is_right), self.gradients(weight))

    def compared(self, group: Group, rule: Rule) -> Moments:
        """Beside the gradient without mismatch and gate, of the same rule."""
        mean, second = group.gradient(rule)
        true, _ = self._true.gradient(rule)
        scale = float(mean @ true / true.square().sum())
        bias = float((mean - scale * true).norm() / true.norm())
        noise = math.sqrt(max(0.0, second - float(mean.square().sum()))) / float(true.norm())
        return Moments(scale, bias / scale, noise / scale)

    @cached_property
    def _true(self) -> Group:
        """The trainer's own answers, all kept."""
        everything = torch.ones_like(self.is_right)
        kinds = _kept_and_right(self.proximal.sum(1).exp(), everything, self.is_right)
        return Group(kinds, self.gradients(None))

    def _weights(self, level: str) -> Tensor:
        bounded = {"mode": "truncate", "high": 2.0} if level == "token" else {"mode": "unbounded"}
        return mis_ext.correct_padded(
            mis_ext.CorrectionConfig(weight=mis_ext.Weight(level=level, **bounded)),
            proximal_logprobs=self.proximal.float(),
            behavior_logprobs=self.behavior.float(),
            response_mask=self.mask.float(),
        ).weights.double()

    def gradients(self, weight: str | None) -> Tensor:
        """``[N, logits]``: of the weighted log-probability of each answer."""
        weights = torch.ones_like(self.proximal) if weight is None else self._weights(weight)
        at = self._nodes.clamp_min(0)
        one_hot = torch.nn.functional.one_hot(self._tokens, WORDS + 1)
        of_tokens = torch.where(self.mask[..., None], (one_hot - self._softmax[at]) * weights[..., None], 0.0)
        gradient = torch.zeros(len(at), *self._softmax.shape, dtype=torch.float64)
        gradient.index_put_((torch.arange(len(at))[:, None], at), of_tokens, accumulate=True)
        return gradient.flatten(1)

    def _log_probs(self, logits: Tensor) -> Tensor:
        chosen = logits.log_softmax(-1)[self._nodes.clamp_min(0)].gather(-1, self._tokens[..., None])[..., 0]
        return torch.where(self.mask, chosen, 0.0)


def _answers() -> tuple[Tensor, Tensor]:
    """``[N, MAX_LENGTH]`` twice: the tokens of all answers, and the node before each; behind the end -1."""
    tokens, nodes = [], []
    for length in range(MAX_LENGTH + 1):
        for words in itertools.product(range(WORDS), repeat=length):
            ended = [*words, WORDS][:MAX_LENGTH]
            behind = MAX_LENGTH - len(ended)
            path = [0]
            for word in words:
                # The node below, numbered level by level.
                path.append(path[-1] * WORDS + word + 1)
            tokens.append(ended + [0] * behind)
            nodes.append(path[: len(ended)] + [-1] * behind)
    return torch.tensor(tokens), torch.tensor(nodes)


def _kept_and_right(probability: Tensor, kept: Tensor, is_right: Tensor) -> list[Kind]:
    return [
        Kind(torch.where(each & right, probability, 0.0), reward, is_kept)
        for is_kept, each in ((True, kept), (False, ~kept))
        for reward, right in ((1.0, is_right), (0.0, ~is_right))
    ]


class Group:
    """Answers that are drawn independently, of kinds whose shares sum to 1, with the gradient of each answer."""

    def __init__(self, kinds: Sequence[Kind], gradient: Tensor) -> None:
        self._kinds = [kind for kind in kinds if float(kind.share.sum()) > 0.0]
        share_KN = torch.stack([kind.share for kind in self._kinds])
        chance = share_KN.sum(1)
        # Of an answer of each kind.
        self._mean_K = share_KN @ gradient / chance[:, None]
        self._square_K = share_KN @ gradient.square().sum(1) / chance
        self._counts, self._chances = _groups(chance / chance.sum())
        self._kept = torch.tensor([float(kind.kept) for kind in self._kinds], dtype=torch.float64)

    def gradient(self, rule: Rule) -> tuple[Tensor, float]:
        """Its mean, and the mean of its squared length."""
        divisor = (self._counts @ self._kept).clamp_min(1)[:, None] if rule.divides_by_kept else GROUP
        advantages = _advantages(self._counts, self._kinds, rule) * self._kept / divisor
        # Answers of one kind are independent: what they have beyond the mean of their kind adds up as squares.
        of_groups = (self._counts * advantages) @ self._mean_K
        beyond = self._square_K - self._mean_K.square().sum(1)
        second = (self._counts * advantages.square()) @ beyond + of_groups.square().sum(1)
        return self._chances @ of_groups, float(self._chances @ second)


def _groups(chance: Tensor) -> tuple[Tensor, Tensor]:
    """How many answers of each kind a group may have, and with which probability."""
    counts = [(*part, GROUP - sum(part)) for part in _parts(GROUP, len(chance) - 1)]
    ways = [math.factorial(GROUP) / math.prod(map(math.factorial, each)) for each in counts]
    found = torch.tensor(counts, dtype=torch.float64)
    return found, torch.tensor(ways, dtype=torch.float64) * chance.pow(found).prod(1)


def _parts(most: int, number: int) -> list[tuple[int, ...]]:
    if number == 0:
        return [()]
    return [(first, *rest) for first in range(most + 1) for rest in _parts(most - first, number - 1)]


def _advantages(counts: Tensor, kinds: Sequence[Kind], rule: Rule) -> Tensor:
    """``[groups, K]``: of an answer of each kind. Where all that counts earned the same, 0."""
    reward = torch.tensor([kind.reward for kind in kinds], dtype=torch.float64)
    if not rule.has_baseline:
        return reward.expand_as(counts)
    own = torch.tensor([kind.size * (kind.kept or rule.counts_rejected) for kind in kinds], dtype=torch.float64)
    voices = counts * own
    number, total = voices.sum(1, keepdim=True), (voices * reward).sum(1, keepdim=True)
    mean = total / number.clamp_min(1)
    difference = reward - mean
    if rule.leaves_out:
        others = number - own
        difference = torch.where(others > 0, reward - (total - own * reward) / others.clamp_min(1), 0.0)
    if not rule.deviation:
        return difference
    # As torch.std has it: of a sample.
    deviation = ((voices * (reward - mean).square()).sum(1, keepdim=True) / (number - 1).clamp_min(1)).sqrt()
    return torch.where(deviation > 0, difference / torch.where(deviation > 0, deviation, 1.0), 0.0)


def _row(key: tuple[Any, ...], found: Moments, questions: list[Question]) -> str:
    agreement, noise, weight, gate, baseline = key
    k3 = np.median([question.k3 for question in questions])
    groups = "any" if found.bias < 1e-6 else f"{found.groups:,.0f}"
    numbers = f"{found.scale:.2f} | {found.bias:.3f} | {found.noise:.1f} | {groups}"
    return (
        f"| {agreement} | {noise}, {k3:.1e} | {weight or 'none'} | {gate or 'none'} | {baseline or '-'} | {numbers} |"
    )


def _median(found: Sequence[Moments]) -> Moments:
    return Moments(*(float(np.median([getattr(each, name) for each in found])) for name in ("scale", "bias", "noise")))


def _lost(found: dict[tuple[str, float], list[Question]]) -> list[str]:
    """A section: which answers a gate rejects."""
    lines = [
        "## Which answers are lost",
        "",
        f"Share that each gate rejects, {REJECTED:.0%} in all. Quarters are of what the engine gives, by the trainer's",
        "mean log-prob of a token. *Solved*: the mean reward of kept and of rejected answers. Means over the policies.",
        "",
        "| reward | noise | gate | "
        + " | ".join(f"{low} to {high} tokens" for low, high in LENGTHS)
        + " | likeliest quarter | second | third | least likely | solved, kept | rejected |",
        "|---" * (9 + len(LENGTHS)) + "|",
    ]
    for (agreement, noise), questions in found.items():
        for gate in GATES:
            shares = np.nanmean([_shares(question, question.kept(gate)) for question in questions], axis=0)
            lines.append(f"| {agreement} | {noise} | {gate} | {' | '.join(f'{share:.2f}' for share in shares)} |")
    return lines


def _shares(question: Question, kept: Tensor) -> list[float]:
    """By length and by likelihood the share that is rejected; the mean reward of what is kept, and of the rest."""
    probability = question.probability
    per_token = question.proximal.sum(1) / question.lengths
    order = per_token.argsort(descending=True)
    quarter = torch.empty_like(order)
    quarter[order] = (probability[order].cumsum(0) * 4).long().clamp_max(3)
    parts = [(question.lengths >= low) & (question.lengths <= high) for low, high in LENGTHS]
    parts += [quarter == index for index in range(4)]
    rejected = [float(probability[part & ~kept].sum() / probability[part].sum()) for part in parts]
    return rejected + [
        float(probability[part & question.is_right].sum() / probability[part].sum()) for part in (kept, ~kept)
    ]


def _by_real_length() -> list[str]:
    """A section: the same for answers of real length, by the Gaussian law."""
    law = "`d` of a token is N(-k3, 2 k3)"
    lines = [
        "",
        "## By length, where answers are long",
        "",
        f"By the Gaussian law of `mis-ext explain` ({law}), a third of the answers of each length, bounds",
        f"that reject {REJECTED:.0%} in all. Share that is rejected:",
        "",
        "| k3 | gate | " + " | ".join(f"{length:,} tokens" for length in REAL_LENGTHS) + " |",
        "|---" * (2 + len(REAL_LENGTHS)) + "|",
    ]
    for k3, gate in itertools.product(LAW_K3S, GATES[:3]):
        low, high = 0.0, 1000.0
        for _ in range(60):
            middle = (low + high) / 2
            is_too_narrow = np.mean([_rejected(gate, k3, length, middle) for length in REAL_LENGTHS]) > REJECTED
            low, high = (middle, high) if is_too_narrow else (low, middle)
        cells = " | ".join(f"{_rejected(gate, k3, length, high):.2f}" for length in REAL_LENGTHS)
        lines.append(f"| {k3:g} | {gate} | {cells} |")
    return lines


def _rejected(gate: str, k3: float, length: int, width: float) -> float:
    """The share of answers of this length whose logarithm is further than ``width`` from 0."""
    if gate == "veto":
        return 1 - (1 - norm.cdf(-width, -k3, math.sqrt(2 * k3))) ** length
    # The sum over the tokens, or their mean.
    size = length if gate == "product" else 1 / length
    mean = -k3 * (length if gate == "product" else 1)
    deviation = math.sqrt(2 * k3 * size)
    return 1 - (norm.cdf(width, mean, deviation) - norm.cdf(-width, mean, deviation))


def _span(numbers: Sequence[float]) -> str:
    return f"{np.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def _choices(found: dict[tuple[str, float], list[Question]]) -> list[str]:
    """A section: other baselines, beside the one that hosts have."""
    medians: dict[str, list[Moments]] = {name: [] for name in RULES}
    for questions in found.values():
        for weight, gate in itertools.product(("token", "sequence"), GATES[:3]):
            groups = [question.group(weight, gate) for question in questions]
            for name, rule in RULES.items():
                of_rule = [each.compared(group, rule) for each, group in zip(questions, groups, strict=True)]
                medians[name].append(_median(of_rule))
    first = medians[next(iter(RULES))]
    lines = [
        "",
        "## Which baseline",
        "",
        f"Over the first row of the same setting, median and range of {len(first)} settings (reward, noise, weight,",
        "the first three gates). *Scale* is beside the same rule without mismatch and gate. With all answers in,",
        f"leave-one-out is {GROUP}/{GROUP - 1} of the mean: another learning rate, and nothing else. The last row",
        "divides by the kept answers of the group.",
        "",
        "| baseline | bias | noise | scale |",
        "|---|---|---|---|",
    ]
    for name, moments in medians.items():
        ratios = [
            _span([getattr(each, what) / getattr(other, what) for each, other in zip(moments, first, strict=True)])
            for what in ("bias", "noise")
        ]
        lines.append(f"| {name} | {' | '.join(ratios)} | {_span([each.scale for each in moments])} |")
    return lines


def _lost_rewards() -> list[str]:
    """A section: answers that are removed before training, with a reward that says nothing."""
    lines = [
        "",
        "## Answers that failed",
        "",
        f"An environment loses {REJECTED:.0%} of the answers and removes them; their reward reads 0 or -1. Failures",
        "are independent of the answer, or grow with its length. Likely answers are right; no mismatch, and no gate.",
        "Medians over the policies.",
        "",
        "| failures | reward reads | baseline | scale | bias | noise |",
        "|---|---|---|---|---|---|",
    ]
    questions = [Question(0.0, seed, agreement=1.0) for seed in range(NUM_POLICIES)]
    for failures, reads in itertools.product(("independent", "by length"), (0, -1)):
        groups = [_failing(question, by_length=failures == "by length", reads=reads) for question in questions]
        for name in [*RULES][:6]:
            moments = [each.compared(group, RULES[name]) for each, group in zip(questions, groups, strict=True)]
            lines.append(f"| {failures} | {reads} | {name} | {_numbers(_median(moments))} |")
    return lines


def _failing(question: Question, *, by_length: bool, reads: float) -> Group:
    weight = question.lengths.double() if by_length else torch.ones_like(question.probability)
    fails = (REJECTED * weight / (question.probability @ weight)).clamp_max(1.0)
    alive, right = question.probability * (1 - fails), question.is_right
    kinds = [Kind(torch.where(right, alive, 0.0), 1.0), Kind(torch.where(right, 0.0, alive), 0.0)]
    return Group([*kinds, Kind(question.probability * fails, reads, kept=False)], question.gradients(None))


def _turns() -> list[str]:
    """A section: trajectories that become several samples."""
    lines = [
        "",
        "## Trajectories of several samples",
        "",
        f"Answers of {', '.join(f'{low} to {high}' for low, high in LENGTHS)} tokens become 1, 2 and 3 samples, each",
        "with the reward of the whole. What is averaged is the samples, or each trajectory once. No mismatch, and no",
        "gate. Medians over the policies.",
        "",
        "| reward | baseline | averaged | scale | bias | noise |",
        "|---|---|---|---|---|---|",
    ]
    for agreement, counted in itertools.product(AGREEMENTS, ("samples", "trajectories")):
        questions = [Question(0.0, seed, agreement=AGREEMENTS[agreement]) for seed in range(NUM_POLICIES)]
        groups = [_of_turns(question, counts_samples=counted == "samples") for question in questions]
        for name in ("mean and deviation, in", "mean, in"):
            moments = [each.compared(group, RULES[name]) for each, group in zip(questions, groups, strict=True)]
            lines.append(f"| {agreement} | {name.removesuffix(', in')} | {counted} | {_numbers(_median(moments))} |")
    return lines


def _of_turns(question: Question, *, counts_samples: bool) -> Group:
    kinds = []
    for turns, (low, high) in enumerate(LENGTHS, 1):
        here = (question.lengths >= low) & (question.lengths <= high)
        for reward, right in ((1.0, question.is_right), (0.0, ~question.is_right)):
            share = torch.where(here & right, question.probability, 0.0)
            kinds.append(Kind(share, reward, size=turns if counts_samples else 1))
    return Group(kinds, question.gradients(None))


def _numbers(found: Moments) -> str:
    return f"{found.scale:.2f} | {found.bias:.3f} | {found.noise:.1f}"


def _answer(medians: dict[tuple[Any, ...], Moments]) -> list[str]:
    """What the table says, in numbers of the table."""
    pairs = [(found, medians[(*key[:-1], "out")]) for key, found in medians.items() if key[-1] == "in"]

    def span(name: str) -> str:
        return _span([getattr(out, name) / getattr(inside, name) for inside, out in pairs])

    scales = [inside.scale for inside, _ in pairs]
    return [
        "What is lost with the rejected answers biases the gradient. Whether they count in the baseline hardly",
        "matters. It is a little better if they do, as they do where a host computes advantages before the loss.",
        "",
        f"Out over in, median and range of {len(pairs)} settings (reward, noise, gate, weight): bias {span('bias')},",
        f"noise {span('noise')}, scale {span('scale')}. Scale with rejected answers in the baseline:",
        f"{_span(scales)}.",
        "",
        "[Leave-one-out](#which-baseline) changes the learning rate, not the bias. It is otherwise with answers that",
        "[failed](#answers-that-failed), whose reward says nothing: in, they widen the deviation, which shrinks every",
        "gradient, and add bias where failures depend on the answer. A trajectory that became",
        "[several samples](#trajectories-of-several-samples) must count once, or its length biases the baseline.",
        "So with `mis_ext.group_rewards` removed answers are out, rejected ones in, and trajectories count once.",
        "",
        "Not measured: what follows for a training run.",
    ]


def _draw(medians: dict[tuple[Any, ...], Moments], path: Path) -> None:
    """In against out, a point for each reward and noise."""
    figure, axis = plt.subplots(figsize=(5, 4.6), constrained_layout=True)
    for gate, marker in zip(GATES, "osv^", strict=True):
        keys = [key for key in medians if key[2:] == ("token", gate, "in")]
        points = [(medians[key].bias, medians[(*key[:-1], "out")].bias) for key in keys]
        axis.scatter(*zip(*points, strict=True), marker=marker, label=gate)
    limits = [0.05, 1.5]
    axis.plot(limits, limits, color="gray", linewidth=1)
    axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    axis.set(xlabel="bias, rejected answers in the baseline", ylabel="bias, rejected answers out of it")
    axis.legend(fontsize=8)
    save(figure, path)
