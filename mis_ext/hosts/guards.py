# SPDX-License-Identifier: Apache-2.0
"""What a session watches: mistakes in the data, masks, how much is rejected, and the failures of other ranks.

The first look of each waits for the device. Later ones read what has arrived meanwhile, so that nobody waits, and find
a mistake a call late.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mis_ext.checks.token_sums import (
    FEW_SEQUENCES_ESS,
    MAX_MEAN_ABS_DIFF,
    MIN_TOKENS,
    TokenSums,
    added,
    are_suspicious,
    token_sums,
)
from mis_ext.correction.collectives import failed_rank
from mis_ext.correction.config import CorrectionConfig, GuardName
from mis_ext.correction.correct import Correction
from mis_ext.correction.layout import PackedStreams, TokenRatios
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.packing import extremes_of

if TYPE_CHECKING:
    from mis_ext.tools.diagnosis.cause import Diagnosis

_CALLS_PER_LOOK = 8
_SLOTS = 64

ENOUGH_TOKENS = MIN_TOKENS
"""A check that has seen so many tokens, or pairs of them, has judged and is done."""


SUSPECTS = ("stale_weights", "retokenised_samples", "top_p_or_top_k", "large_mismatch")
"""Causes of a large difference that need more than the first calls measure."""


class MismatchWarning(UserWarning):
    """The data or the configuration make the correction weak, useless or suspicious."""


class AsyncReadback:
    """One tensor on its way from the device to the host, which the host takes without waiting once it has arrived."""

    def __init__(self) -> None:
        self._sent: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.is_empty = True

    def send(self, values: Tensor) -> None:
        """Send ``values`` to the host, in place of what is on its way."""
        self.is_empty = False
        if not values.is_cuda:
            self._sent = (values, None)
            return
        on_host = torch.empty_like(values, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._sent = (on_host, copied)

    def receive(self) -> list[float] | None:
        """The numbers, once; None while there are none."""
        if self._sent is None:
            return None
        values, copied = self._sent
        if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            return None
        self._sent, self.is_empty = None, True
        numbers: list[float] = values.tolist()
        return numbers


class RunningReadback:
    """What several calls have counted together. The first look waits for the device, later ones read what is there."""

    def __init__(self, merge: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._merge = merge
        self._counted: Tensor | None = None
        self._readback = AsyncReadback()

    def add(self, counted: Tensor) -> list[float] | None:
        """Everything that was counted until now, or on a device until a while ago; None while nothing has arrived."""
        is_first = self._counted is None
        self._counted = counted if self._counted is None else self._merge(self._counted, counted)
        if is_first or not counted.is_cuda:
            numbers: list[float] = self._counted.tolist()
            return numbers
        arrived = self._readback.receive()
        if self._readback.is_empty:
            self._readback.send(self._counted)
        return arrived


def is_capturing(values: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be sent."""
    return values.is_cuda and torch.cuda.is_current_stream_capturing()


_WATCHED = ("generated", "n", "kept", "kept responses", "responses")


class RejectionMonitor:
    """Warns, once, when more is rejected than the user thought possible.

    Looks at one call in eight, from the first on, and is a call late: so it never waits for the device.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._readback = AsyncReadback()
        self._warned = False
        self._num_calls = 0

    def observe(self, correction: Correction) -> None:
        """Look at what was sent for if it has arrived, and send for this call's totals if it is their turn."""
        if self._warned or is_capturing(correction.weights_T):
            return
        self._num_calls += 1
        arrived = self._readback.receive()
        if arrived is not None:
            self._warn_above(dict(zip(_WATCHED, arrived, strict=True)))
        if self._readback.is_empty and self._num_calls % _CALLS_PER_LOOK == 1:
            self._readback.send(torch.stack([correction.totals[name] for name in _WATCHED]))

    def _warn_above(self, totals: dict[str, float]) -> None:
        unknown = 1.0 - totals["n"] / totals["generated"] if totals["generated"] else 0.0
        if unknown > self._max_fraction:
            self._warned = True
            warnings.warn(
                f"{unknown:.1%} of the response tokens of a micro-batch have a non-finite log-prob and were masked "
                f"(limit: mis_max_reject_fraction={self._max_fraction:g}). Check that the engine returns log-probs of "
                "sampled tokens (SGLang: return_logprob, vLLM: logprobs). See mis_nonfinite_token_fraction; this "
                "warning comes once",
                MismatchWarning,
                stacklevel=5,
            )
            return
        for what, kept, original in (
            ("tokens", totals["kept"], totals["generated"]),
            ("sequences", totals["kept responses"], totals["responses"]),
        ):
            share = 1.0 - kept / original if original else 0.0
            if share > self._max_fraction:
                self._warned = True
                warnings.warn(
                    f"{share:.1%} of the {what} of a micro-batch were rejected, more than mis_max_reject_fraction = "
                    f"{self._max_fraction:g}: the bounds are too tight for this mismatch (see "
                    "mis_kept_token_fraction and mis_kept_seq_fraction; this warning comes once)",
                    MismatchWarning,
                    stacklevel=5,
                )


