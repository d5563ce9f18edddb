# SPDX-License-Identifier: Apache-2.0
"""Find tensors of the engine that differ from the trainer's, with the engine's own check."""

from __future__ import annotations

import hashlib
import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

_TIMEOUT_SECONDS = 3600.0
# The server is part of the run, so ignore proxies of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# A line of SGLang's comparison.
_DIFFERENCE = re.compile(r"name=(\S+) max_abs_err=(\S+)")
_NO_BYTES = hashlib.sha256().hexdigest()


class WeightDifference(NamedTuple):
    """A tensor of the engine that differs from the trainer's.

    Attributes:
        name: The name in the engine, which joins some of the trainer's tensors, such as q, k, and v.
        max_abs_diff: Largest difference, infinite if a value is NaN. NaN if not measured, because vLLM compares
            checksums.
    """

    name: str
    max_abs_diff: float


def compare_weights(engine: str, trainer: str | Path | Callable[[], object]) -> list[WeightDifference]:
    """Compare the weights of an engine with the trainer's. Afterwards the engine has the trainer's weights.

    A version or a canary shows only whether new weights arrived. This function names the tensors that did not. The
    engine stores its weights, resets them, loads the trainer's weights in another way than the weight update under
    test, and compares. Call it between two rollouts: requests during the call get wrong tokens.

    It is the startup check of slime and Miles with ``--check-weight-update-equal``: SGLang's ``/weights_checker``; or
    vLLM's ``/weight_checker`` with ``/collective_rpc`` of ``VLLM_SERVER_DEV_MODE=1``, which vime sets. A tensor that
    the trainer's checkpoint lacks is named too. It has lost its values: restart the engine.

    Args:
        engine: Address of one engine, such as ``http://10.0.0.1:30000``, not of a router.
        trainer: Folder with the trainer's weights as a Hugging Face checkpoint, which the engine can read under this
            path. Or a function that sends all weights to the engine; it is called twice.

    Returns:
        The tensors that differ, the largest difference first; empty if all are equal. Weights of unmerged LoRA adapters
        are not checked.

    Raises:
        ConnectionError: The engine does not respond, or refuses a request; the message has its response.
        ValueError: The engine has packed its weights for kernels, as vLLM does on a CPU.
    """
    address = engine.rstrip("/")
    status, said = _post(f"{address}/weights_checker", {"action": "snapshot"})
    is_vllm, checker, baseline = status == 404, f"{address}/weights_checker", {}
    if is_vllm:
        checker = f"{address}/weight_checker"
        baseline = _expect(checker, {"action": "checksum"}, "checksums")
        packed = [name for name, digest in baseline.items() if digest == _NO_BYTES]
        if packed:
            raise ValueError(f"{address}: {len(packed)} tensors are packed for kernels and empty, such as {packed[0]}")
    elif status != 200:
        raise _refused(checker, said)

    def load() -> None:
        if callable(trainer):
            trainer()
        elif is_vllm:
            request = {"method": "reload_weights", "kwargs": {"weights_path": str(trainer)}}
            _expect(f"{address}/collective_rpc", request)
        else:
            _expect(f"{address}/update_weights_from_disk", {"model_path": str(trainer)})

    # Load once before the reset, to find errors early.
    load()
    _expect(checker, {"action": "reset" if is_vllm else "reset_tensors"})
    load()
    if is_vllm:
        mismatches = _expect(checker, {"action": "compare", "baseline": baseline}, "mismatches")
        # The name follows the rank.
        return [WeightDifference(name, math.nan) for name in sorted({each.rpartition(":")[2] for each in mismatches})]
    status, said = _post(checker, {"action": "compare"})
    found = [(name, float(largest)) for name, largest in _DIFFERENCE.findall(str(said.get("message")))]
    # A NaN cannot be sorted.
    found = [(name, math.inf if math.isnan(largest) else largest) for name, largest in found]
    if status != 200 and not found:
        raise _refused(checker, said)
    # If several ranks report a tensor, use the largest difference.
    by_size = sorted(dict(sorted(found, key=itemgetter(1))).items(), key=itemgetter(1), reverse=True)
    return [WeightDifference(*each) for each in by_size]


def _expect(url: str, payload: dict[str, Any], field: str | None = None) -> Any:
    """A field of the response; the request must succeed."""
    status, said = _post(url, payload)
    if status != 200:
        raise _refused(url, said)
    if field is not None and field not in said:
        raise ConnectionError(f"{url}: the response has no {field}: {said}")
    return None if field is None else said[field]


def _refused(url: str, said: dict[str, Any]) -> ConnectionError:
    return ConnectionError(f"{url} refused: {said.get('message') or said}")


def _post(url: str, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = json.dumps(payload).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    except OSError as error:
        raise ConnectionError(f"{url}: no response: {error}") from error
    try:
        said = json.loads(text or b"{}")
    except json.JSONDecodeError:
        said = text.decode(errors="replace")
    return status, said if isinstance(said, dict) else {"message": said}
