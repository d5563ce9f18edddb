# SPDX-License-Identifier: Apache-2.0
"""Faults of the data: numbers of the engine that are no log-probs, or are those of other tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.checks.token_sums import (
    IMPROBABLE,
    MAX_MEAN_ABS_DIFF,
    MIN_CONSTANT_TOKENS,
    MIN_TOKENS,
    PLACEHOLDER,
    SHIFT_FACTOR,
    TokenSums,
    vary,
)
from mis_ext.correction.tokens import MAX_LOG_RATIO
from mis_ext.tools.diagnosis.cause import Finding, cause
from mis_ext.tools.diagnosis.measuring import PLACES, Measured, Samples
from mis_ext.tools.diagnosis.size import stale_words

MAX_ZERO_GAP = 0.01
"""Nats. Behavior log-probs that are all 0 need a trainer that is as certain."""

SUSPICIOUS_SHARE, ZERO_SHARE = 0.01, 0.05
"""Of tokens: from here on a mistake is a pattern. A log-prob of 0 may be that of a token without alternative."""

MIN_PLACEHOLDERS = 2
"""One extreme token is no pattern."""

NEARLY_ALL, ZEROS_ELSEWHERE = 0.9, 0.25
"""Zeros at one place, in nearly all responses, are no log-probs unless tokens elsewhere that are as probable to the
other side are zeros, too, as of a cut."""

MIN_SAMPLES = 16
OUTLIER_FACTOR, MAX_OUTLIERS, MIN_OUTLIERS_K3 = 5.0, 0.4, 0.5
"""Samples of another text stand apart and have most of k3. Of an fp8 cache (e5m2) one sample is as far apart, with a
tenth of k3."""

MAX_BETWEEN = 0.2
"""Some doubling of the difference, between the usual one and theirs, holds at most so many samples for each of them;
none does with a planted text, and 0.4 where a trainer's weights ran away from its engine's
(pretrained_precision_fp16_trainer)."""

MIN_STILL, MIN_ROOM = 0.5, 1e-6
"""Another text is as frequent where weights have not moved, by chance half as frequent at least. They have moved where
samples differ ``OUTLIER_FACTOR`` times as much, divided by 1 - p: in 36 runs whose weights were fresh, or moved little,
a step had 2.5 times as much as another at most, and 465 times before the division; 13 and more where an update moved a
nearly certain policy. Samples that are more certain than ``MIN_ROOM`` are rounded too much to tell."""

MAX_LISTED = 5

MIXED_UP = "samples that were truncated or mixed up"

SMALLEST_VOCABULARY, USUAL_VOCABULARY = 32, 32_000
"""Tokens: letters, and what language models have at least. A guess among more is still worse."""

MAX_STALE_DIFF = 1.0
"""Nats per token; another text is farther. With weights eight updates old 6 % of the samples are beyond
``MAX_MEAN_ABS_DIFF``, with 63 % of k3, and 1 % beyond this, with 24 % (pretrained_stale_8 in lab/evidence)."""


@cause(
    name="shifted_by_one_token",
    title="log-probs shifted by one token",
    looks_like="the streams, or those of some responses, fit at least twice as well when one is shifted by a token; "
    "in either half of such a response 4 tokens differ by more than 0.1 nats",
    advice="Score position p with the logits of position p - 1, on both sides.",
    is_fault=True,
    guard="shifted_log_probs",
    takes_out=True,
)
def shifted(measured: Measured, tokens: TokenSums) -> Finding | None:
    (aligned, moved), all_shifted = tokens.pair_gaps, tokens.is_shifted
    num_lagged, k3_lagged = _lagged(measured.samples)
    num_shifted = tokens.num_shifted - num_lagged
    if not all_shifted and not num_shifted:
        return None
    by = f"by {aligned / tokens.num_pairs:.3g} on average, but by only {moved / tokens.num_pairs:.3g} when one of them"
    some = f"{num_shifted:.0f} of {tokens.num_valid:.0f} tokens are in responses whose"
    return Finding(
        confidence="certain",
        evidence=f"behavior and proximal log-probs differ {by} is shifted by a token: they are misaligned"
        if all_shifted
        else f"{some} log-probs fit at least twice as well when one side is shifted by a token: they are misaligned",
        k3_share=1.0
        if all_shifted
        else _share_of(tokens.k3_shifted - k3_lagged, k3_lagged + tokens.k3_positive + tokens.k3_rest),
        is_pattern=all_shifted or num_shifted > SUSPICIOUS_SHARE * tokens.num_valid,
        is_all=all_shifted,
    )


def _lagged(samples: Samples | None) -> tuple[float, float]:
    """Tokens of samples that are shifted by more than one, which are among those that are shifted, and their k3."""
    if samples is None:
        return 0.0, 0.0
    return float(samples["num_lagged"].sum()), float(samples["k3_lagged"].sum())


@cause(
    name="shifted_by_many_tokens",
    title="log-probs shifted by more than one token",
    looks_like="probabilities of a sample fit at least twice as well when one stream is shifted by 2 tokens or more",
    advice="Take the last of the engine's log-probs, as many as there are ids: after a retraction or an abort "
    "those of a dropped attempt may stand before them.",
    is_fault=True,
    takes_out=True,
)
def shifted_by_many(measured: Measured, samples: Samples) -> Finding | None:
    lag_S = samples["lag"]
    if not bool(lag_S.any()):
        return None
    num_lagged, k3_lagged = _lagged(samples)
    found = []
    for when, lag_N in (("late", lag_S[lag_S > 0.0]), ("early", -lag_S[lag_S < 0.0])):
        lags = [f"{lag:g}" for lag in sorted({*lag_N.tolist()})]
        listed = ", ".join(lags[:MAX_LISTED]) + (", ..." if len(lags) > MAX_LISTED else "")
        found += [f"too {when} in {len(lag_N)}, by {listed} tokens"] if lags else []
    return Finding(
        confidence="certain",
        evidence=f"of {len(lag_S)} samples the engine's log-probs come {', and '.join(found)}: the probabilities of "
        f"these {num_lagged:.0f} tokens fit at least twice as well when they are shifted back",
        k3_share=_share_of(k3_lagged, measured.tokens.k3_positive + measured.tokens.k3_rest),
        is_pattern=num_lagged > SUSPICIOUS_SHARE * measured.tokens.num_valid,
    )


@cause(
    name="negated_log_probs",
    title="log-probs with the wrong sign: negative log-likelihoods in place of log-probs",
    looks_like="the streams fit at least twice as well when the sign of one is flipped",
    advice="Store log-probs, which are below 0, on both sides.",
    is_fault=True,
    guard="degenerate_behavior",
)
def negated(measured: Measured, tokens: TokenSums) -> Finding | None:
    count = max(tokens.num_valid, 1.0)
    differ = tokens.gap > MAX_ZERO_GAP * count
    if count < MIN_CONSTANT_TOKENS or not differ or tokens.negated >= SHIFT_FACTOR * tokens.gap:
        return None
    return Finding(
        confidence="certain",
        evidence=f"behavior and proximal log-probs differ by {tokens.gap / count:.3g} on average, but by only "
        f"{tokens.negated / count:.3g} when the sign of one is flipped",
        k3_share=1.0,
        is_all=True,
    )


@cause(
    name="positive_log_probs",
    title="numbers above 0, which are no log-probs",
    looks_like="log-probs above 0.1: they are probabilities, or something was added to them; all of a response "
    "where none is below 0",
    advice="Store logarithms of probabilities, without a reward or a bonus in them.",
    is_fault=True,
    guard="degenerate_behavior",
    takes_out=True,
)
def positive(measured: Measured, tokens: TokenSums) -> Finding | None:
    sides = {"behavior": tokens.num_positive, "proximal": tokens.num_proximal_positive}
    found = [f"{count:.0f} of {tokens.num_valid:.0f} {side} log-probs" for side, count in sides.items() if count]
    most = max(sides.values())
    if most < MIN_PLACEHOLDERS or tokens.num_valid < MIN_CONSTANT_TOKENS:
        return None
    return Finding(
        confidence="certain",
        evidence=f"{' and '.join(found)} on trainable tokens are above 0, and no probability is above 1",
        k3_share=_share_of(tokens.k3_positive, tokens.k3_rest),
        is_pattern=most > SUSPICIOUS_SHARE * tokens.num_valid,
        is_all=most > 0.5 * tokens.num_valid,
    )


@cause(
    name="placeholder_log_probs",
    title="placeholders in place of log-probs, or no log-prob at all",
    looks_like="log-probs that are null, NaN or infinite; below -1000 on one side; 0 where the other is below -1, "
    "unless the other finds zeros more probable than the rest; 0 at one place (first or last of a response or turn) "
    "nearly always; all equal, in a response or everywhere; 8 that are lowest in a response, as of a clamp",
    advice="Ask the side that has them for log-probs (the engine: return_logprob in SGLang, logprobs in vLLM), "
    "or set the loss_masks of those tokens to 0. Engines return 0 for tokens that they sampled greedily.",
    is_fault=True,
    guard="degenerate_behavior",
    takes_out=True,
)
def placeholders(measured: Measured, tokens: TokenSums) -> Finding | None:
    num_missing, missing = _missing(measured.samples)
    if tokens.num_valid + num_missing < MIN_CONSTANT_TOKENS:
        return None
    num_zeros, num_proximal_zeros = _num_zeros(measured)
    if evidence := _constants(tokens):
        return Finding(confidence="certain", evidence=evidence, k3_share=1.0, is_all=True)
    num_placed, placed = _zeros_of_a_place(measured)
    found = [*missing, *_some_placeholders(tokens, num_zeros, num_proximal_zeros), *placed]
    if not found:
        return None
    has_zeros = bool(num_zeros or num_placed)
    zeros = float(measured.samples["k3_zeros"].sum()) if measured.samples is not None and has_zeros else 0.0
    most, most_zeros = (max(1.0, share * tokens.num_valid) for share in (SUSPICIOUS_SHARE, ZERO_SHARE))
    return Finding(
        confidence="certain",
        evidence="; ".join(found),
        k3_share=_share_of(
            tokens.k3_placeholders + zeros, tokens.k3_shifted + tokens.k3_positive + tokens.k3_rest - zeros
        ),
        is_pattern=max(tokens.num_placeholders, tokens.num_constant, num_missing, num_placed) > most
        or num_zeros > most_zeros,
        takes_out="zeros" if has_zeros else None,
    )


def _missing(samples: Samples | None) -> tuple[float, list[str]]:
    """How many trained tokens of a side have no finite log-prob, and that in words."""
    if samples is None:
        return 0.0, []
    counts = {side: samples[f"missing_{side}"] for side in ("proximal", "behavior")}
    totals = {side: float(count_S.sum()) for side, count_S in counts.items()}
    return max(totals.values()), [
        f"{total:.0f} {side} log-probs on trainable tokens are missing (null, NaN or infinite), in "
        f"{int((counts[side] > 0.0).sum())} of {len(samples)} responses"
        for side, total in totals.items()
        if total >= MIN_PLACEHOLDERS
    ]


def _zeros_of_a_place(measured: Measured) -> tuple[float, list[str]]:
    """Zeros of a side at one place of nearly all responses that no cut explains: how many, and that in words."""
    most, words = 0.0, list[str]()
    if measured.zeros is not None and not measured.tokens.is_shifted:
        for place, sides in zip(PLACES, measured.zeros.tolist(), strict=True):
            for side, (at, zeros, alike, zeros_alike) in zip(("behavior", "proximal"), sides, strict=True):
                is_usual = zeros >= max(NEARLY_ALL * at, MIN_CONSTANT_TOKENS)
                if zeros > most and is_usual and alike and zeros_alike < ZEROS_ELSEWHERE * alike:
                    most = zeros
                    words = [f"{zeros:.0f} of {at:.0f} {side} log-probs are exactly 0 at {place}, and not elsewhere"]
    return most, words


def _num_zeros(measured: Measured) -> tuple[float, float]:
    """Tokens with a log-prob of 0 on one side that nothing else explains, and how many of them are the trainer's."""
    tokens = measured.tokens
    # A shift puts certain tokens beside improbable ones, and so does another text in a part of the samples.
    if tokens.is_shifted:
        return 0.0, 0.0
    near = measured.without("far").tokens
    most = near if near.num_valid > (1.0 - MAX_OUTLIERS) * tokens.num_valid else tokens
    return most.num_zeros, most.num_proximal_zeros


