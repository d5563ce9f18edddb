# SPDX-License-Identifier: Apache-2.0
"""Runs: the configuration that is read from ``args``, and the session that checks the calls.

No other module reads ``args``, which may be any kind of object. The frameworks give a correction function no place for
state. This module keeps the state instead of ``args``, because Megatron pickles ``args`` into every checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import Due, Group, Message, global_rank
from mis_ext.correction.config import CorrectionConfig, GuardName
from mis_ext.correction.correct import Correction, check_streams, compute_correction, correct, due_of, plan_of
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.hosts import guards
from mis_ext.hosts.groups import ALONE, Groups, device_of
from mis_ext.hosts.packing import DIVISORS, MASK, Range, extremes_of, pack
from mis_ext.keys.reading import RunConfig, config_given, read_config
from mis_ext.keys.rows import ARGUMENTS, OF_OTHERS
from mis_ext.validation import MismatchWarning, check_instance, check_tensors

if TYPE_CHECKING:
    from mis_ext.hosts.slime_miles.rollout import TokenLags

_LOG = logging.getLogger("mis_ext")
_PREPARE = "give --rollout-data-postprocess-path mis_ext.prepare_rollout, or call it in your function at this flag"
_NO_LAGS = (
    f"mis_staleness: the tokens have no lag: in slime and Miles {_PREPARE}; elsewhere call policy_loss_from_log_probs, "
    "which has the argument lag"
)
_WHO_STORES = {
    "rollout_log_probs": "the rollout function must store the inference engine's log-probs",
    "train_log_probs": "the framework must score the rollout with the trainer before training",
}


class Session:
    """Corrects the micro-batches of one run, with one configuration (or a mapping of its keys).

    Attributes:
        token_lags: Lags of the tokens of the current rollout, or the reason why there are none. The caller sets them
            per rollout.
        rollout_seen: Whether the rollout was prepared, which keys of prompts require. The caller sets it.
    """

    def __init__(self, config: CorrectionConfig | Mapping[str, Any]) -> None:
        self.config = config_given(config)
        # Compute the plan now: a rank that runs out of memory needs it to report its error.
        plan_of(self.config)
        self.rollout_seen = False
        self.token_lags: TokenLags | str = _NO_LAGS
        self._data = guards.Monitor(self._judge_data, every=1, merge=torch.add)
        self._rejection = guards.Monitor(partial(guards.warn_of_rejection, self.config.max_reject_fraction))
        self._status = guards.Monitor(guards.raise_if_failed, every=1, merge=torch.maximum)
        self._ranges: dict[Range, guards.Monitor] = {}
        self._is_first_rank = True
        self._warned: set[str] = set()

    @torch.no_grad()
    def correct(self, streams: PackedStreams, *, groups: Groups = ALONE, token_metrics: bool = False) -> Correction:
        """Call :func:`~mis_ext.correction.correct.compute_correction`, and check its data.

        Raises:
            ValueError: A guard found a mistake in the data, or an argument is wrong.
            RuntimeError: Another rank failed.
        """
        lengths = getattr(getattr(streams, "layout", None), "response_lengths", None)
        with self.local_work(lengths, groups=groups, device=device_of(getattr(streams, "response_mask_R", None))):
            mask_R = check_instance("streams", streams, PackedStreams).response_mask_R
            check_tensors({"response_mask_R": mask_R})
            check_instance("layout", streams.layout, PackedLayout)
            self.check_range(mask_R, MASK)
            check_streams(streams, self.config, groups.cp_group)
            self._is_first_rank = groups.is_first_rank
            self._data.observe(guards.data_sums, streams, on=mask_R)
        correction = correct(
            streams, self.config, cp_group=groups.cp_group, dp_group=groups.dp_group, token_metrics=token_metrics
        )
        if not groups.is_alone:
            self._check_status(correction.status)
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
        """Join a call without data: no token of this rank counts.

        Raises:
            RuntimeError: Another rank failed.
        """
        correction = self.neutral(response_lengths, groups=groups, device=device)
        if not groups.is_alone:
            self._check_status(correction.status)

    @contextlib.contextmanager
    def local_work(
        self,
        response_lengths: Any,
        *,
        groups: Groups,
        device: torch.device,
        status_groups: Sequence[Group] = (),
        corrects: bool = True,
        failed: Exception | None = None,
    ) -> Iterator[None]:
        """Do local work before the collectives of a call: an error is raised after the other ranks have received it.

        It is sent in the collectives of a correction, if the call ``corrects``, and then over ``status_groups``, where
        other ranks call :meth:`exchange_status`. ``failed``: an existing error, which is raised instead of the work.
        ``response_lengths``: a rank without them passes the masks of its responses.
        """
        try:
            if failed is not None:
                raise failed
            yield
        except Exception:
            # The first error is raised, even if a group fails too.
            with contextlib.suppress(Exception):
                if corrects and not groups.is_alone:
                    # Only context-parallel ranks have messages of the same length. Without lengths, this rank sends
                    # none.
                    lengths = () if groups.cp_group is None else tuple(map(_as_integer, response_lengths))
                    due_of(self.config, lengths, groups.cp_group, groups.dp_group, device=device).report_failure()
                _due_status(status_groups, device).report_failure()
            raise

    def exchange_status(self, groups: Sequence[Group], *, device: torch.device) -> Exception | None:
        """Exchange with other ranks whether a call failed, if no correction does this; raise if it failed.

        Returns an error of this rank that occurred after the exchange, of which other ranks are not notified.
        """
        if not groups:
            return None
        statuses = _statuses_of_ranks(groups, device)
        try:
            self._check_status(statuses.amax())
        except guards.RankFailed:
            raise
        except Exception as error:
            return error
        return None

    def check_range(self, values: Tensor, legal: Range) -> None:
        """Raise an error for values outside of a range. Masks are checked only in the first and in some later calls."""
        every = 1 if legal is DIVISORS else guards.CALLS_PER_LOOK
        monitor = self._ranges.setdefault(legal, guards.Monitor(legal.check_extremes, every=every))
        monitor.observe(extremes_of, values, on=values)

    def report(self, guard: GuardName | None, message: str, *, once: str | None = None) -> None:
        """Raise an error. Warn instead if ``mis_guard`` allows it, if nothing is corrected, or without a guard.

        A warning is given once per ``once``, by default its text.
        """
        if guard is not None and self.config.stops(guard):
            cure = f"To downgrade this error to a warning, set mis_guard: {{{guard}: warn}}"
            raise ValueError(f"{message.rstrip('.')}. {cure}")
        if (once or message) not in self._warned:
            self._warned.add(once or message)
            warnings.warn(message, MismatchWarning, stacklevel=4)

    def report_missing(self, name: str) -> None:
        """Report that ``rollout_log_probs`` or ``train_log_probs`` are missing, if the run corrects."""
        if not self.config.metrics_only:
            self.report("missing_log_probs", f"{name} are missing: {_WHO_STORES[name]}")

    def compute(self, streams: PackedStreams, *, groups: Groups) -> Correction:
        """Check the arguments, and compute the correction without guards and monitors."""
        given = streams._asdict()
        return compute_correction(**given, config=self.config, cp_group=groups.cp_group, dp_group=groups.dp_group)

    def neutral(self, response_lengths: Sequence[int], *, groups: Groups, device: torch.device) -> Correction:
        """Join the collectives of a call without tokens."""
        with self.local_work(response_lengths, groups=groups, device=device):
            whole = PackedLayout.whole(response_lengths, device=device)
            is_whole = groups.cp_group is None
            layout = PackedLayout(whole.response_lengths, whole.pieces, is_whole=is_whole, device=device).emptied
            nothing_T = torch.empty(0, device=device)
            mask_R = torch.zeros(layout.num_whole_tokens, device=device)
            lag_T = nothing_T if self.config.staleness else None
            streams = PackedStreams(nothing_T, nothing_T, mask_R, layout, lag_T)
        return correct(streams, self.config, cp_group=groups.cp_group, dp_group=groups.dp_group)

    def _check_status(self, status: Tensor) -> None:
        self._status.observe(torch.atleast_1d, status, on=status)

    def _judge_data(self, numbers: list[float]) -> bool:
        for guard, message in guards.findings_in(numbers):
            if guard is not None or self._is_first_rank:
                self.report(guard, message, once=guard or "mean difference")
        return numbers[guards.PAIRS] >= guards.ENOUGH


def _as_integer(length: Any) -> int:
    """Return a length on a failed rank; 0 if it is not a number, which may be the reason for the error.

    If context-parallel ranks have different lengths, their messages over tokens have different shapes. A mask is as
    long as its response.
    """
    if isinstance(length, Tensor) and length.dim() == 1:
        return length.numel()
    try:
        return int(length)
    except (TypeError, ValueError, OverflowError):
        return 0


def _due_status(groups: Sequence[Group], device: torch.device) -> Due:
    """The collectives of the ranks' status alone, for a call without a correction. Their shape is always the same."""
    return Due([Message((1,), torch.float32, group) for group in groups], device)


