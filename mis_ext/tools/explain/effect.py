# SPDX-License-Identifier: Apache-2.0
"""What a configuration, or a published method at its first update, does to a mismatch that follows the Gaussian law."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.pipeline import compute_correction
from mis_ext.correction.weights import Weight
from mis_ext.methods.first_update import first_update, without_terms
from mis_ext.methods.method import Method
from mis_ext.tools.explain.law import EVERYTHING, GaussianLaw, Interval, intersected, passing

NUM_TOKENS = 1 << 20
"""Of each half of the draws, at most."""
NUM_RESPONSES, MIN_RESPONSES = 1 << 13, 32
"""Of each half: so many where they have few tokens, and at least so many."""
AGREEMENT = 0.05
"""Relative distance of the halves' numbers up to which their mean is said; it is then within half of that of either."""
BEHAVIOR = ((-0.25, -0.25), (-8.0, -0.25))
"""Between which the behavior policy's log-probs lie in each half: what depends on them is none of the law's."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What is expected; NaN where the law does not say.

    Attributes:
        k3: Per token, in nats.
        length: Tokens of a response.
        ess_token: Kish's effective share of token ratios; of products over responses and of their geometric means.
        accepted: Share of tokens, or of responses, that each gate keeps or weighs.
        kept_tokens: Share of tokens that stay in the mask. Gates on other things than the ratio of a token or of a
            response count as independent of each other.
        live_tokens: Share of tokens that also have a policy gradient.
        kept_sequences: The same as ``kept_tokens`` of responses.
        above_high: Share of ratios at the level of the weight that its high bound acts on; then the low bound.
        weight_mean: Of the weight, before normalisation, gates apart.
        learning_rate: Mean of what multiplies the loss of a response token: 1 without correction.
        ess: Kish's effective share of that factor.
    """

    k3: float
    length: float
    ess_token: float
    ess_sequence: float
    ess_geometric: float
    accepted: dict[str, float]
    kept_tokens: float
    live_tokens: float
    kept_sequences: float
    above_high: float
    below_low: float
    weight_mean: float
    learning_rate: float
    ess: float


def effect_of(config: CorrectionConfig, *, k3: float, length: float) -> Effect:
    """What ``config`` does to responses of ``length`` tokens whose mismatch is ``k3`` nats per token."""
    law, weight = GaussianLaw(k3, length), config.weight
    gates = described_gates(config)
    kept = _Passed(law, (gate for gate in gates.values() if gate.action == "reject"))
    live = _Passed(law, gates.values())
    first, second = (live.moment(weight, power) for power in (1, 2))
    weight_mean = _Passed(law).moment(weight, 1)
    # As in the correction: the mean over kept weights, and the survivors over all.
    means = {"valid": weight_mean, "kept": _ratio_or_one(first, live.share), None: 1.0}
    factor = _ratio_or_one(1.0, live.share) if config.denominator == "kept" else 1.0
    log_ratio = GaussianLaw(0.0, 1.0).token if weight is None else law.of_level(weight.level)
    low, high = EVERYTHING if weight is None else (weight.log_low, weight.log_high)
    return Effect(
        k3=k3,
        length=length,
        ess_token=law.ess("token"),
        ess_sequence=law.ess("sequence"),
        ess_geometric=law.ess("geometric"),
        accepted={name: law.acceptance(gate) for name, gate in gates.items()},
        kept_tokens=kept.share,
        live_tokens=live.share,
        kept_sequences=kept.share_responses,
        above_high=log_ratio.between(high, math.inf) if high < math.inf else 0.0,
        below_low=log_ratio.between(-math.inf, low) if low > -math.inf else 0.0,
        weight_mean=weight_mean,
        learning_rate=first * factor / means[config.normalize_over],
        ess=first**2 / second if second else math.nan,
    )


def described_gates(config: CorrectionConfig) -> dict[str, Gate]:
    """Every gate of a configuration by its name and what it compares; the one that the weight implies is ``weight``."""
    implied = config.weight.gate if config.weight is not None else None
    named = {} if implied is None else {"weight": implied}
    return {gate_label(name, gate): gate for name, gate in (named | config.labelled_gates).items()}


