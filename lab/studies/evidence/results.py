# SPDX-License-Identifier: Apache-2.0
"""Results on disk: archives of finished groups, and the state of those that run."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .archives import Archives, Row
from .group import Group

if TYPE_CHECKING:
    from .pretrained.group import PretrainedGroup
    from .pretrained.training import PretrainedTraining as Training

UNFINISHED, ALERT = "unfinished", ".alert"
# A process that is killed loses no more than this.
SECONDS_BETWEEN_WRITES = 5.0


class Results:
    """The results in one folder.

    A finished group is in an archive of its own, ``GROUP.zip``, until :meth:`compact` puts it into that of its study:
    its settings and machine, a row per run and step, and the log-probs of the steps that the group names.
    ``GROUP.state.pt`` is there while the group is not finished, and stays where the group keeps its alert:
    ``GROUP.alert.state.pt``. What a group has so far, ``unfinished/GROUP.zip``, is
    written all along: a process that is killed leaves it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._archives = folder, Archives(folder)

    def is_done(self, group: Group) -> bool:
        """Whether the group is finished.

        Raises:
            ValueError: There are results of a group with this name, but other settings.
        """
        if not self._archives.has(group.name):
            return False
        if self._archives.head(group.name)["settings"] != settings(group):
            raise ValueError(f"{self._folder} has results of other settings than {group.name} has now: move them")
        return True

    def names(self) -> list[str]:
        """Of the groups that are finished."""
        return self._archives.names()

    def unfinished(self, groups: Iterable[Group]) -> tuple[Results, list[Any]]:
        """Where the steps of groups are that have not finished, and which of these groups have any."""
        found = Results(self._folder / UNFINISHED)
        return found, [group for group in groups if not self.is_done(group) and found._is_of(group)]

    @contextmanager
    def claimed(self, group: Group) -> Iterator[bool]:
        """Whether this process may run a group: no other one is at it. A process that ends gives up its claims."""
        place = hashlib.sha256(str(self._folder.resolve()).encode()).hexdigest()[:16]
        locks = Path(tempfile.gettempdir()) / f"mis-ext-evidence-{place}"
        locks.mkdir(exist_ok=True)
        with (locks / f"{group.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield not self.is_done(group)

    def num_steps(self, group: Group) -> int:
        """That there are rows of."""
        return 1 + max(row["step"] for row in self.rows(group))

    def rows(self, group: Group) -> list[Row]:
        """Of a finished group."""
        return self.rows_of(group.name)

    def rows_of(self, name: str) -> list[Row]:
        """The same by name: of a study whose program is gone, too."""
        return self._archives.rows(name)

    def machine(self, group: Group) -> dict[str, Any]:
        """Where a finished group ran."""
        head = self._archives.head(group.name)
        return {name: value for name, value in head.items() if name not in ("settings", "seconds")}

    def sampling_seconds(self, group: Group) -> float:
        """Of a finished group's engine for one run's rollout; NaN where it was not measured."""
        seconds = self._archives.head(group.name).get("seconds", {}).get("sampling", math.nan)
        return float(seconds) / (len(group.runs) * group.num_steps)

    def log_probs(self, group: Group) -> dict[str, dict[str, Any]]:
        """Of a finished group's steps: ``behavior``, ``log_ratio`` and ``mask``, each ``[seeds, B, L]``."""
        return self._archives.arrays(group.name)

    def compact(self, study: str, groups: Iterable[Group]) -> None:
        """Put the finished groups of a study into one archive, ``STUDY.zip``."""
        self._archives.compact(study, [group.name for group in groups])

    def can_begin(self, group: PretrainedGroup) -> bool:
        """False until the run from which the group forks has kept its state at the alert."""
        return not group.forks_from or any(path.exists() for path in self._starts(group))

    def resume(self, group: PretrainedGroup, training: Training) -> list[Row]:
        """Bring a training to where it was at its stop, its alert, or the alert that it forks from; its rows so far."""
        states = [path for path in self._starts(group) if path.exists()]
        if not states:
            return []
        saved = torch.load(states[0], map_location="cpu", weights_only=False)
        training.restore(saved["training"])
        if states[0] == self._state(group.forks_from, ALERT):
            return []
        self._kept = saved["kept"]
        rows: list[Row] = saved["rows"]
        return rows

    @contextmanager
    def saving(self, group: Group, training: Training, rows: list[Row]) -> Iterator[Keeping]:
        """Keep what there is at the end: the results, or the state if it comes before the last step."""
        kept: dict[str, Any] = self.__dict__.pop("_kept", {})
        so_far = Results(self._folder / UNFINISHED)
        keeping = Keeping(
            kept,
            write=lambda: so_far._write_longer(group, training, rows, kept),
            write_alert=lambda: self._write_state(self._state(group.name, ALERT), training, rows, kept),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            yield keeping
        finally:
            if training.num_steps_done == group.num_steps or keeping.is_over:
                self._write(group, training, rows, kept)
                self._state(group.name).unlink(missing_ok=True)
                so_far._archives.remove(group.name)
            elif training.has_begun:
                self._write_state(self._state(group.name), training, rows, kept)
                keeping.write()

    def _write(self, group: Group, training: Training, rows: list[Row], kept: dict[str, Any]) -> None:
        seconds = {"sampling": round(training.sampling_seconds, 3)}
        head = _machine(training.device) | training.record | {"settings": settings(group), "seconds": seconds}
        self._archives.write(group.name, head, rows, kept)

    def _write_longer(self, group: Group, training: Training, rows: list[Row], kept: dict[str, Any]) -> None:
        """What there is so far, unless an earlier attempt got further."""
        complete = _complete(rows, training)
        if complete and not (self._is_of(group) and len(self.rows(group)) > len(complete)):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(group, training, complete, kept)

    def _is_of(self, group: Group) -> bool:
        return self._archives.has(group.name) and self._archives.head(group.name)["settings"] == settings(group)

    def _write_state(self, path: Path, training: Training, rows: list[Row], kept: dict[str, Any]) -> None:
        state = {"training": training.state(), "rows": _complete(rows, training), "kept": dict(kept)}
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def _starts(self, group: PretrainedGroup) -> list[Path]:
        """Where a state may be from which the group goes on: the latest first."""
        return [self._state(group.name), self._state(group.name, ALERT), self._state(group.forks_from, ALERT)]

    def _state(self, name: str, at: str = "") -> Path:
        return self._folder / f"{name}{at}.state.pt"


class Keeping:
    """Takes the log-probs that a training keeps, by name; ``write`` keeps what there is of the group so far.

    ``write_alert`` keeps the state of this step, from which runs may fork. ``is_over``: the group is finished, though
    not at its last step.
    """

    is_over = False

    def __init__(self, kept: dict[str, Any], *, write: Callable[[], None], write_alert: Callable[[], None]) -> None:
        self._kept, self._written, self.write, self.write_alert = kept, time.monotonic(), write, write_alert

    def __call__(self, name: str, arrays: dict[str, Any]) -> None:
        """Take arrays by stream."""
        self._kept.update({f"{name}/{stream}": array for stream, array in arrays.items()})

    def write_now_and_then(self) -> None:
        """After every step."""
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self.write()
            self._written = time.monotonic()


def _complete(rows: list[Row], training: Training) -> list[Row]:
    """Without those of a step that was interrupted."""
    return [row for row in rows if row["step"] < training.num_steps_done]


def settings(group: Group) -> dict[str, Any]:
    """What a group sets, as JSON has it; defaults are omitted."""
    found: dict[str, Any] = json.loads(json.dumps(_set_fields(group)))
    return found


def _set_fields(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_set_fields(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {}
    for field in dataclasses.fields(value):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if getattr(value, field.name) != default:
            fields[field.name] = _set_fields(getattr(value, field.name))
    return fields


def _machine(on: torch.device) -> dict[str, Any]:
    device = torch.cuda.get_device_name(on) if on.type == "cuda" else platform.machine()
    versions = {"revision": _revision(), "python": platform.python_version(), "torch": torch.__version__}
    try:
        import sglang
    except ImportError:
        return {"device": device, **versions}
    return {"device": device, **versions, "sglang": sglang.__version__}


def _revision() -> str:
    """Of this checkout, as git calls it; where it came without git, what ``REVISION`` says."""
    if "REVISION" in os.environ or shutil.which("git") is None:
        return os.environ.get("REVISION", "unknown")
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
