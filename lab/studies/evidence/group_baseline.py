# SPDX-License-Identifier: Apache-2.0
"""Does rejection bias the baseline of a group? Exactly: a policy whose answers, and groups of answers, can be listed.

GRPO compares an answer with the other answers to its question. An answer that a gate rejects has no gradient, but it
may still count in the mean and the deviation of its group (*in*), or not (*out*). With a reward of 0 or 1 an answer is
one of four kinds: kept or rejected, right or wrong. Answers are drawn independently, so all that matters of a group is
how many it has of each kind, and the mean and the variance of its gradient are sums over these numbers.
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
        gradients = {weight: self._gradients(weight) for weight, _, _ in cases}
        true = self._true
        found = []
        for weight, gate, baseline in cases:
            kept = torch.ones_like(self.is_right) if gate is None else self.kept(gate)
            mean, second = self._group(self.probability, gradients[weight], kept, counts_rejected=baseline != "out")
            scale = float(mean @ true / true.square().sum())
            bias = float((mean - scale * true).norm() / true.norm())
            noise = math.sqrt(max(0.0, second - float(mean.square().sum()))) / float(true.norm())
            found.append(Moments(scale, bias / scale, noise / scale))
        return found

    @cached_property
    def _true(self) -> Tensor:
        everything = torch.ones_like(self.is_right)
        return self._group(self.proximal.sum(1).exp(), self._gradients(None), everything, counts_rejected=True)[0]

    def _group(
        self, probability: Tensor, gradient: Tensor, kept: Tensor, *, counts_rejected: bool
    ) -> tuple[Tensor, float]:
        """Mean of the gradient of a group, and the mean of its squared length."""
        kinds = [kept & self.is_right, kept & ~self.is_right, ~kept & self.is_right, ~kept & ~self.is_right]
        chance = torch.stack([probability[kind].sum() for kind in kinds])
        # Of an answer of each of the two kinds that are kept.
        means = [probability[kind] @ gradient[kind] / probability[kind].sum() for kind in kinds[:2]]
        squares = [
            float(probability[kind] @ gradient[kind].square().sum(1) / probability[kind].sum()) for kind in kinds[:2]
        ]
        counts, chances = _groups(chance / chance.sum())
        advantages = _advantages(counts, counts_rejected=counts_rejected) / GROUP
        # Answers of one kind are independent: what they have beyond the mean of their kind adds up as squares.
        times = counts[:, :2] * advantages
        mean_of_kinds = torch.stack(means)
        of_groups = times @ mean_of_kinds
        beyond = torch.tensor(squares, dtype=torch.float64) - mean_of_kinds.square().sum(1)
        second = (counts[:, :2] * advantages.square()) @ beyond + of_groups.square().sum(1)
        return chances @ of_groups, float(chances @ second)

    def _weights(self, level: str) -> Tensor:
        bounded = {"mode": "truncate", "high": 2.0} if level == "token" else {"mode": "unbounded"}
        return mis_ext.correct_padded(
            mis_ext.CorrectionConfig(weight=mis_ext.Weight(level=level, **bounded)),
            proximal_logprobs=self.proximal.float(),
            behavior_logprobs=self.behavior.float(),
            response_mask=self.mask.float(),
        ).weights.double()

    def _gradients(self, weight: str | None) -> Tensor:
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


def _groups(chance: Tensor) -> tuple[Tensor, Tensor]:
    """How many answers of each of the four kinds a group may have, and with which probability."""
    counts = [
        (a, b, c, GROUP - a - b - c) for a, b, c in itertools.product(range(GROUP + 1), repeat=3) if a + b + c <= GROUP
    ]
    ways = [math.factorial(GROUP) / math.prod(map(math.factorial, each)) for each in counts]
    found = torch.tensor(counts, dtype=torch.float64)
    return found, torch.tensor(ways, dtype=torch.float64) * chance.pow(found).prod(1)


def _advantages(counts: Tensor, *, counts_rejected: bool) -> Tensor:
    """``[groups, 2]``: of a right and of a wrong answer. Where all that counts earned the same, 0."""
    num_right, num_wrong = counts[:, 0], counts[:, 1]
    if counts_rejected:
        num_right, num_wrong = num_right + counts[:, 2], num_wrong + counts[:, 3]
    number = num_right + num_wrong
    mean = num_right / number.clamp_min(1)
    # As torch.std has it: of a sample.
    deviation = (num_right * num_wrong / (number * (number - 1)).clamp_min(1)).sqrt()
    differs = deviation > 0
    scale = torch.where(differs, 1 / torch.where(differs, deviation, 1.0), 0.0)
    return torch.stack([(1 - mean) * scale, -mean * scale], 1)


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


def _answer(medians: dict[tuple[Any, ...], Moments]) -> list[str]:
    """What the table says, in numbers of the table."""
    pairs = [(found, medians[(*key[:-1], "out")]) for key, found in medians.items() if key[-1] == "in"]

    def span(name: str) -> str:
        ratios = [getattr(out, name) / getattr(inside, name) for inside, out in pairs]
        return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    scales = [inside.scale for inside, _ in pairs]
    return [
        "What is lost with the rejected answers biases the gradient. Whether they count in the baseline hardly",
        "matters. It is a little better if they do, as they do where a host computes advantages before the loss.",
        "",
        f"Out over in, median and range of {len(pairs)} settings (reward, noise, gate, weight): bias {span('bias')},",
        f"noise {span('noise')}, scale {span('scale')}. Scale with rejected answers in the baseline:",
        f"{np.median(scales):.2f} ({min(scales):.2f} to {max(scales):.2f}).",
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