def gate_label(name: str, gate: Gate) -> str:
    """A gate in a few words: its name, what it looks at, and its band."""
    low, high = ("-" if bound is None else f"{bound:g}" for bound in (gate.low, gate.high))
    return f"{name}: {gate.reduce} of {gate.statistic} in [{low}, {high}]"


class _Passed:
    """What passes some gates: log-ratios of a token, log-ratios of a response, and a share, NaN if one is unknown.

    ``share`` is what is left of all tokens, in [0, 1].
    """

    def __init__(self, law: GaussianLaw, gates: Iterable[Gate] = ()) -> None:
        self.law, self.others = law, 1.0
        self.token: list[Interval] = [EVERYTHING]
        self.product: list[Interval] = [EVERYTHING]
        for gate in gates:
            accepted = law.acceptance(gate)
            if gate.statistic == "ratio" and gate.reduce in ("sum", "mean") and gate.after is None:
                scale = law.length if gate.reduce == "mean" else 1.0
                self.product = intersected(self.product, [(gate.log_low * scale, gate.log_high * scale)])
            elif not math.isnan(accepted) and gate.reduce == "token":
                self.token = intersected(self.token, passing(gate))
            else:
                self.others *= accepted
        self.share_token = sum(law.token.between(*each) for each in self.token)
        self.share_product = sum(law.product.between(*each) for each in self.product)
        self.share = self.share_token * self.share_product * self.others

    @property
    def share_responses(self) -> float:
        """Of all responses, those of which a token is left, in [0, 1]."""
        lost = min(max(1.0 - self.share_token, 0.0), 1.0)
        return float(1.0 - lost**self.law.length) * self.share_product * self.others

    def moment(self, weight: Weight | None, power: int) -> float:
        """``E[weight^power; passed]``: the moment of a token's weight, over tokens that pass."""
        if weight is None:
            return self.share
        if weight.only_outside is not None:
            return math.nan
        if weight.level == "token":
            intervals, rest = self.token, self.share_product
        else:
            scale = self.law.length if weight.level == "geometric" else 1.0
            intervals, rest = [(first / scale, last / scale) for first, last in self.product], self.share_token
        log_ratio, kinks = self.law.of_level(weight.level), (weight.log_low, weight.log_high)
        moment = sum(log_ratio.moment(weight.bounded, power, each, kinks=kinks) for each in intervals)
        return moment * rest * self.others


def _ratio_or_one(numerator: float, denominator: float) -> float:
    return numerator / denominator if numerator > 0.0 and denominator > 0.0 else 1.0


def effect_of_method(config: CorrectionConfig, method: Method, *, k3: float, length: float) -> Effect:
    """What a method and the correction beside it do to responses of ``length`` tokens at ``k3`` nats per token.

    NaN where the law does not say it: where probabilities decide, or chance, as so few responses can be drawn; and of
    the bounds of a weight where the correction has none. Half of the responses have a positive advantage, the others a
    negative one. The method's terms are left out.
    """
    found = effect_of(config, k3=k3, length=length)
    if config.weight is None:
        found = dataclasses.replace(found, above_high=math.nan, below_low=math.nan, weight_mean=math.nan)
    measured: dict[str, Any] = _expected(config, without_terms(method), k3, length)
    return dataclasses.replace(found, **measured)


def method_notes(method: Method) -> Iterator[str]:
    """What the numbers of a method at the first update leave out, or take another batch for."""
    if method.terms:
        yield "the penalty of the method is left out of the numbers: it does not multiply the advantage"
    if method.averages_over_batch or any(reduce.startswith("batch") for reduce in method.reduces):
        yield "the method looks at all tokens of a batch at once: here at the tokens that are evaluated together"


