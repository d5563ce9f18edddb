"""What the hook remembers between calls of one ``args``: its configuration, and which checks it has done.

The hosts give a correction function nowhere to keep anything, so it is kept here, beside the ``args`` object and not
on it: Megatron pickles ``args`` into every checkpoint. Only the rollout's scale, of all this, changes returned numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mis_ext.config import CorrectionConfig, GuardName
from mis_ext.correction import Correction
from mis_ext.flat_keys import FLAT_KEYS, NATIVE_KEY
from mis_ext.guards import MismatchWarning, find_doubts, find_mistakes
from mis_ext.hosts.groups import Groups
from mis_ext.layout import PackedLayout
from mis_ext.normalization import GroupTotals, WeightScale

_READ_KEYS = (*FLAT_KEYS, NATIVE_KEY, "get_mismatch_metrics", "calculate_per_token_loss", "use_rollout_logprobs")


_CALLS_PER_LOOK = 8


class Session:
    """Configuration and checks of one ``args``."""

    def __init__(self, args: Any) -> None:
        mapping: Mapping[str, Any] = vars(args)
        # A copy, because lists and mappings among the values can be changed in place.
        self.fingerprint = copy.deepcopy(fingerprint(args))
        self.config = CorrectionConfig.from_mapping(mapping)
        self.rejection = RejectionMonitor(self.config.max_reject_fraction)
        self._is_first_call = True
        if mapping.get("use_rollout_logprobs") and not self.config.metrics_only:
            self.report(
                "double_correction",
                "--use-tis together with --use-rollout-logprobs counts the mismatch twice: with the behavior log-probs "
                "as PPO denominator the ratio already corrects it; drop one of the two (also use_tis in the YAML)",
            )

    def report(self, guard: GuardName, message: str) -> None:
        """Raise, or warn where the user said so or where nothing is corrected."""
        if guard in self.config.warn_only or self.config.metrics_only:
            warnings.warn(message, MismatchWarning, stacklevel=3)
        else:
            raise ValueError(f"{message} [to go on with a warning: mis_guard: {{{guard}: warn}}]")

    def check(self, correction: Correction, layout: PackedLayout, groups: Groups) -> None:
        """Look for mistakes at the first call; watch the share of what is rejected at every call.

        Runs after every collective of the call: a rank that raises leaves no other rank waiting inside the hook.
        """
        is_first, self._is_first_call = self._is_first_call, False
        if is_first:
            for guard, message in find_mistakes(correction.tokens, layout):
                self.report(guard, message)
        if self.config.metrics_only or groups.cp_rank > 0 or groups.dp_rank > 0:
            return
        if is_first:
            in_scope = layout.num_sequences * (groups.dp_size if self.config.scope == "data_parallel" else 1)
            for doubt in find_doubts(correction.tokens, correction.stats, self.config, num_sequences_in_scope=in_scope):
                warnings.warn(doubt, MismatchWarning, stacklevel=3)
        self.rejection.observe(correction)


class RejectionMonitor:
    """Warns, once, when more is rejected than the user thought possible.

    Looks at one call in eight, from the first on, and is a call late: so it never waits for the device.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._warned = False
        self._num_calls = 0

    def observe(self, correction: Correction) -> None:
        """Look at what was sent for if it has arrived, and send for this call's totals if it is their turn."""
        totals_K = correction.totals_K
        if self._warned or (totals_K.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._num_calls += 1
        if self._pending is not None:
            sent_K, copied = self._pending
            if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                return
            # On the host by now: the event says so, or it never was elsewhere.
            self._warn_above(dict(zip(GroupTotals._fields, sent_K.tolist(), strict=True)))
            self._pending = None
        if self._num_calls % _CALLS_PER_LOOK != 1:
            return
        if totals_K.is_cuda:
            on_host = torch.empty_like(totals_K, device="cpu", pin_memory=True)
            on_host.copy_(totals_K, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._pending = (on_host, copied)
        else:
            self._pending = (totals_K, None)

    def _warn_above(self, totals: dict[str, float]) -> None:
        for what, kept, original in (
            ("tokens", totals["num_kept"], totals["num_response"]),
            ("sequences", totals["num_kept_sequences"], totals["num_response_sequences"]),
        ):
            share = 1.0 - kept / original if original else 0.0
            if share > self._max_fraction:
                self._warned = True
                warnings.warn(
                    f"{share:.1%} of the {what} of a micro-batch were rejected, more than mis_max_reject_fraction = "
                    f"{self._max_fraction:g}: the bounds are too tight for this mismatch (see "
                    "mis_kept_token_fraction and mis_kept_seq_fraction; said once)",
                    MismatchWarning,
                    stacklevel=4,
                )


# Of the last few ``args``: a process has one, a test suite many. Holding them keeps their identity from being reused.
_sessions: deque[tuple[Any, Session]] = deque(maxlen=8)
_rollout_scales: dict[CorrectionConfig, WeightScale] = {}


def session_for(args: Any) -> Session:
    """The session of this ``args`` object; a new one when one of our keys has changed."""
    current = fingerprint(args)
    for known_args, session in _sessions:
        if known_args is args and session.fingerprint == current:
            return session
    session = Session(args)
    _sessions.append((args, session))
    return session


def fingerprint(args: Any) -> list[Any]:
    """Everything in ``args`` that a configuration is made of."""
    return [*map(vars(args).get, _READ_KEYS)]


def store_rollout_scale(config: CorrectionConfig, scale: WeightScale) -> None:
    """Keep the scale of the rollout that is about to be trained on, in place of the last one's."""
    _rollout_scales[config] = scale


def stored_rollout_scale(config: CorrectionConfig) -> WeightScale | None:
    """The scale of the current rollout, if somebody computed it."""
    return _rollout_scales.get(config)
