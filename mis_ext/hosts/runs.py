# SPDX-License-Identifier: Apache-2.0
"""The run of each ``args`` object: its configuration, and the session that lasts from call to call.

Nothing else reads ``args``, whatever kind of object it is.

The hosts give a correction function nowhere to keep anything, so it is kept here, beside the ``args`` object and not on
it: Megatron pickles ``args`` into every checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mis_ext.hosts.groups import Groups
from mis_ext.hosts.session import Session
from mis_ext.keys.flat import STRAY_KEYS
from mis_ext.keys.removed import REMOVED
from mis_ext.keys.run_config import ARGUMENTS, RunConfig, WholeLoss, read_config

NOT_READ = "not read"
"""Stands for the value of an argument that is none of ours: only its name counts, which may be a misspelling."""

_PLAIN = (argparse.Namespace, types.SimpleNamespace)
_MAX_RUNS = 64


def read_argument(args: Any, name: str) -> Any:
    """``args.name``, None where there is none: of a namespace, a dataclass, a wrapper, or a mapping."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def read_values(args: Any) -> list[Any]:
    """Of each of ``ARGUMENTS`` its value, None where there is none."""
    if type(args) in _PLAIN:
        # Called for every micro-batch: the objects that both hosts use have nothing but their own attributes.
        return [*map(vars(args).get, ARGUMENTS)]
    return [read_argument(args, name) for name in ARGUMENTS]


def all_arguments(args: Any) -> dict[str, Any]:
    """What a configuration is made of, and the names of all other arguments, among which misspellings hide.

    Attributes of classes and properties count too, and what a wrapper passes on. Others' properties are not called.
    """
    is_mapping = isinstance(args, Mapping)
    names = [*args] if is_mapping else [name for name in dir(args) if not name.startswith("_")]
    values = dict(zip(ARGUMENTS, read_values(args), strict=True))
    # A wrapper may say None for whatever it does not have: that is not the null of a file.
    ours = {name: value for name, value in values.items() if value is not None or name in names}
    ours |= {name: read_argument(args, name) for name in names if name in STRAY_KEYS or name in REMOVED}
    return dict.fromkeys(names, NOT_READ) | ours


class Run(NamedTuple):
    """What the arguments of a run say, and what a run keeps from call to call."""

    config: RunConfig
    session: Session

    @property
    def loss(self) -> WholeLoss:
        """The whole loss, of a run that was asked for it."""
        return chosen_loss(self.config)

    def check_rollout(self, groups: Groups) -> None:
        """Refuse in the loss what nobody prepared, and warn once, on one rank, of what perhaps nobody did.

        Where the host calls a function of the user's, at the flag for ours, it may not have called ours.
        """
        key = self.config.group and self.config.group.needs_rollout
        if key and not self.session.rollout_seen:
            raise ValueError(
                f"{key}: mis_ext.prepare_rollout was not called before the loss: give it as "
                "--rollout-data-postprocess-path, or call it in the function there"
            )
        for found in self.config.unplugged:
            if self.session.is_news(found) and groups.is_first_rank:
                self.session.warn(found)


def chosen_loss(config: RunConfig) -> WholeLoss:
    """The settings of the loss of a run that computes it here."""
    assert config.whole_loss is not None
    return config.whole_loss


class _Entry:
    """A run, and the ``args`` it is of; held weakly where that is possible."""

    def __init__(self, args: Any, run: Run) -> None:
        self.run = run
        # A copy, because lists and mappings among the values can be changed in place.
        self.values = copy.deepcopy(read_values(args))
        try:
            self.args: Callable[[], Any] = weakref.ref(args)
        except TypeError:
            self.args = lambda: args


_entries: dict[int, _Entry] = {}


def session_for(args: Any) -> Session:
    """The session of this ``args`` object; a new one when a key of the correction has changed."""
    return current_run(args).session


def current_run(args: Any, *, whole_loss: bool = False) -> Run:
    """The run of this ``args`` object, read anew when an argument has changed.

    Args:
        args: A namespace, a dataclass, a wrapper, or a mapping; the same object for all micro-batches of a run.
        whole_loss: Whether the whole loss asks, whose flags are then checked too.
    """
    entry = _entries.get(id(args))
    before = entry.run if entry is not None and entry.args() is args else None
    is_current = entry is not None and before is not None and entry.values == read_values(args)
    if before is not None and is_current and (before.config.whole_loss is not None or not whole_loss):
        return before
    run = _new_run(read_config(all_arguments(args), whole_loss=whole_loss), before)
    _forget_the_dead()
    _entries[id(args)] = _Entry(args, run)
    return run


def _new_run(config: RunConfig, before: Run | None) -> Run:
    if before is not None and before.config.correction == config.correction:
        session, reported = before.session, before.config.double_correction
    else:
        session, reported = Session(config.correction), None
        if before is not None:  # Its prompts are in the advantages, whatever key has changed since.
            session.rollout_seen = before.session.rollout_seen
        if config.also_measures and not config.correction.metrics_only:
            session.warn(
                "--get-mismatch-metrics with a configuration that corrects (use_tis: true) does change loss and masks; "
                "to measure only, use yaml/metrics_only.yaml"
            )
    if config.double_correction not in (None, reported):
        session.report("double_correction", str(config.double_correction))
    return Run(config, session)


def _forget_the_dead() -> None:
    for key in [key for key, entry in [*_entries.items()] if entry.args() is None]:
        _entries.pop(key, None)
    while len(_entries) >= _MAX_RUNS:
        del _entries[next(iter(_entries))]