@functools.lru_cache(maxsize=64)
def _expected(config: CorrectionConfig, method: Method, k3: float, length: float) -> dict[str, float]:
    whole = max(1, round(length))
    has_token_weight = config.weight is None or config.weight.level == "token"
    is_of_tokens = method.is_of_tokens and has_token_weight and all(gate.is_of_tokens for gate in config.all_gates)
    # Of the law is what asks neither for probabilities by name nor for segments, of which drawn responses have one.
    reduces = [*method.reduces, *(gate.reduce for gate in config.all_gates)]
    has_segments = any(reduce.startswith("segment") for reduce in reduces)
    is_of_the_law = not has_segments and all(gate.row.follows_from_ratio for gate in config.all_gates)
    # Tokens of their own are the same in shorter responses.
    drawn_length = min(whole, NUM_TOKENS // NUM_RESPONSES) if is_of_tokens else whole
    num_responses = min(NUM_TOKENS // drawn_length, NUM_RESPONSES)
    if num_responses < MIN_RESPONSES or not is_of_the_law:
        return dict.fromkeys(_MEASURED, math.nan)
    law = GaussianLaw(k3, drawn_length)
    halves = [
        _measured(config, method, *draw(law, num_responses, behavior=behavior, half=half))
        for half, behavior in enumerate(BEHAVIOR)
    ]
    found = {
        name: 0.5 * (one + other) if math.isclose(one, other, rel_tol=AGREEMENT) else math.nan
        for name, one, other in zip(_MEASURED, *halves, strict=True)
    }
    if drawn_length < whole:
        found["kept_sequences"] = 1.0 - (1.0 - found["kept_tokens"]) ** length
    return found


def draw(
    law: GaussianLaw, num_responses: int, *, behavior: tuple[float, float], half: int
) -> tuple[dict[str, Any], Tensor]:
    """Log-probs and layout of responses under the law, whose sums are spread evenly, and their advantages ``[T]``.

    The mean of Gaussian tokens is independent of how they lie about it. So each response may get its mean from a
    stratum of its own: what depends on sums then has an error like 1 / num_responses, not like its root.

    Args:
        law: Of a whole number of tokens.
        num_responses: How many.
        behavior: The lowest and the highest log-prob under the policy that sampled, in nats; all between are as likely.
        half: 0 or 1: other numbers, and the signs of the advantages the other way round.
    """
    generator = torch.Generator().manual_seed(half)
    length = int(law.length)
    noise_ST = torch.randn(num_responses, length, generator=generator)
    place_S = torch.arange(num_responses) + torch.rand(num_responses, generator=generator, dtype=torch.float64)
    mean_S = torch.special.ndtri(place_S / num_responses) / math.sqrt(length)
    noise_ST += mean_S.float()[:, None] - noise_ST.mean(1, keepdim=True)
    difference_T = (noise_ST * math.sqrt(law.token.variance) + law.token.mean).flatten()
    lowest, highest = behavior
    behavior_T = lowest + (highest - lowest) * torch.rand(len(difference_T), generator=generator)
    sign_S = 1.0 - 2.0 * ((torch.arange(num_responses) + half) % 2)
    streams = {
        "proximal_logprobs_T": behavior_T + difference_T,
        "behavior_logprobs_T": behavior_T,
        "layout": PackedLayout.whole([length] * num_responses),
    }
    return streams, sign_S.repeat_interleave(length)


_MEASURED = ("kept_tokens", "live_tokens", "kept_sequences", "learning_rate", "ess")


def _measured(
    config: CorrectionConfig, method: Method, streams: dict[str, Any], advantages_T: Tensor
) -> tuple[float, ...]:
    """``_MEASURED`` of a correction and a method on drawn responses, which are one call."""
    mask_T = torch.ones_like(advantages_T)
    weights_T = keep_mask_T = None
    if not config.metrics_only:
        correction = compute_correction(
            **streams,
            response_mask_R=mask_T,
            config=config.replace(metrics=(), scope="data_parallel"),
            # Of the mismatch alone: all tokens are fresh.
            lag_T=torch.zeros_like(advantages_T),
        )
        weights_T, keep_mask_T = correction.weights_T, correction.keep_mask_T
    found = first_update(
        method,
        **streams,
        advantages_T=advantages_T,
        response_mask_T=mask_T,
        weights_T=weights_T,
        keep_mask_T=keep_mask_T,
    )
    factor_T = found.factor_T.double()
    first, second = float(factor_T.mean()), float(factor_T.square().mean())
    kept_S = found.kept_T.view(len(streams["layout"].response_lengths), -1).any(1)
    shares = (float(mask.count_nonzero()) / mask.numel() for mask in (found.kept_T, found.live_T, kept_S))
    # Kish's effective share of the factor on the loss.
    return (*shares, first, first**2 / second if second else math.nan)
