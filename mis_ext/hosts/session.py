# SPDX-License-Identifier: Apache-2.0
"""A session: the configuration of a run, and the checks of its calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group, due_status, global_rank, status_of_ranks
from mis_ext.correction.config import CorrectionConfig, GuardName
from mis_ext.correction.correct import Correction, check_streams, correct, due_of
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.hosts.groups import ALONE, Groups, device_of
from mis_ext.hosts.guards import (
    ENOUGH,
    DataSums,
    MismatchWarning,
    Monitor,
    data_sums,
    findings_in,
    is_capturing,
    raise_if_failed,
    warn_of_rejection,
)
from mis_ext.hosts.packing import extremes_of, pack, refuse_divisors, refuse_mask, refuse_mask_sums
from mis_ext.keys.reading import config_given
from mis_ext.validation import check_tensors

if TYPE_CHECKING:
    from mis_ext.hosts.rollout_data import TokenLags

Refuse = Callable[[Sequence[float]], None]
_NO_LAGS = (
    "mis_staleness: nobody gives the lag of the tokens: in slime and Miles --rollout-data-postprocess-path "
    "mis_ext.prepare_rollout does, elsewhere the argument lag"
)


class Session:
    """Corrects the micro-batches of one run, with one configuration (or a mapping of its keys).

    Attributes:
        token_lags: Lags of the tokens of the current rollout, or why there are none. The caller sets them per rollout.
        rollout_seen: Whether the rollout was prepared, as keys of prompts require. The caller sets it.
    """

    def __init__(self, config: CorrectionConfig | Mapping[str, Any]) -> None:
        self.config = config_given(config)
        self.rollout_seen = False
        self.token_lags: TokenLags | str = _NO_LAGS
        self._data = Monitor(self._judge_data, every=1, merge=torch.add)
        self._rejection = Monitor(partial(warn_of_rejection, self.config.max_reject_fraction))
        self._status = Monitor(raise_if_failed, every=1, merge=torch.maximum)
        self._ranges: dict[Refuse, Monitor] = {
            refuse_mask: Monitor(refuse_mask),
            refuse_mask_sums: Monitor(refuse_mask_sums),
            refuse_divisors: Monitor(refuse_divisors, every=1),
        }
        self._is_first_rank = True
        self._told: set[GuardName | None] = set()
        self._met: set[tuple[int, ...]] = set()

    @torch.no_grad()
    def correct(self, streams: PackedStreams, *, groups: Groups = ALONE, token_metrics: bool = False) -> Correction:
        """Call :func:`~mis_ext.correction.correct.compute_correction`, and check its data.

        Raises:
            ValueError: A guard found a mistake in the data, or an argument is wrong.
            RuntimeError: Another rank failed.
        """
        layout = streams.layout
        mask_R = streams.response_mask_R
        with self.local_work(layout.response_lengths, groups=groups, device=device_of(mask_R)):
            check_tensors({"response_mask_R": mask_R})
            self.check_range(mask_R, refuse_mask)
            check_streams(streams, self.config, groups.cp_group)
            self._is_first_rank = groups.is_first_rank
            self._data.observe(data_sums, streams, on=mask_R)
        correction = correct(
            streams, self.config, cp_group=groups.cp_group, dp_group=groups.dp_group, token_metrics=token_metrics
        )
        if not groups.is_alone:
            self._hear(correction.status)
        if not self.config.metrics_only and groups.is_first_rank:
            self._rejection.observe(attrgetter("watched"), correction, on=correction.weights_T)
        return correction

    def lags_of(
        self, samples: Sequence[Tensor] | None, lengths: Sequence[int], *, device: torch.device
    ) -> Tensor | None:
        """The lags ``[T]`` of a micro-batch with these behavior log-probs; None if no key needs them.

        Raises:
            ValueError: The lags were not stored.
        """
        if not self.config.staleness:
            return None
        if isinstance(self.token_lags, str):
            raise ValueError(self.token_lags)
        return pack("lags", self.token_lags.of([] if samples is None else samples), lengths, device=device)

    def join_without_data(self, response_lengths: Sequence[int], *, groups: Groups, device: torch.device) -> None:
        """Take part in a call without data: no token of this rank counts.

        Raises:
            RuntimeError: Another rank failed.
        """
        correction = self.neutral(response_lengths, groups=groups, device=device)
        if not groups.is_alone:
            self._hear(correction.status)

    @contextmanager
    def local_work(
        self,
        response_lengths: Sequence[int],
        *,
        groups: Groups,
        device: torch.device,
        status_groups: Sequence[Group] = (),
        corrects: bool = True,
    ) -> Iterator[None]:
        """Do local work before the collectives of a call: an error is raised after the other ranks have received it.

        It is sent in the collectives of a correction, if the call ``corrects``, and then over ``status_groups``, where
        others call :meth:`exchange_status`.
        """
        try:
            yield
        except Exception:
            # The first error is raised, even if a group fails too.
            with suppress(Exception):
                if corrects and not groups.is_alone:
                    self.tell_failure(response_lengths, groups=groups, device=device)
            with suppress(Exception):
                due_status(status_groups, device=device).tell()
            raise

    def exchange_status(self, groups: Sequence[Group], *, device: torch.device) -> None:
        """Exchange with other ranks whether a call failed, if no correction does.

        Raises:
            RuntimeError: Another rank failed.
        """
        if groups:
            self._hear(status_of_ranks(groups, device=device))

    def meet(self, groups: Groups, *, device: torch.device) -> None:
        """Check in the first call with these groups that all ranks could read their keys.

        Raises:
            RuntimeError: Another rank failed.
        """
        shared = groups.started_together
        key = tuple(map(id, shared))
        if key in self._met:
            return
        self._met.add(key)
        status = status_of_ranks(shared, device=device)
        if not is_capturing(status):
            raise_if_failed([float(status)])

    def check_range(self, values: Tensor, refuse: Refuse) -> None:
        """Refuse values by the smallest and largest of them; on a GPU in the first and some later calls.

        Args:
            values: Of any shape.
            refuse: ``refuse_mask``, ``refuse_divisors``, or ``refuse_mask_sums``.

        Raises:
            ValueError: A value is not legal.
        """
        self._ranges[refuse].observe(extremes_of, values, on=values)

    def report(self, guard: GuardName, message: str) -> None:
        """Raise, or warn if ``mis_guard`` allows it or nothing is corrected."""
        if self.config.stops(guard):
            raise ValueError(
                f"{message.rstrip('.')}. To downgrade this error to a warning, set mis_guard: {{{guard}: warn}}"
            )
        self.warn(message)

    def report_missing(self, *, is_rollout_missing: bool) -> None:
        """Report which log-probs a correction lacks; nothing if it only measures."""
        if self.config.metrics_only:
            return  # The metrics are then NaN.
        if is_rollout_missing:
            message = "rollout_log_probs are missing: the rollout function must store the inference engine's log-probs"
        else:
            message = "train_log_probs are missing: the host must score the rollout with the trainer before training"
        self.report("missing_log_probs", message)

    def warn(self, message: str) -> None:
        """Issue a ``MismatchWarning``."""
        warnings.warn(message, MismatchWarning, stacklevel=4)

    def compute(self, streams: PackedStreams, *, groups: Groups) -> Correction:
        """Compute the correction without guards and monitors.

        Raises:
            ValueError: An argument is wrong.
        """
        with self.local_work(streams.layout.response_lengths, groups=groups, device=device_of(streams.response_mask_R)):
            check_streams(streams, self.config, groups.cp_group)
        return correct(streams, self.config, cp_group=groups.cp_group, dp_group=groups.dp_group)

    def tell_failure(self, response_lengths: Sequence[int], *, groups: Groups, device: torch.device) -> Tensor:
        """Join the collectives of a call, and send in them that this rank failed; return its 0-dim status."""
        due_of(self.config, response_lengths, groups.cp_group, groups.dp_group, device=device).tell()
        return torch.tensor(global_rank() + 1.0, dtype=torch.float64, device=device)

    def neutral(self, response_lengths: Sequence[int], *, groups: Groups, device: torch.device) -> Correction:
        """Join the collectives of a call without tokens."""
        layout = PackedLayout.without_tokens(response_lengths, is_whole=groups.cp_group is None, device=device)
        nothing_T = torch.empty(0, device=device)
        mask_R = torch.zeros(layout.num_whole_tokens, device=device)
        streams = PackedStreams(nothing_T, nothing_T, mask_R, layout)
        return correct(streams, self.config, cp_group=groups.cp_group, dp_group=groups.dp_group)

    def _hear(self, status: Tensor) -> None:
        self._status.observe(torch.atleast_1d, status, on=status)

    def _judge_data(self, numbers: list[float]) -> bool:
        sums = DataSums(*numbers)
        for guard, message in findings_in(sums):
            if guard is not None and self.config.stops(guard):
                self.report(guard, message)
            elif guard not in self._told and (guard is not None or self._is_first_rank):
                self._told.add(guard)
                self.warn(message)
        return sums.pairs >= ENOUGH