def _constants(tokens: TokenSums) -> str:
    """That all log-probs of a side are one number, or all those that differ from the other side's."""
    count, different = tokens.num_valid, tokens.num_different
    others_vary = vary(count, tokens.difference, tokens.gap, tokens.squared)
    for side, other in (("behavior", "proximal"), ("proximal", "behavior")):
        number = tokens.one_number(side)
        is_zero = number == 0.0 and side == "behavior" and tokens.gap > MAX_ZERO_GAP * count and count >= MIN_TOKENS
        if number is not None and (others_vary or is_zero):
            return f"all {count:.0f} {side} log-probs on trainable tokens are {number:g}, and the {other} ones are not"
    if different >= MIN_CONSTANT_TOKENS and tokens.gap > MAX_MEAN_ABS_DIFF * different:
        for side in ("behavior", "proximal"):
            number = tokens.one_number(side, of_different=True)
            if number is not None:
                return f"the {different:.0f} {side} log-probs that differ from the other side's are all {number:g}"
    return ""


def _some_placeholders(tokens: TokenSums, num_zeros: float, num_proximal_zeros: float) -> Iterator[str]:
    def of_side(count: float, side: str, what: str) -> str:
        return f"{count:.0f} of {tokens.num_valid:.0f} {side} log-probs on trainable tokens are {what}"

    if tokens.num_placeholders + num_zeros >= MIN_PLACEHOLDERS:
        of_proximal = tokens.num_proximal_placeholders
        for side, count in (("behavior", tokens.num_placeholders - of_proximal), ("proximal", of_proximal)):
            if count:
                yield of_side(count, side, f"placeholders below {PLACEHOLDER:g}")
        for side, other, count in (
            ("behavior", "proximal", num_zeros - num_proximal_zeros),
            ("proximal", "behavior", num_proximal_zeros),
        ):
            if count:
                yield of_side(count, side, f"0, where the {other} ones are below {IMPROBABLE:g}")
    if tokens.num_constant:
        yield (
            f"{tokens.num_constant:.0f} of {tokens.num_valid:.0f} log-probs on trainable tokens are in responses where "
            "all are the same number, or all that are lowest, as of a clamp, while those of the other side are not"
        )


