"""Causes that are mistakes: of the data, or of what the log-probs are of. No configuration corrects them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mis_ext.correction.suspicions import MAX_MEAN_ABS_DIFF
from mis_ext.hosts.evidence import IMPROBABLE, PLACEHOLDER
from mis_ext.hosts.guards import degenerate_behavior, shifted_log_probs
from mis_ext.report.finding import MIN_TOKENS, Case, Diagnosis

MIN_PLACEHOLDERS = 2
MIN_EXPLAINED, MIN_SLOPE = 0.3, 0.03
MIN_DEFICIT, MIN_DEFICIT_ERRORS = 1e-3, 8.0
MAX_PADDING_GAP = 0.05
OUTLIER_GAP, OUTLIER_FACTOR = MAX_MEAN_ABS_DIFF, 8.0


def placeholders(case: Case) -> Iterator[Diagnosis]:
    """Fault: numbers that are no log-probs, as sentinels, constants, or log-probs with the sign turned."""
    evidence = case.signals.guard_evidence
    messages = [*degenerate_behavior(evidence)]
    few = evidence.num_placeholders + evidence.num_zeros
    if not messages and few >= MIN_PLACEHOLDERS:
        messages = [
            f"{few:.0f} of {evidence.num_valid:.0f} behavior log-probs are 0 where the proximal ones are below "
            f"{IMPROBABLE:g}, or below {PLACEHOLDER:g}"
        ]
    for message in messages:
        yield Diagnosis(
            "placeholder_log_probs",
            "certain",
            "numbers of the engine that are no log-probs",
            message,
            "Ask the engine for log-probs of the sampled tokens, or mask what has none.",
            is_fault=True,
        )


def shift(case: Case) -> Iterator[Diagnosis]:
    """Fault: the two streams are a token apart."""
    for message in shifted_log_probs(case.signals.guard_evidence):
        yield Diagnosis(
            "shifted_by_one_token",
            "certain",
            "log-probs shifted by one token",
            message,
            "Score position p with the logits of position p - 1, on both sides.",
            is_fault=True,
        )


def other_tokens(case: Case) -> Iterator[Diagnosis]:
    """Fault: the trainer scores other ids, or another text, than the engine sampled."""
    known = [origin.has_other_ids for origin in case.sequences.origins if origin.has_other_ids is not None]
    advice = "Train on the ids that the engine returned: do not decode and encode again."
    if any(known):
        evidence = f"in {sum(known)} of {len(known)} samples the engine sampled other ids than the trainer scored"
        yield Diagnosis(
            "retokenised_samples", "certain", "samples were tokenised again", evidence, advice, is_fault=True
        )
        return
    measured = case.sequences.where(case.sequences.measured)
    if len(measured) < MIN_TOKENS or any(case.summary.by_version):
        return
    gap = measured["gap"] / measured["num_valid"]
    # Where all samples of a step differ, its weights do, not its text.
    usual = _median_of_step(gap, measured.steps).clamp_min(float(gap.median()))
    is_outlier = (gap > OUTLIER_GAP) & (gap > OUTLIER_FACTOR * usual)
    share = float(is_outlier.double().mean())
    if 0.0 < share < 0.4 and float((gap * is_outlier).sum()) > 0.5 * float(gap.sum()):
        evidence = (
            f"{share:.1%} of the samples differ by {float(gap[is_outlier].mean()):.2g} nats per token, the others by "
            f"{float(gap.median()):.2g}"
        )
        yield Diagnosis(
            "retokenised_samples",
            "possible",
            "some samples are of another text than the trainer scored (tokenised again, truncated, or mixed up)",
            evidence,
            advice,
            is_fault=True,
        )


def _median_of_step(values_S: Tensor, steps: Sequence[str]) -> Tensor:
    """``[S]`` median over the samples of each sample's step."""
    numbers = {step: number for number, step in enumerate(dict.fromkeys(steps))}
    number_S = torch.tensor([numbers[step] for step in steps])
    medians = [values_S[number_S == number].median() for number in range(len(numbers))]
    return torch.stack(medians)[number_S]


def temperature(case: Case) -> Iterator[Diagnosis]:
    """The difference is a multiple of the log-prob."""
    if case.signals.num_uncertain < MIN_TOKENS:
        return
    behavior, proximal = case.signals.line_on("behavior"), case.signals.line_on("proximal")
    # Noise on either side makes the difference fall with its own log-prob and rise with the other's.
    same_sign = behavior.slope * proximal.slope > 0.0
    explained = min(behavior.explained, proximal.explained)
    if same_sign and abs(behavior.slope) > MIN_SLOPE and explained > MIN_EXPLAINED:
        yield Diagnosis(
            "temperature",
            "likely",
            "another temperature in one of the log-probs",
            f"the difference is {behavior.slope:+.2g} times the engine's log-prob, which explains "
            f"{behavior.explained:.0%} of its variance: as for a sampling temperature near "
            f"{1.0 + behavior.slope:.2g} times the trainer's",
            "Divide the trainer's logits by the sampling temperature, or ask the engine for log-probs of what it "
            "sampled from.",
            is_fault=True,
        )


def truncation(case: Case) -> Iterator[Diagnosis]:
    """The engine samples from a part of what the trainer scores."""
    count, excess, squared = case.signals.ratios.tolist()
    if count < MIN_TOKENS or case.signals.num_uncertain < MIN_TOKENS:
        return
    deficit = -excess / count
    error = math.sqrt(max(squared / count - deficit**2, 0.0) / count)
    material = max(case.signals.typical_gap(), 1e-5)
    num_large, num_below = case.signals.gaps_beyond(material)
    if deficit < MIN_DEFICIT_ERRORS * error or num_large == 0 or num_below < 0.9 * num_large:
        return
    lowest = float(case.signals.largest[1])
    evidence = (
        f"the mean ratio is {1.0 - deficit:.4g}, {deficit / error if error else math.inf:.0f} standard errors below 1, "
        f"and {num_below / num_large:.0%} of the larger differences are below 0: the trainer gives probability to "
        "tokens that the engine cannot sample"
    )
    if lowest < MAX_PADDING_GAP:
        yield Diagnosis(
            "vocabulary_padding",
            "possible",
            "the trainer's vocabulary is larger: padding takes a part of its probability",
            f"{evidence}; no token loses more than {lowest:.2g} nats",
            "Set the logits of the padding to minus infinity before the log-softmax.",
            is_fault=True,
        )
    elif deficit > MIN_DEFICIT:
        yield Diagnosis(
            "top_p_or_top_k",
            "likely",
            "top-p, top-k or min-p in the sampling, not in the trainer's log-probs",
            f"{evidence}; on average it keeps a mass of {1.0 - deficit:.3g}",
            "Sample with top_p 1 and no top_k, or give the trainer the kept tokens (mis_ext.rollout.define_log_probs).",
            is_fault=True,
        )
