# SPDX-License-Identifier: Apache-2.0
"""Runtime checks of a session: data, masks, the rejected share, and failures of other ranks.

The first run of a check waits for the device. Later runs read values that have arrived, and report a problem one call
late.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.config import GuardName
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.correction.tokens import MAX_LOG_RATIO
from mis_ext.validation import MismatchWarning

CALLS_PER_LOOK = 8
_ASK = (
    "Check that the engine returns log-probs for sampled tokens (SGLang: return_logprob, vLLM: logprobs). See "
    "mis_nonfinite_token_fraction"
)
_PLACEHOLDERS = (
    "have a log-prob below -1000, 0 where the other side is below -1, or the same in the whole response. Request "
    "log-probs from the engine (SGLang: return_logprob=True, vLLM: logprobs=0), or set loss_mask to 0 for these "
    "tokens. Greedy sampling also returns 0."
)
_SHIFT = "Score position p with the logits of position p - 1, on both sides."
_CAUSES = (
    "Possible causes: stale engine weights; re-tokenized samples; top-p, top-k, or min-p sampling; very low engine "
    'precision. Run "mis-ext report" on a rollout dump to identify the cause.'
)


class Monitor:
    """Checks values of calls: at once in the first call and on a CPU, else after they have been copied to the CPU.

    Args:
        judge: Reads the values. Raises, or returns True if no further check is needed.
        every: Check the values of one in this many calls.
        merge: Combines the values of all calls; None: judge each call separately.
    """

    def __init__(
        self,
        judge: Callable[[list[float]], Any],
        *,
        every: int = CALLS_PER_LOOK,
        merge: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._judge, self._every, self._merge = judge, every, merge
        self._num_calls = 0
        self._merged: Tensor | None = None
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None
        self.is_done = False

    def observe(self, numbers_of: Callable[[Any], Tensor | None], seen: Any, *, on: Tensor) -> None:
        """Judge the values that have arrived. If this call is due, judge or send ``numbers_of(seen)``.

        ``numbers_of`` returns ``[N]`` on the device of ``on``, or None if nothing can be wrong.
        """
        # Nothing can be copied while a CUDA graph is captured.
        if self.is_done or (on.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._num_calls += 1
        if self._sent is not None and self._sent[1].query():  # type: ignore[no-untyped-call]
            arrived, self._sent = self._sent[0], None
            self._look_at(arrived)
        if self.is_done or (self._num_calls - 1) % self._every:
            return
        numbers = numbers_of(seen)
        if numbers is None:
            return
        if self._merge is not None:
            self._merged = numbers = numbers if self._merged is None else self._merge(self._merged, numbers)
        if self._num_calls == 1 or not on.is_cuda:
            self._look_at(numbers)
        elif self._sent is None:
            on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            on_host.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._sent = on_host, copied

    def _look_at(self, numbers: Tensor) -> None:
        try:
            self.is_done = bool(self._judge(numbers.tolist()))
        except Exception:
            self._merged = None  # The next call is judged separately.
            raise


def warn_of_rejection(max_fraction: float, totals: Sequence[float]) -> bool:
    """Warn if a larger share than ``max_fraction`` is rejected; return whether it warned."""
    tokens, valid, kept, kept_responses, responses = totals
    unknown, rejected, lost = (
        1.0 - part / whole if whole else 0.0
        for part, whole in ((valid, tokens), (kept, tokens), (kept_responses, responses))
    )
    if max(unknown, rejected, lost) <= max_fraction:
        return False
    said = f"{rejected:.1%} of the tokens" if rejected > max_fraction else f"{lost:.1%} of the sequences"
    advice = "were rejected. Widen the bounds or use the mis preset. See mis_kept_token_fraction, mis_kept_seq_fraction"
    if unknown > max_fraction:
        said, advice = f"{unknown:.1%} of the response tokens", f"have a non-finite log-prob and were masked. {_ASK}"
    limit = f"Limit: mis_max_reject_fraction={max_fraction:g}. Shown once."
    warnings.warn(f"{said} in a micro-batch {advice}. {limit}", MismatchWarning, stacklevel=6)
    return True


class RankFailed(RuntimeError):
    """Raised when another rank failed. That rank joins no more collectives of the call."""


def raise_if_failed(statuses: Sequence[float]) -> None:
    """Raise an error if a status names a rank on which a call failed: see :mod:`mis_ext.correction.collectives`."""
    status = max(statuses)
    if status > 0.0:
        raise RankFailed(f"a call failed on rank {round(status) - 1}; see the error of that rank")


# --- the data of the first calls


PAIRS = 7
"""Index of the number of neighbor pairs in :func:`data_sums`."""
ENOUGH = 64
"""Number of response tokens, or of neighbor pairs, that is enough for a check."""
_FEW_PLACEHOLDERS, _SHARE_OF_PLACEHOLDERS = 8, 0.01
_SENTINEL = -1000.0
"""Nats. No sampled token has a log-prob below this."""
_IMPROBABLE = -1.0
"""Nats. With top-p and min-p, only tokens above this can have a log-prob of 0."""
_SPREAD = 0.1
"""Nats: a constant log-prob in a response is correct if the other side varies less than this."""
_SHIFT_FACTOR = 0.5
_MAX_MEAN_ABS_DIFF = 0.3


def data_sums(streams: PackedStreams) -> Tensor:
    """Sums over this rank's tokens, float64, which can be added over calls; :func:`findings_in` has their names.

    Non-finite values are counted over response tokens, placeholders over tokens with a finite ratio. ``gap`` sums
    absolute gaps, ``first`` and ``second`` over pairs of neighbors, ``earlier`` and ``later`` with one side shifted by
    a token. Differences are bounded, so that a single extreme log-prob does not decide.
    """
    tokens = streams.tokens
    layout, valid_T, trainer_T, engine_T = streams.layout, tokens.valid, tokens.log_pi, tokens.log_mu
    response_T = layout.local_part(streams.response_mask_R) != 0
    neighbors_T = layout.position_T[1:] == layout.position_T[:-1] + 1
    pair_T = valid_T[1:] & valid_T[:-1] & (layout.sequence_T[1:] == layout.sequence_T[:-1]) & neighbors_T
    before, after = slice(None, -1), slice(1, None)
    shifts = ((before, before), (after, after), (after, before), (before, after))
    gaps = [(valid_T, tokens.d), *((pair_T, trainer_T[a] - engine_T[b]) for a, b in shifts)]
    sums = [torch.where(each_T, gap_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs(), 0.0) for each_T, gap_T in gaps]
    counts = [response_T, valid_T, *(response_T & ~each.isfinite() for each in streams[1::-1])]
    counts += [_placeholders(*sides, valid_T, layout) for sides in ((engine_T, trainer_T), (trainer_T, engine_T))]
    return torch.stack([each.sum(dtype=torch.float64) for each in (*counts, sums[0], pair_T, *sums[1:])])


def _placeholders(side_T: Tensor, other_T: Tensor, valid_T: Tensor, layout: PackedLayout) -> Tensor:
    """Tokens with a placeholder: a sentinel, 0 for an improbable token, or the same value in the whole response."""
    usual_T = valid_T & (other_T >= _SENTINEL)
    of_other = [torch.where(valid_T, each, 0.0) for each in (torch.ones_like(other_T), other_T, other_T.square())]
    count_S, sum_S, square_S = layout.sums(of_other)
    low_S, negative_high_S = layout.minima([torch.where(valid_T, each, torch.inf) for each in (side_T, -side_T)])
    varies_S = square_S - sum_S.square() / count_S.clamp_min(1.0) > _SPREAD**2 * count_S
    is_constant_S = (count_S >= _FEW_PLACEHOLDERS) & (low_S == -negative_high_S) & varies_S
    is_zero_T = (side_T == 0.0) & (other_T < _IMPROBABLE)
    return usual_T & ((side_T < _SENTINEL) | is_zero_T | layout.spread(is_constant_S))


def findings_in(numbers: Sequence[float]) -> Iterator[tuple[GuardName | None, str]]:
    """The mistakes that the sums show, each with the guard that stops the run, or None if it only warns."""
    response, valid, no_engine, no_trainer, of_engine, of_trainer, gap, pairs, first, second, earlier, later = numbers
    nonfinite = {"engine": no_engine, "trainer": no_trainer}
    side = max(nonfinite, key=nonfinite.__getitem__)
    if response >= ENOUGH and nonfinite[side] > 0.5 * response:
        share = f"{nonfinite[side] / response:.1%} of the response tokens"
        yield "missing_log_probs", f"{share} have a non-finite {side} log-prob and are masked. {_ASK}."
    for side, count in (("Engine", of_engine), ("Trainer", of_trainer)):
        if count >= max(_FEW_PLACEHOLDERS, _SHARE_OF_PLACEHOLDERS * valid):
            share = f"{side} log-probs are placeholders: {count:.0f} of {valid:.0f} response tokens"
            yield "degenerate_behavior", f"{share} {_PLACEHOLDERS}"
    aligned, shifted = min(first, second), min(earlier, later)
    if pairs >= ENOUGH and shifted < _SHIFT_FACTOR * aligned:
        means = f"mean |trainer - engine| is {aligned / pairs:.3g} nats, {shifted / pairs:.3g} with one side shifted"
        yield "shifted_log_probs", f"Log-probs are shifted by one token: {means}. {_SHIFT}"
    elif valid >= ENOUGH and gap > _MAX_MEAN_ABS_DIFF * valid:
        mean = f"{gap / valid:.2f} nats per token (limit: {_MAX_MEAN_ABS_DIFF:g})"
        yield None, f"Mean |trainer - engine| log-prob difference is {mean}. {_CAUSES}"
