"""What the hook remembers between calls of one ``args``: its configuration, and which checks it has done.

The hosts give a correction function nowhere to keep anything, so it is kept here, beside the ``args`` object and not
on it: Megatron pickles ``args`` into every checkpoint. Only the rollout's scale, of all this, changes returned numbers.
"""

from __future__ import annotations

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
from mis_ext.normalization import WeightScale

_READ_KEYS = (*FLAT_KEYS, NATIVE_KEY, "get_mismatch_metrics", "calculate_per_token_loss", "use_rollout_logprobs")


class Session:
    """Configuration and checks of one ``args``."""

    def __init__(self, args: Any) -> None:
        mapping: Mapping[str, Any] = vars(args)
        self.fingerprint = fingerprint(args)
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
    """Warns, once and a call late, when more is rejected than the user thought possible; never waits for the device."""

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._warned = False

    def observe(self, correction: Correction) -> None:
        """Look at the previous call's shares if they have arrived, and send for this call's."""
        if self._warned:
            return
        if self._pending is not None:
            shares, copied = self._pending
            if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                return
            # On the host by now: the event says so, or it never was elsewhere.
            self._warn_above(shares.tolist())
        num_response_S, kept_count_S = correction.stats.num_response_S, correction.kept_count_S
        kept = torch.stack([kept_count_S.sum(), (kept_count_S > 0).sum()])
        original = torch.stack([num_response_S.sum(), (num_response_S > 0).sum()])
        shares = 1.0 - kept / original
        if shares.is_cuda:
            on_host = torch.empty_like(shares, device="cpu", pin_memory=True)
            on_host.copy_(shares, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._pending = (on_host, copied)
        else:
            self._pending = (shares, None)

    def _warn_above(self, shares: list[float]) -> None:
        for what, share in zip(("tokens", "sequences"), shares, strict=True):
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


def fingerprint(args: Any) -> tuple[str, ...]:
    """Everything in ``args`` that a configuration is made of, cheap to compare."""
    return tuple(repr(getattr(args, key, None)) for key in _READ_KEYS)


def store_rollout_scale(config: CorrectionConfig, scale: WeightScale) -> None:
    """Keep the scale of the rollout that is about to be trained on, in place of the last one's."""
    _rollout_scales[config] = scale


def stored_rollout_scale(config: CorrectionConfig) -> WeightScale | None:
    """The scale of the current rollout, if somebody computed it."""
    return _rollout_scales.get(config)
