"""Checks of the first micro-batches for mistakes that no later metric would show as such.

A check stays armed until it has seen enough tokens of this rank and found nothing, or has warned. The first look waits
for the device; later ones read what has arrived meanwhile, and find a mistake a call late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mis_ext.checks.limits import FEW_SEQUENCES_ESS, MAX_MEAN_ABS_DIFF, MIN_TOKENS
from mis_ext.checks.token_sums import TokenSums, added, are_suspicious, token_sums
from mis_ext.correction.config import CorrectionConfig, GuardName
from mis_ext.correction.log_ratio import TokenRatios
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.packing import PackedStreams
from mis_ext.hosts.readback import RunningReadback, is_capturing

if TYPE_CHECKING:
    from mis_ext.tools.diagnosis.cause import Diagnosis

ENOUGH_TOKENS = MIN_TOKENS
"""A check that has seen so many tokens, or pairs of them, has judged and is done."""


SUSPECTS = ("stale_weights", "retokenised_samples", "top_p_or_top_k", "large_mismatch")
"""Causes of a large difference that need more than the first calls measure."""


class MismatchWarning(UserWarning):
    """The data or the configuration make the correction weak, useless or suspicious."""


class Finding(NamedTuple):
    """A mistake that stops the run unless its guard is set to warn, or without a guard a doubt; its cause, if named."""

    guard: GuardName | None
    message: str
    cause: str | None = None


class DataGuards:
    """The checks of one session."""

    def __init__(self, config: CorrectionConfig) -> None:
        self._config = config
        self._armed = {"degenerate_behavior", "shifted_log_probs"}
        if not config.metrics_only:
            self._armed |= {"single_sequence", "size"}
        self._readback = RunningReadback(added)

    @property
    def are_armed(self) -> bool:
        """Whether a check has not seen enough yet."""
        return bool(self._armed)

    def inspect(self, tokens: TokenRatios, streams: PackedStreams, groups: Groups) -> list[Finding]:
        """What the log-probs of this rank's tokens give away; doubts are voiced by the first rank."""
        if not self._armed or is_capturing(streams.response_mask_R):
            return []
        counted = self._readback.add(token_sums(tokens, response_mask_R=streams.response_mask_R, layout=streams.layout))
        findings = [] if counted is None else [*self._judge(TokenSums.of(counted), streams, groups)]
        return [finding for finding in findings if finding.guard is not None or groups.is_first_rank]

    def _judge(self, tokens: TokenSums, streams: PackedStreams, groups: Groups) -> Iterator[Finding]:
        in_scope = streams.layout.num_sequences * (groups.dp_size if self._config.scope == "data_parallel" else 1)
        has_tokens, has_pairs = tokens.num_valid >= ENOUGH_TOKENS, tokens.num_pairs >= ENOUGH_TOKENS
        causes = _causes(tokens)
        checks: tuple[tuple[str, bool, Iterator[Finding]], ...] = (
            ("shifted_log_probs", has_pairs, _mistakes("shifted_log_probs", causes, has_pairs)),
            ("degenerate_behavior", has_tokens, _mistakes("degenerate_behavior", causes, has_tokens)),
            ("single_sequence", has_tokens, _single_sequence(self._config, in_scope)),
            ("size", has_tokens, _size(self._config, tokens, causes) if has_tokens else iter(())),
        )
        for name, has_seen_enough, findings in checks:
            if name not in self._armed:
                continue
            found = [*findings]
            if any(each.guard is not None and self._config.stops(each.guard) for each in found):
                # The next call is judged by itself: the same mistake stops it too.
                self._readback = RunningReadback(added)
            elif found or has_seen_enough:
                self._armed.discard(name)
            yield from found


# Rules, texts and advice load where something is found: most runs never need them.


def _causes(tokens: TokenSums) -> list[tuple[Diagnosis, GuardName | None]]:
    """The causes that sums over tokens show, each with the guard that stops on it."""
    if not are_suspicious(tokens):
        return []
    from mis_ext.tools.diagnosis.measuring import Measured
    from mis_ext.tools.diagnosis.table import CAUSES, diagnose

    return [(found, CAUSES[found.cause].guard) for found in diagnose(Measured(tokens=tokens))]


def _mistakes(
    guard: GuardName, causes: Iterable[tuple[Diagnosis, GuardName | None]], has_seen_enough: bool
) -> Iterator[Finding]:
    """The causes that a guard stops on; of a few tokens a doubt, which must not end the watch too early."""
    for found, its_guard in causes:
        if its_guard == guard and (found.is_pattern or has_seen_enough):
            yield Finding(guard if found.is_pattern else None, _in_words(found), found.cause)


def _in_words(found: Diagnosis) -> str:
    return f"{found.in_words}. {found.advice} ({found.cause}, {found.confidence})"


def _single_sequence(config: CorrectionConfig, num_sequences: int) -> Iterator[Finding]:
    if num_sequences == 1 and config.normalize_over is not None:
        from mis_ext.tools.explain.traps import single_sequence

        for message in single_sequence(config, num_sequences):
            yield Finding(None, message)


def _size(
    config: CorrectionConfig, tokens: TokenSums, causes: Iterable[tuple[Diagnosis, GuardName | None]]
) -> Iterator[Finding]:
    """Doubts about what the log-probs are of, and about how large the mismatch is."""
    named = [found for found, guard in causes if guard is None]
    for found in named:
        yield Finding(None, _in_words(found), found.cause)
    gap = tokens.gap_rest / tokens.num_rest if tokens.num_rest else 0.0
    if not named and gap > MAX_MEAN_ABS_DIFF:
        from mis_ext.tools.diagnosis.table import CAUSES

        suspects = "; ".join(CAUSES[name].title for name in SUSPECTS)
        yield Finding(
            None,
            f"behavior and proximal log-probs differ by {gap:.3g} nats per token on average, more than "
            f"{MAX_MEAN_ABS_DIFF:g}. The first calls cannot tell which of these is the cause: {suspects}. Run "
            "mis-ext report on a dump of the rollout: it measures more",
        )
    k3, length = tokens.k3 / tokens.num_valid, tokens.num_response / tokens.num_sequences
    # Kish's effective share of products of ratios, by the Gaussian law of a token's log-ratio, N(-k3, 2 k3).
    if config.multiplies_ratios and math.exp(-2.0 * k3 * length) < FEW_SEQUENCES_ESS:
        from mis_ext.tools.explain.traps import hopeless_sequences

        for message in hopeless_sequences(config, k3=k3, length=length):
            yield Finding(None, message)
