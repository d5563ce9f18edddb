"""Checks of the first micro-batches for mistakes that no later metric would show as such.

A check stays armed until it has seen enough tokens of this rank and found nothing, or has warned. The first look waits
for the device; later ones read what has arrived meanwhile, and find a mistake a call late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mis_ext.correction.config import CorrectionConfig, GuardName
from mis_ext.correction.suspicions import MAX_MEAN_ABS_DIFF, MIN_CONSTANT_TOKENS, MIN_SHIFT_TOKENS, SHIFT_FACTOR
from mis_ext.explain.traps import hopeless_sequences, single_sequence
from mis_ext.hosts.evidence import IMPROBABLE, PLACEHOLDER, Evidence, added, evidence_of, vary
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.mailbox import Tally, is_capturing
from mis_ext.hosts.packing import PackedStreams

ENOUGH_TOKENS = MIN_SHIFT_TOKENS
"""A check that has seen so many tokens, or pairs of them, has judged and is done."""

MAX_ZERO_GAP = 0.01
"""Nats. Behavior log-probs that are all 0 need a trainer that is as certain."""

SUSPICIOUS_SHARE = 0.01
ZERO_SHARE = 0.05


class MismatchWarning(UserWarning):
    """Something about the data or the configuration makes the correction weak, useless or suspicious."""


class Finding(NamedTuple):
    """A mistake that stops the run unless its guard is set to warn, or without a guard a doubt."""

    guard: GuardName | None
    message: str


class DataGuards:
    """The checks of one session."""

    def __init__(self, config: CorrectionConfig) -> None:
        self._config = config
        self._armed = {"degenerate_behavior", "shifted_log_probs"}
        if not config.metrics_only:
            self._armed |= {"single_sequence", "size"}
        self._tally = Tally(added)

    @property
    def are_armed(self) -> bool:
        """Whether a check has not seen enough yet."""
        return bool(self._armed)

    def inspect(self, streams: PackedStreams, groups: Groups) -> list[Finding]:
        """What the log-probs of this rank's tokens give away; doubts are voiced by the first rank."""
        if not self._armed or is_capturing(streams.response_mask_R):
            return []
        counted = self._tally.add(evidence_of(streams))
        findings = [] if counted is None else [*self._judge(Evidence(*counted), streams, groups)]
        return [finding for finding in findings if finding.guard is not None or groups.is_first_rank]

    def _judge(self, evidence: Evidence, streams: PackedStreams, groups: Groups) -> Iterator[Finding]:
        in_scope = streams.layout.num_sequences * (groups.dp_size if self._config.scope == "data_parallel" else 1)
        has_tokens, has_pairs = evidence.num_valid >= ENOUGH_TOKENS, evidence.num_pairs >= ENOUGH_TOKENS
        checks: tuple[tuple[str, GuardName | None, bool, Iterator[str]], ...] = (
            # First, because a shift also puts certain tokens beside improbable ones.
            ("shifted_log_probs", "shifted_log_probs", has_pairs, shifted_log_probs(evidence)),
            ("degenerate_behavior", "degenerate_behavior", has_tokens, degenerate_behavior(evidence)),
            ("single_sequence", None, has_tokens, single_sequence(self._config, in_scope)),
            ("size", None, has_tokens, _size(self._config, evidence)),
        )
        for name, guard, has_seen_enough, messages in checks:
            if name not in self._armed:
                continue
            found = [Finding(guard, message) for message in messages]
            if found and guard is not None and self._config.stops(guard):
                # The next call is judged by itself: the same mistake stops it too.
                self._tally = Tally(added)
            elif found or has_seen_enough:
                self._armed.discard(name)
            yield from found


def degenerate_behavior(evidence: Evidence) -> Iterator[str]:
    """What is wrong with behavior log-probs that are none, in words."""
    count = evidence.num_valid
    if count < MIN_CONSTANT_TOKENS:
        return
    # One absurd token is no pattern.
    enough = max(1.0, SUSPICIOUS_SHARE * count)
    differ = evidence.gap > MAX_ZERO_GAP * count
    is_constant = evidence.lowest == -evidence.negated_highest
    is_zero = evidence.lowest == 0.0 and differ and count >= ENOUGH_TOKENS
    others_vary = vary(count, evidence.difference, evidence.gap, evidence.squared)
    of_all = f"of {count:.0f} behavior log-probs on trainable tokens are"
    ask = "ask the inference engine for log-probs (return_logprob in SGLang, logprobs in vLLM)"
    if evidence.num_placeholders > enough:
        yield (
            f"{evidence.num_placeholders:.0f} {of_all} placeholders below {PLACEHOLDER:g}: some responses came back "
            "without log-probs; set their loss_masks to 0"
        )
    elif differ and evidence.negated < SHIFT_FACTOR * evidence.gap:
        yield (
            f"behavior and proximal log-probs differ by {evidence.gap / count:.3g} on average, but by only "
            f"{evidence.negated / count:.3g} when the sign of one is flipped: negative log-likelihoods were stored "
            "where log-probs belong"
        )
    elif evidence.num_positive > enough:
        yield (
            f"{evidence.num_positive:.0f} {of_all} above 0, and no probability is above 1: these are other numbers, or "
            "something was added to them"
        )
    elif is_constant and (is_zero or others_vary):
        yield (
            f"all {count:.0f} behavior log-probs on trainable tokens are {evidence.lowest:g}, and the proximal ones "
            f"are not: {ask}; it returns 0 for tokens that it sampled greedily"
        )
    elif evidence.num_zeros > max(1.0, ZERO_SHARE * count):
        yield (
            f"{evidence.num_zeros:.0f} {of_all} 0, where the proximal ones are below {IMPROBABLE:g}: {ask}, or set the "
            "loss_masks of these tokens to 0; it returns 0 for tokens that it sampled greedily"
        )
    elif evidence.num_constant > enough:
        yield (
            f"{evidence.num_constant:.0f} {of_all} in responses where all are the same number, while the proximal ones "
            f"are not: {ask}, or set the loss_masks of these responses to 0"
        )


def shifted_log_probs(evidence: Evidence) -> Iterator[str]:
    """That the streams fit much better when one of them is shifted by a token."""
    # The better of the two: at the end of a response one absurd log-prob is in all sums but one.
    aligned, shifted = min(evidence.first, evidence.second), min(evidence.earlier, evidence.later)
    if evidence.num_pairs < ENOUGH_TOKENS or shifted >= SHIFT_FACTOR * aligned:
        return
    yield (
        f"behavior and proximal log-probs differ by {aligned / evidence.num_pairs:.3g} on average, but by only "
        f"{shifted / evidence.num_pairs:.3g} when one of them is shifted by a token: they are misaligned (the logits "
        "at position p - 1 score the token at position p)"
    )


def _size(config: CorrectionConfig, evidence: Evidence) -> Iterator[str]:
    """Doubts about how large the mismatch is."""
    if evidence.num_valid < ENOUGH_TOKENS:
        return
    gap, k3 = evidence.gap / evidence.num_valid, evidence.k3 / evidence.num_valid
    if gap > MAX_MEAN_ABS_DIFF:
        yield (
            f"behavior and proximal log-probs differ by {gap:.3g} nats per token on average, more than "
            f"{MAX_MEAN_ABS_DIFF:g}: check temperature, top-p, tokenisation, and that the weights were synchronised"
        )
    yield from hopeless_sequences(config, k3=k3, length=evidence.num_response / evidence.num_sequences)