@cause(
    name="broken_trainer",
    title="a broken trainer: it finds the sampled tokens less probable than a uniform guess would",
    looks_like="the trainer's mean log-prob is below that of a uniform guess among the ids up to the largest "
    "(32,000 if more, or not known), and 0.3 nats below the engine's",
    advice="Check that its weights were loaded, with the scales of 8-bit weights, and that it scores the "
    "sampled ids behind the same prompt.",
    is_fault=True,
)
def broken_trainer(measured: Measured, tokens: TokenSums) -> Finding | None:
    return _worse_than_a_guess(measured, "trainer", tokens.proximal_rest, tokens.behavior_rest)


@cause(
    name="broken_engine",
    title="a broken engine: it finds the tokens that it sampled less probable than a uniform guess would",
    looks_like="the same of the engine",
    advice="Check that its last update has loaded all weights, with the scales of 8-bit weights, and that it "
    "returns the log-probs of the sampled tokens.",
    is_fault=True,
)
def broken_engine(measured: Measured, tokens: TokenSums) -> Finding | None:
    return _worse_than_a_guess(measured, "engine", tokens.behavior_rest, tokens.proximal_rest)


def _worse_than_a_guess(measured: Measured, side: str, log_probs: float, others: float) -> Finding | None:
    count, num_ids = measured.tokens.num_rest, _num_ids(measured.samples)
    # Where both sides have the same, a policy is nearly uniform.
    is_worse = log_probs < -math.log(num_ids) * count and log_probs < others - MAX_MEAN_ABS_DIFF * count
    if count < MIN_TOKENS or not is_worse:
        return None
    return Finding(
        confidence="certain",
        evidence=f"the {side}'s log-probs are {log_probs / count:.3g} on average (each taken as {-MAX_LOG_RATIO:g} or "
        f"more), and a uniform guess among {num_ids} tokens gives {-math.log(num_ids):.3g}",
        k3_share=1.0,
        is_all=True,
    )


