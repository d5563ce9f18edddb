# SPDX-License-Identifier: Apache-2.0
"""An inference engine in its own process, so that engine and trainer do not interfere.

Engines set environment variables, signal handlers and the multiprocessing start method. At shutdown SGLang kills every
child of its process. A trainer started by torchrun has a rendezvous in its environment, which the engine's process
group would join. The two processes communicate over a pipe, also for weights. When the trainer ends, even if it is
killed, the pipe closes and the engine stops.
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
        serve: A module-level function that gets the worker's end of the pipe and calls :func:`serve`.
        log: File for the engine's output.
        hidden: Environment variables to remove for the engine.
        environment: Environment variables to set.

    Attributes:
        process: The worker, the leader of its own session.
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
        # Engines create their sockets in the folder for temporary files, and the paths must be short.
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
                # Ctrl-C must reach only the trainer, which then closes the engine.
                start_new_session=True,
            )
        theirs.close()
        # Runs at close(), at garbage collection, or at interpreter exit, whichever is first.
        self._stop = weakref.finalize(self, _stop_worker, self.process, ours, sockets)

    def call(self, command: str, **arguments: Any) -> Any:
        """Return the worker's reply to one command.

        Raises:
            RuntimeError: If the engine is closed, or ended during the command. The message ends with its log.
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
            # An interrupted call leaves its reply in the pipe, and the next call would read it.
            self.close()
            raise
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stop the engine and every process that it started. A second call does nothing."""
        self._stop()


class Worker(Protocol):
    """The engine's side of the process: one method per command, and its shutdown."""

    def shutdown(self) -> None:
        """Stop the engine."""
        ...


def serve(descriptor: int, worker: Worker) -> None:
    """Execute commands until the trainer closes its end of the pipe."""
    connection = Connection(descriptor)
    try:
        while True:
            command, arguments = connection.recv()
            try:
                reply = None, getattr(worker, command)(**arguments)
            except ValueError as error:
                # Send plain types, because the trainer's process cannot unpickle the engine's types.
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
    """Remove the trainer's torchrun variables, and use one thread unless the user or torchrun sets a number."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in hidden and not name.startswith("TORCHELASTIC_")
    }
    # If other processes use the cores, threads that wait for each other make a small model 20 times slower.
    return {"OMP_NUM_THREADS": "1", **kept}


def _stop_worker(process: subprocess.Popen[bytes], connection: Connection, sockets: str) -> None:
    """End the worker and its session, and remove its sockets."""
    # The worker shuts the engine down when the pipe closes.
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(sockets, ignore_errors=True)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