def _statuses_of_ranks(groups: Sequence[Group], device: torch.device) -> Tensor:
    """``[W, 1]``: the statuses of the ranks of the last group, each the maximum over its other groups."""
    due = _due_status(groups, device)
    with due.reporting_errors():
        status = torch.full((1,), -torch.inf, device=device)
        for _ in groups[:-1]:
            status = due.gather(status).amax(0)
        return due.gather(status)


# --- the run of each args


_MAX_KEPT = 64
_READ = dict.fromkeys((*ARGUMENTS, *OF_OTHERS))


def read_argument(args: Any, name: str) -> Any:
    """``args.name`` of a namespace, a dataclass, a wrapper, or a mapping; None if there is none."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def all_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments of a configuration, and the names of all other arguments, to find misspellings.

    Includes class attributes, properties, and the arguments of a wrapper. Other properties are not called.

    Raises:
        TypeError: ``args`` cannot hold keys: all keys would be absent, and nothing would be corrected.
    """
    if args is None or isinstance(args, (Sequence, Path, CorrectionConfig, Session)):
        raise TypeError(
            f"args must be a mapping of keys, or a namespace, got a {type(args).__name__}; read a file with "
            "yaml.safe_load"
        )
    names = [*args] if isinstance(args, Mapping) else [name for name in dir(args) if not name.startswith("_")]
    values = {name: read_argument(args, name) for name in _READ}
    # A wrapper may return None for an absent name, which is not the null of a file.
    ours = {name: value for name, value in values.items() if value is not None or name in names}
    # Keep the names of other values with a placeholder: a name may be a misspelled key.
    return dict.fromkeys(names, "not read") | ours


