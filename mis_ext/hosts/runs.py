# SPDX-License-Identifier: Apache-2.0
"""The run of each ``args`` object: its configuration, and the session that lasts from call to call.

Nothing else reads ``args``, whatever kind of object it is.

The frameworks give a correction function nowhere to keep anything, so it is kept here and not on ``args``: Megatron
pickles ``args`` into every checkpoint.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mis_ext.correction.collectives import due_status
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.session import Session
from mis_ext.keys.names import OF_OTHERS
from mis_ext.keys.reading import RunConfig, read_config
from mis_ext.keys.rows import ARGUMENTS

NOT_READ = "not read"
"""The value of an argument that mis_ext does not read. Its name may be a misspelled key."""

_MAX_HELD = 64


def read_argument(args: Any, name: str) -> Any:
    """``args.name``, None where there is none: of a namespace, a dataclass, a wrapper, or a mapping."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def all_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments of a configuration, and the names of all others, to find misspellings.

    Includes attributes of classes, properties, and the arguments of a wrapper. Others' properties are not called.
    """
    names = [*args] if isinstance(args, Mapping) else [name for name in dir(args) if not name.startswith("_")]
    values = {name: read_argument(args, name) for name in ARGUMENTS}
    # A wrapper may say None for whatever it does not have: that is not the null of a file.
    ours = {name: value for name, value in values.items() if value is not None or name in names}
    ours |= {name: read_argument(args, name) for name in names if name in OF_OTHERS}
    return dict.fromkeys(names, NOT_READ) | ours


class Run(NamedTuple):
    """The settings of a run, read from its arguments, and the state that it keeps between calls."""

    config: RunConfig
    session: Session

    def check_rollout(self) -> None:
        """Refuse a rollout that was not prepared: the user's function at a flag may not call that of mis_ext."""
        key = self.config.group and self.config.group.needs_rollout
        if key and not self.session.rollout_seen:
            raise ValueError(
                f"{key}: mis_ext.prepare_rollout was not called before the loss: give it as "
                "--rollout-data-postprocess-path, or call it in the function there"
            )


_runs: dict[int | str, tuple[Run, Any]] = {}
"""The runs by the identity of their ``args``, or by the content of a mapping; and ``args`` without weak references."""


def session_for(args: Any) -> Session:
    """Return the session of this ``args`` object."""
    return current_run(args).session


def current_run(args: Any, *, whole_loss: bool = False) -> Run:
    """The run of this ``args`` object, or of mappings with this content, which is read once.

    Args:
        args: A namespace, a dataclass, a wrapper, or a mapping; the same object for all micro-batches of a run.
        whole_loss: Whether to read and check the full policy loss too.
    """
    # slime 624b824 and Miles 31f1ca9 change no argument that is read here during training, only "rank" before it, and
    # "loss_type" in the critic's copy. A mapping belongs to a custom loop, which may change a key.
    key = repr(dict(args)) if isinstance(args, Mapping) else id(args)
    before, _ = _runs.get(key, (None, None))
    if before is not None and (before.config.whole_loss is not None or not whole_loss):
        return before
    given = all_arguments(args)
    config = read_config(given, whole_loss=whole_loss)
    session = Session(config.correction) if before is None else before.session
    if config.double_correction is not None:
        session.report("double_correction", config.double_correction)
    if given.get("get_mismatch_metrics") and not config.correction.metrics_only:
        session.warn(
            "--get-mismatch-metrics with a configuration that corrects (use_tis: true) does change loss and masks; "
            "to measure only, use yaml/metrics_only.yaml"
        )
    run = Run(config, session)
    _keep(key, run, args)
    return run


def _keep(key: int | str, run: Run, args: Any) -> None:
    """Keep the run as long as ``args`` exists; of those without weak references and of mappings, the last ones."""
    _runs[key] = run, args
    if isinstance(key, int):
        with contextlib.suppress(TypeError):
            weakref.finalize(args, _runs.pop, key, None)
            _runs[key] = run, None
    held = [other for other, (_, kept) in _runs.items() if kept is not None]
    for other in held[:-_MAX_HELD]:
        del _runs[other]


def shared_run(args: Any, groups: Groups, *, device: torch.device, whole_loss: bool = False) -> Run:
    """:func:`current_run` of ranks that share a call: all raise in the first call if one cannot read its keys.

    Raises:
        ValueError: A key is wrong.
        TypeError: A key has the wrong type.
        RuntimeError: Another rank failed.
    """
    try:
        run = current_run(args, whole_loss=whole_loss)
    except Exception:
        due_status(groups.started_together, device=device).tell()
        raise
    if not groups.is_alone:
        run.session.meet(groups, device=device)
    return run
