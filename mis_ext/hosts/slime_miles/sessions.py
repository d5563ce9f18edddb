"""The run of each ``args`` object: its configuration, and the session that lasts from call to call.

The hosts give a correction function nowhere to keep anything, so it is kept here, beside the ``args`` object and not on
it: Megatron pickles ``args`` into every checkpoint.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from mis_ext.hosts.session import Session
from mis_ext.hosts.slime_miles.arguments import all_arguments, read_values
from mis_ext.hosts.slime_miles.run_config import RunConfig, read_config

_MAX_RUNS = 64


class Run(NamedTuple):
    """What the arguments of a run say, and what a run keeps from call to call."""

    config: RunConfig
    session: Session


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
    return run_of(args).session


def run_of(args: Any, *, whole_loss: bool = False) -> Run:
    """The run of this ``args`` object, read anew when an argument has changed.

    Args:
        args: A namespace, a dataclass, a wrapper, or a mapping; the same object for all micro-batches of a run.
        whole_loss: Whether the whole loss asks, whose flags are then checked too.

    Raises:
        ValueError: A key is unknown, out of range, without effect, or contradicts another one.
        TypeError: One has the wrong type.
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
