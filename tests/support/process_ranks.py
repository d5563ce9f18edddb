# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: they start, join one group, and record their results.

``thread_ranks`` has ranks as threads, for tests without a process group of torch.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = {
    "hypothesis": ("hypothesis",),
    "mis_ext.loss.policy": (),
    "megatron.core.models.gpt.gpt_layer_specs": ("megatron",),
    "grpo.run": ("grpo", "megatron", "transformers", "matplotlib", "rich"),
}
"""Modules that the process which forks ranks imports, if found. One process serves all test files."""

_served: set[str] = set()
"""The environment at the start of that process."""


@contextmanager
def joined(rank: int, world_size: int, folder: str | Path, *, seconds: float, backend: str = "gloo") -> Iterator[None]:
    """This process as one of ``world_size`` ranks that meet in ``folder``, and wait ``seconds`` for each other."""
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    yield
    # Not after an error, because it could wait for ranks that never come: the process ends, and the other ranks notice
    # it.
    dist.destroy_process_group()


def run_processes(
    work: Callable[..., None],
    *args: Any,
    world_size: int,
    start_method: str = "forkserver",
    seconds: float = 240,
) -> None:
    """Call ``work(rank, *args)`` in a process for each rank, and raise what a rank raised.

    One process, which stays for later calls, imports ``PRELOAD`` and forks the ranks: their imports would take longer
    than most tests. It keeps the environment that it began with. With ``start_method="spawn"`` each imports for itself.

    Raises:
        RuntimeError: A rank raised, died or took more than ``seconds``. It says which rank, and where the others stood.
    """
    modules = tuple(name for name, needed in PRELOAD.items() if all(map(find_spec, needed)))
    if not _served.issuperset(modules):
        # A later file has added a folder to the path, so each rank would import these itself.
        forkserver._forkserver._stop()
        _served.clear()
    if start_method == "forkserver" and not _served:
        multiprocessing.set_forkserver_preload([*modules])
        _served.update(modules)
    # Before Python 3.13 that process would not find modules of this path, and would silently import none.
    path = mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    with path, tempfile.TemporaryDirectory() as stacks:
        try:
            inherited = modules if start_method == "forkserver" else ()
            work_args = (inherited, stacks, seconds, work, *args)
            mp.start_processes(_work, args=work_args, nprocs=world_size, start_method=start_method)
        except Exception as error:
            stood = {path.name: path.read_text() for path in sorted(Path(stacks).iterdir())}
            raise RuntimeError(
                f"{error}\n" + "\n".join(f"{rank} stood here:\n{stack}" for rank, stack in stood.items() if stack)
            ) from error


def _work(
    rank: int, modules: tuple[str, ...], stacks: str, seconds: float, work: Callable[..., None], *args: Any
) -> None:
    assert sys.modules.keys() >= {*modules}, f"not imported before this rank was forked: {modules}"
    # A late rank ends itself. If one rank fails, the other ranks are stopped. Each first writes its stack, also inside
    # of a collective.
    stack = os.open(Path(stacks, f"rank {rank}"), os.O_WRONLY | os.O_CREAT)
    faulthandler.dump_traceback_later(seconds, exit=True, file=stack)
    faulthandler.register(signal.SIGTERM, file=stack, chain=True)
    # As in conftest and in the settings of pytest, deprecations of torch are errors here too.
    gc.freeze()
    warnings.simplefilter("error", FutureWarning)
    work(rank, *args)


def run_checks(
    checks: Mapping[str, Callable[[int], None]],
    *,
    folder: Path,
    world_size: int,
    seconds: float,
) -> list[dict[str, str]]:
    """The result of each rank for each check: nothing, or its failure.

    Raises:
        Exception: The error of a rank that failed after its last check.
    """
    crash: Exception | None = None
    try:
        run_processes(_check, world_size, str(folder), seconds, checks, world_size=world_size)
    except Exception as error:
        crash = error
    paths = [folder / f"{rank}.json" for rank in range(world_size)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    if crash is not None and all(each.keys() == checks.keys() for each in found):
        raise crash
    return [dict.fromkeys(checks, f"not reached: {crash}") | each for each in found]


def on_processes(checks: Mapping[str, Callable[[int], None]], *, world_size: int, seconds: float) -> Callable:
    """One test per check, on ranks that start once for all checks."""
    reports: list[dict[str, str]] = []

    @pytest.mark.distributed
    @pytest.mark.parametrize("check", checks)
    def test(tmp_path_factory, check) -> None:
        if not reports:
            folder = tmp_path_factory.mktemp("gloo")
            try:
                reports.extend(run_checks(checks, folder=folder, world_size=world_size, seconds=seconds))
            except Exception:
                # Each further check would start all ranks again.
                reports.append(dict.fromkeys(checks, "a rank ended badly after its last check"))
                raise
        for report in reports:
            # pytest rewrites only the asserts of test modules.
            assert report[check] == "", report[check]

    return test


def _check(rank: int, world_size: int, folder: str, seconds: float, checks: Mapping[str, Callable]) -> None:
    report = {}
    with joined(rank, world_size, folder, seconds=seconds):
        for name, check in checks.items():
            try:
                check(rank)
                report[name] = ""
            except BaseException:
                report[name] = traceback.format_exc()[-2500:]
            Path(folder, f"{rank}.json").write_text(json.dumps(report))
            dist.barrier()