class RangeMonitor:
    """Refuses values by the smallest and the largest of them.

    The first look waits for the device. Then it looks at one call in eight, and is a call late.

    Args:
        refuse: Raises for a smallest and a largest value that are not legal.
    """

    def __init__(self, refuse: Callable[[Sequence[float]], None]) -> None:
        self._refuse = refuse
        self._readback = AsyncReadback()
        self._num_calls = 0

    def observe(self, values: Tensor) -> None:
        """Look at what was sent for if it has arrived, and send for the extremes of these if it is their turn."""
        if is_capturing(values):
            return
        self._num_calls += 1
        if self._num_calls == 1:
            extremes = extremes_of(values)
            if extremes is not None:
                self._refuse(extremes.tolist())
            return
        arrived = self._readback.receive()
        if arrived is not None:
            self._refuse(arrived)
        if self._readback.is_empty and self._num_calls % _CALLS_PER_LOOK == 1:
            extremes = extremes_of(values)
            if extremes is not None:
                self._readback.send(extremes)


class StatusMonitor:
    """Raises when another rank failed: at once on a CPU and at the first call, else a call late without waiting."""

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        self._next = 0

    def observe(self, status: Tensor) -> None:
        """Raise if a rank has failed whose data a call of this session needed."""
        if is_capturing(status):
            return
        if self._slots is None:
            raise_if_failed(float(status))
        if not status.is_cuda:
            return
        if self._slots is None:
            self._slots = torch.full((_SLOTS,), torch.inf, pin_memory=True)
        # Four bytes arrive whole, now or later; a status that has not arrived yet is seen by a later call.
        raise_if_failed(float(self._slots.min()))
        self._slots[self._next].copy_(status, non_blocking=True)
        self._next = (self._next + 1) % _SLOTS


def raise_if_failed(status: float) -> None:
    """Raise an error if a status names a rank on which a call failed."""
    rank = failed_rank(status)
    if rank is not None:
        raise RuntimeError(f"a call failed on rank {rank}; the error of that rank says why")


class Finding(NamedTuple):
    """A mistake that stops the run unless its guard is set to warn, or without a guard a doubt; its cause, if named."""

    guard: GuardName | None
    message: str
    cause: str | None = None


class DataGuards:
    """The checks of one session.

    Attributes:
        armed: Those that have not seen enough yet.
    """

    def __init__(self, config: CorrectionConfig) -> None:
        self._config = config
        self.armed = {"degenerate_behavior", "shifted_log_probs", "nonfinite"}
        if not config.metrics_only:
            self.armed |= {"single_sequence", "size"}
        self._readback = RunningReadback(added)

    def inspect(self, tokens: TokenRatios, streams: PackedStreams, groups: Groups) -> list[Finding]:
        """What the log-probs of this rank's tokens give away; doubts are voiced by the first rank."""
        if not self.armed or is_capturing(streams.response_mask_R):
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
            ("nonfinite", has_tokens, _nonfinite(tokens, streams)),
            ("single_sequence", has_tokens, _single_sequence(self._config, in_scope)),
            ("size", has_tokens, _size(self._config, tokens, causes) if has_tokens else iter(())),
        )
        for name, has_seen_enough, findings in checks:
            if name not in self.armed:
                continue
            found = [*findings]
            if any(each.guard is not None and self._config.stops(each.guard) for each in found):
                # The next call is judged by itself: the same mistake stops it too.
                self._readback = RunningReadback(added)
            elif found or has_seen_enough:
                self.armed.discard(name)
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


def _nonfinite(tokens: TokenSums, streams: PackedStreams) -> Iterator[Finding]:
    """Log-probs of which none can be used: every token would be masked, and the loss be 0."""
    if tokens.num_valid > 0.0 or tokens.num_response < ENOUGH_TOKENS:
        return
    response_T = streams.layout.local_part(streams.response_mask_R) != 0
    sides = {
        "rollout_log_probs (behavior)": streams.behavior_logprobs_T,
        "train_log_probs (proximal)": streams.proximal_logprobs_T,
    }
    wrong = [name for name, values_T in sides.items() if not bool((values_T.isfinite() & response_T).any())]
    yield Finding(
        "missing_log_probs",
        f"all {tokens.num_response:g} response tokens have a non-finite log-prob in {' and '.join(wrong or sides)}, so "
        "that every token is masked and the loss is 0. Check that the engine returns log-probs of sampled tokens "
        "(SGLang: return_logprob, vLLM: logprobs), and that the rollout function stores them",
    )


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
