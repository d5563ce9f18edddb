"""The session of each ``args`` object.

The hosts give a correction function nowhere to keep anything, so it is kept here, beside the ``args`` object and not on
it: Megatron pickles ``args`` into every checkpoint.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from mis_ext.hosts.session import Session
from mis_ext.hosts.slime_miles.arguments import all_arguments, fingerprint, read_argument
from mis_ext.hosts.slime_miles.flat_keys import config_from_mapping
from mis_ext.loss.settings import LOSS_KEYS

_MAX_SESSIONS = 64


class _Entry:
    """A session, and the ``args`` it is of; held weakly where that is possible."""

    def __init__(self, args: Any, session: Session) -> None:
        self.session = session
        # A copy, because lists and mappings among the values can be changed in place.
        self.fingerprint = copy.deepcopy(fingerprint(args))
        try:
            self.args: Callable[[], Any] = weakref.ref(args)
        except TypeError:
            self.args = lambda: args


_entries: dict[int, _Entry] = {}


def session_for(args: Any) -> Session:
    """The session of this ``args`` object; a new one when one of our keys has changed."""
    entry = _entries.get(id(args))
    if entry is not None and entry.args() is args and entry.fingerprint == fingerprint(args):
        return entry.session
    session = _new_session(args)
    _forget_the_dead()
    _entries[id(args)] = _Entry(args, session)
    return session


def _new_session(args: Any) -> Session:
    session = Session(config_from_mapping(all_arguments(args)))
    corrects = not session.config.metrics_only
    _refuse_idle_loss_keys(args)
    # The other modes of the whole loss do not count it twice, and say so where they are computed.
    is_baseline = read_argument(args, "mis_loss_mode") in (None, "baseline")
    if corrects and is_baseline and read_argument(args, "use_rollout_logprobs"):
        session.report(
            "double_correction",
            "--use-tis together with --use-rollout-logprobs counts the mismatch twice: with the behavior log-probs "
            "as PPO denominator the ratio already corrects it; drop one of the two (also use_tis in the YAML)",
        )
    if corrects and read_argument(args, "get_mismatch_metrics"):
        session.warn(
            "--get-mismatch-metrics with a configuration that corrects (use_tis: true) does change loss and masks; to "
            "measure only, use yaml/metrics_only.yaml"
        )
    if session.config.denominator == "kept" and read_argument(args, "train_backend") == "fsdp":
        raise ValueError(
            "mis_denominator: kept with Miles' FSDP backend corrects twice: its reducer divides by the returned masks; "
            "remove mis_denominator"
        )
    return session


def _refuse_idle_loss_keys(args: Any) -> None:
    loss_type = read_argument(args, "loss_type")
    given = [key for key in LOSS_KEYS if read_argument(args, key) is not None]
    if given and loss_type not in (None, "custom_loss"):
        raise ValueError(
            f"{', '.join(given)}: no effect, because --loss-type is {loss_type}; write --loss-type custom_loss "
            "--custom-loss-function-path mis_ext.policy_loss"
        )


def _forget_the_dead() -> None:
    for key in [key for key, entry in [*_entries.items()] if entry.args() is None]:
        _entries.pop(key, None)
    while len(_entries) >= _MAX_SESSIONS:
        del _entries[next(iter(_entries))]