def _num_ids(samples: Samples | None) -> int:
    """Tokens of the vocabulary: the real number is not known, and may be larger."""
    known = [] if samples is None else samples["largest_id"][~samples["largest_id"].isnan()].tolist()
    return min(max(int(max(known)) + 1, SMALLEST_VOCABULARY), USUAL_VOCABULARY) if known else USUAL_VOCABULARY


def _share_of(k3: float, others: float) -> float:
    """Of the k3 of tokens that are taken out and of those that are left then."""
    return k3 / (k3 + others) if k3 else 0.0


@cause(
    name="retokenised_samples",
    title="samples whose text is not the one that the trainer scored, for example a text tokenised again",
    looks_like="ids that differ; or less than 40 % of the samples differ 5 times as much as the others, by "
    "more than 0.3 nats, with few between, and have most of k3, also in steps whose other samples do not differ more",
    advice="Train on the ids that the engine returned: do not decode and encode again.",
    is_fault=True,
    takes_out=True,
)
def other_ids(measured: Measured, samples: Samples) -> Finding | None:
    known = samples["has_other_ids"]
    known = known[~known.isnan()]
    if bool(known.any()):
        evidence = f"in {int(known.sum())} of {len(known)} samples the engine sampled other ids than the trainer scored"
        return Finding(
            confidence="certain",
            evidence=evidence,
            k3_share=_of_total(samples, samples["has_other_ids"] == 1.0),
            is_pattern=float(known.mean()) > SUSPICIOUS_SHARE,
            takes_out="other_ids",
        )
    return _apart(measured, has_equal_ids=False, alternatives=(MIXED_UP,))