class Run(NamedTuple):
    """The settings of a run, read from its arguments, and the state that it keeps between calls.

    ``failed``: an error from before the call's work. ``local_work`` raises it, so that other ranks are notified.
    """

    config: RunConfig
    session: Session
    failed: Exception | None = None

    def check_rollout(self) -> None:
        """Raise an error if the rollout was not prepared: a custom function can omit prepare_rollout."""
        key = self.config.group.needs_rollout
        if key and not self.session.rollout_seen:
            raise ValueError(f"{key}: mis_ext.prepare_rollout was not called before the loss: {_PREPARE}")


_runs: dict[int | str, Run] = {}
"""Runs by the identity of ``args``, until they are deleted, or by the content of a mapping."""
_kept: OrderedDict[int | str, Any] = OrderedDict()
"""The most recent ``args`` without weak references: mappings, and objects such as ``SimpleNamespace``."""


def session_for(args: Any) -> Session:
    """Return the session of this ``args`` object."""
    return current_run(args).session


def current_run(args: Any, *, whole_loss: bool = False) -> Run:
    """The run of this ``args`` object, or of mappings with this content. They are read once.

    The object is the same for all micro-batches of a run. ``whole_loss``: read and check the full policy loss too.
    """
    # slime 624b824 and Miles 31f1ca9 change no argument that is read here during training, only "rank" before it, and
    # "loss_type" in the critic's copy. A mapping belongs to a custom loop, which may change a key.
    owner: Any = args
    key: int | str = id(args)
    if isinstance(args, Mapping):
        # Values that are not read may change, also on only one rank.
        owner = {name: args[name] if name in _READ else None for name in args}
        key = repr(owner)
    before = _runs.get(key)
    if key in _kept:
        _kept.move_to_end(key)
    if before is not None and (before.config.whole_loss is not None or not whole_loss):
        return before
    given = all_arguments(args)
    config = read_config(given, whole_loss=whole_loss)
    session = Session(config.correction) if before is None else before.session
    session.config = config.correction
    # prepare_rollout reads these keys before a custom loss, which corrects only with use_tis. The hook reports this
    # itself.
    is_other = not whole_loss and given.get("loss_type") == "custom_loss" and not given.get("use_tis")
    if config.double_correction is not None and not is_other:
        session.report("double_correction", config.double_correction)
    if given.get("get_mismatch_metrics") and not config.correction.metrics_only:
        measure = "to measure only, use the preset metrics_only"
        session.report(None, f"--get-mismatch-metrics with use_tis: true changes loss and masks; {measure}")
    run = _runs[key] = Run(config, session)
    if before is None:
        try:
            weakref.finalize(owner, _runs.pop, key, None)
        except TypeError:
            # It has no weak references.
            _kept[key] = owner
            if len(_kept) > _MAX_KEPT:
                del _runs[_kept.popitem(last=False)[0]]
    return run


_met: weakref.WeakKeyDictionary[Session, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""The calls of each session in which all ranks have read their keys. Stored here, because a session can be copied."""


def shared_run(args: Any, groups: Groups, *, device: torch.device, whole_loss: bool = False) -> Run:
    """:func:`current_run` of ranks that share a call.

    In the first call of a run with these groups, all ranks raise an error if one of them cannot read its keys.
    """
    if groups.is_alone:
        return current_run(args, whole_loss=whole_loss)
    together = groups.started_together
    call = (whole_loss, *together)
    try:
        run = current_run(args, whole_loss=whole_loss)
    except Exception as error:
        # If this is a later call for the other ranks, the backend may end this process.
        _log(error)
        with contextlib.suppress(Exception):
            _due_status(together, device).report_failure()
        raise
    met = _met.setdefault(run.session, set())
    if call in met:
        return run
    if together:
        statuses = _statuses_of_ranks(together, device)
        try:
            # No value can be read while a CUDA graph is captured.
            if not (statuses.is_cuda and torch.cuda.is_current_stream_capturing()):
                guards.raise_if_failed([float(statuses.amax())])
        except guards.RankFailed:
            raise
        except Exception as error:
            # The other ranks assume that all ranks could read their keys. A pipeline stage without a loss only logs
            # this.
            _log(error)
            run = run._replace(failed=error)
    met.add(call)
    return run


def _log(error: Exception) -> None:
    _LOG.error("rank %d: %s: %s", global_rank(), type(error).__name__, error)
