# SPDX-License-Identifier: Apache-2.0
"""An inference engine in a process of its own, so that neither side disturbs the other.

Engines set environment variables, signal handlers and the multiprocessing start method, and at shutdown SGLang kills
every child of its process, while a trainer started by torchrun has a rendezvous in its environment that the engine's
own process group would join. The two talk over a pipe, which weights go through too. When the trainer ends, even by a
kill, the pipe closes and the engine stops.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

# The trainer's torchrun job.
TORCHRUN = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
}


class EngineProcess:
    """The trainer's end of the pipe.

    Args:
        name: Of the engine, for messages.
        serve: A function of a module that is told the worker's end of the pipe and calls :func:`serve`.
        log: Where the engine's output goes.
        hidden: Variables of the environment that the engine must not see.
        environment: Variables that it gets.

    Attributes:
        process: The worker, leader of a session of its own.
    """

    def __init__(
        self,
        name: str,
        *,
        serve: Callable[[int], None],
        log: Path,
        hidden: Collection[str] = TORCHRUN,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._log = name, log
        # Engines leave their sockets where temporary files go; the paths must be short.
        sockets = tempfile.mkdtemp(prefix=f"{name.lower()}-")
        ours, theirs = Pipe()
        self._connection: Connection = ours
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _worker_source(serve, theirs.fileno())],
                env={**_worker_environment(os.environ, hidden), **(environment or {}), "TMPDIR": sockets},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C belongs to the trainer, which then closes the engine.
                start_new_session=True,
            )
        theirs.close()
        # Runs at close(), when the object is collected and at interpreter exit, whichever is first.
        self._stop = weakref.finalize(self, _stop_worker, self.process, ours, sockets)

    def call(self, command: str, **arguments: Any) -> Any:
        """Return the worker's answer to one command.

        Raises:
            RuntimeError: The engine is closed, or ended during the command; the message ends with its log.
        """
        if not self._stop.alive:
            raise RuntimeError(f"the {self._name} engine is closed")
        try:
            self._connection.send((command, arguments))
            while not self._connection.poll(1.0):
                if self.process.poll() is not None:
                    raise EOFError
            error, result = self._connection.recv()
        except (EOFError, OSError) as cause:
            self.close()
            raise RuntimeError(
                f"the {self._name} engine ended during {command!r} (exit code {self.process.returncode}); its log, "
                f"{self._log}, ends with:\n{_tail(self._log)}"
            ) from cause
        except BaseException:
            # An interrupted call leaves its answer in the pipe, where the next call would take it for its own.
            self.close()
            raise
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stop the engine and every process that it started; a second call does nothing."""
        self._stop()


class Worker(Protocol):
    """What runs in the engine's process: one method per command, and how it ends."""

    def shutdown(self) -> None:
        """Stop the engine."""
        ...


def serve(descriptor: int, worker: Worker) -> None:
    """Answer commands until the trainer closes its end of the pipe."""
    connection = Connection(descriptor)
    try:
        while True:
            command, arguments = connection.recv()
            try:
                reply = None, getattr(worker, command)(**arguments)
            except ValueError as error:
                # As plain types: the trainer's process cannot unpickle the engine's own.
                reply = ValueError(str(error)), None
            except RuntimeError as error:
                reply = RuntimeError(str(error)), None
            connection.send(reply)
    except (EOFError, OSError):
        pass
    finally:
        worker.shutdown()


def _worker_source(function: Callable[[int], None], descriptor: int) -> str:
    """Write the worker's program.

    A script by path would put this folder first on ``sys.path``; ``-m`` would import this module again in each of the
    engine's processes.
    """
    module, name = function.__module__, function.__name__
    root = Path(__file__).resolve().parents[__name__.count(".")]
    return f"import sys; sys.path.insert(0, {str(root)!r}); from {module} import {name}; {name}({descriptor})"


def _worker_environment(environment: Mapping[str, str], hidden: Collection[str]) -> dict[str, str]:
    """Leave out the trainer's torchrun job, and use one thread unless the user or torchrun says otherwise."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in hidden and not name.startswith("TORCHELASTIC_")
    }
    # Threads that wait for each other, when other processes want the cores too, make a small model 20 times slower.
    return {"OMP_NUM_THREADS": "1", **kept}


def _stop_worker(process: subprocess.Popen[bytes], connection: Connection, sockets: str) -> None:
    """End the worker and everything in its session, and remove its sockets."""
    # The worker takes the closed pipe as the end and shuts the engine down.
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(sockets, ignore_errors=True)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