@cause(
    name="other_context",
    title="samples behind another prompt or context, or with log-probs of other samples: their ids are right",
    looks_like="samples differ as where a text is tokenised again, and their ids are equal",
    advice="Compare what stands before these responses on both sides (prompt, template, images, tools), and "
    "whether each has the log-probs of its own request.",
    is_fault=True,
    takes_out=True,
)
def other_context(measured: Measured, samples: Samples) -> Finding | None:
    return _apart(measured, has_equal_ids=True)


def _apart(measured: Measured, *, has_equal_ids: bool, alternatives: tuple[str, ...] = ()) -> Finding | None:
    found = apart(measured, has_equal_ids=has_equal_ids)
    if found is None or found.of_weights:
        return None
    return Finding(
        confidence="possible",
        evidence=found.evidence + (", and their ids are the same on both sides" if has_equal_ids else ""),
        k3_share=found.k3_share,
        takes_out="far",
        alternatives=alternatives,
    )


class Apart(NamedTuple):
    """Samples that are much farther apart than the others; in words why weights did that and no text, if they did."""

    evidence: str
    k3_share: float
    of_weights: str


def apart(measured: Measured, *, has_equal_ids: bool) -> Apart | None:
    """Of those whose ids are equal, or of those without such."""
    assert measured.samples is not None
    samples = measured.samples.measured
    if len(samples) < MIN_SAMPLES:
        return None
    gap, number_S = samples.mean_gap, _groups(samples)
    # Where all samples of a step or of a version differ, its weights do, not its text.
    usual = _medians(gap, number_S, int(number_S.max()) + 1)[number_S].clamp_min(float(gap.median()))
    limit = MAX_STALE_DIFF if stale_words(measured.without("far")) else MAX_MEAN_ABS_DIFF
    is_outlier = (gap > limit) & (gap > OUTLIER_FACTOR * usual) & ((samples["has_other_ids"] == 0.0) == has_equal_ids)
    share = float(is_outlier.double().mean())
    if not 0.0 < share < MAX_OUTLIERS or _of_total(samples, is_outlier) < MIN_OUTLIERS_K3:
        return None
    if _fewest_between(gap, float(gap[is_outlier].median())) > MAX_BETWEEN * int(is_outlier.sum()):
        return None
    return Apart(
        evidence=f"{share:.1%} of the samples differ by {float(gap[is_outlier].mean()):.2g} nats per token, the others "
        f"by {float(gap.median()):.2g}",
        k3_share=_of_total(samples, is_outlier),
        of_weights=_of_weights(samples, is_outlier, number_S),
    )


