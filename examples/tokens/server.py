# SPDX-License-Identifier: Apache-2.0
"""SGLang's HTTP server in its own process, on a CPU without its compiled kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.sglang_engine import CPU_SETTINGS, HIDDEN_FROM_ENGINE, INSTALL_HINT

# The server, scheduler and detokenizer processes each import torch and SGLang: 35 s alone, more than five minutes
# together with other tests on two cores. A server that ends is noticed immediately.
START_TIMEOUT_SECONDS = 900.0


@contextmanager
def sglang_server(
    model: Path,
    *,
    weight_version: str,
    seed: int = 0,
    dtype: str = "float32",
    returns_experts: bool = False,
) -> Iterator[int]:
    """Run ``sglang.launch_server`` with a model directory, and yield its port.

    Args:
        model: Directory with configuration, weights and tokenizer.
        weight_version: Weight version that the server reports.
        seed: Seed of its sampler.
        dtype: Dtype of weights and activations.
        returns_experts: Whether it can return the experts of its tokens.

    Raises:
        ModuleNotFoundError: If sglang is not installed.
        RuntimeError: If the server did not start. The message ends with its log.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError(INSTALL_HINT)
    settings = CPU_SETTINGS | {
        "model_path": str(model),
        "port": _free_port(),
        "dtype": dtype,
        "random_seed": seed,
        "weight_version": weight_version,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "log_level": "warning",
        **({"enable_return_routed_experts": True} if returns_experts else {}),
    }
    # SGLang creates its sockets in the folder for temporary files, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="sglang-", ignore_cleanup_errors=True) as scratch:
        log = Path(scratch) / "sglang.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *_options(settings)],
                env=_environment(scratch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait_until_healthy(process, settings["port"], log)
            yield settings["port"]
        finally:
            # End its whole session, because scheduler and detokenizer survive a killed server.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def call_server(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Return the body of the server's response to a GET, or to a POST if there is a body to send."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def _options(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, str(value)]
    return words


def _environment(scratch: str) -> dict[str, str]:
    stand_ins = Path(__file__).resolve().parents[1] / "grpo" / "sglang_cpu"
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN_FROM_ENGINE}
    return {
        "OMP_NUM_THREADS": "1",
        **kept,
        "TMPDIR": scratch,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join([str(stand_ins), *filter(None, [kept.get("PYTHONPATH")])]),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            call_server(port, "/health")
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.3)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise RuntimeError(f"the SGLang server did not start (exit code {process.poll()}):\n{end}")