def of_weights(measured: Measured) -> str:
    """Evidence of samples that weights have set apart; empty where there are none."""
    if measured.samples is None:
        return ""
    found = [apart(measured, has_equal_ids=each) for each in (False, True)]
    return next((f"{each.evidence}; {each.of_weights}" for each in found if each is not None and each.of_weights), "")


def _of_weights(samples: Samples, is_outlier_S: Tensor, number_S: Tensor) -> str:
    """Evidence that these are apart where most of their step and version differ more, too: by their weights.

    Another text is one at any weights, and moves no other sample.
    """
    is_told_S = samples["room"] > MIN_ROOM * samples["num_tokens"]
    total, told, numbers = int(number_S.max()) + 1, samples.where(is_told_S), number_S[is_told_S]
    shift = _medians(told["gap"] / told["room"], numbers, total)
    shift[torch.bincount(numbers, minlength=total) < MIN_SAMPLES] = math.nan
    floor = float(shift.nan_to_num(math.inf).min())
    has_moved = shift > OUTLIER_FACTOR * floor
    is_still_S = ~has_moved[number_S]
    num, num_still = int(is_outlier_S.sum()), int((is_outlier_S & is_still_S).sum())
    if num_still >= MIN_STILL * num * float(is_still_S.double().mean()):
        return ""
    return (
        f"{num - num_still} of these {num} are in steps, or of versions, in which most differ by "
        f"{float(shift[has_moved].min()):.2g} (1 - p) nats or more, and elsewhere by {floor:.2g}"
    )


def _fewest_between(gap_S: Tensor, far: float) -> int:
    """Samples in the emptiest interval from a difference to its double, between the usual one and ``far``."""
    sorted_S = gap_S.sort().values
    usual = 1.5 * gap_S.median().clamp_min(torch.finfo(gap_S.dtype).tiny)
    starts = torch.cat([usual[None], sorted_S[(sorted_S > usual) & (sorted_S <= far / 2)]])
    counts = torch.searchsorted(sorted_S, 2 * starts) - torch.searchsorted(sorted_S, starts, right=True)
    return int(counts.min())


def _of_total(samples: Samples, chosen_S: Tensor) -> float:
    total = float(samples["k3"].sum())
    return float((samples["k3"] * chosen_S).sum()) / total if total else 0.0


def _medians(values_S: Tensor, number_S: Tensor, total: int) -> Tensor:
    """Over the samples of each number, NaN where there are none."""
    return torch.stack([values_S[number_S == number].median() for number in range(total)])


def _groups(samples: Samples) -> Tensor:
    """``[S]`` a number of each sample's step and version."""
    groups = [*zip(samples.steps, map(str, samples["versions_behind"].tolist()), strict=True)]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return torch.tensor([numbers[group] for group in groups])
