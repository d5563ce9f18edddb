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
# The server is one of ours: a proxy of the environment is for elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# A line of SGLang's comparison.
_DIFFERENCE = re.compile(r"name=(\S+) max_abs_err=(\S+)")
_NO_BYTES = hashlib.sha256().hexdigest()


class WeightDifference(NamedTuple):
    """A tensor of the engine with other values than the trainer's.

    Attributes:
        name: As the engine calls it; it joins some of the trainer's, such as q, k, and v.
        max_abs_diff: Largest difference, infinite where a value is NaN. NaN: not measured, as vLLM compares checksums.
    """

    name: str
    max_abs_diff: float


def compare_weights(engine: str, trainer: str | Path | Callable[[], object]) -> list[WeightDifference]:
    """Compare the weights that an engine has with the trainer's, and leave the trainer's in the engine.

    A check that new weights arrived (a version, a canary) says yes or no; this names the tensors that did not. The
    engine remembers its weights, loses them, takes the trainer's by another way than the weight update that is in
    doubt, and compares. Call it between two rollouts: requests meanwhile get wrong tokens.

    It is the check that slime and Miles do at start with ``--check-weight-update-equal``: SGLang's
    ``/weights_checker``; or vLLM's ``/weight_checker``, beside ``/collective_rpc`` of ``VLLM_SERVER_DEV_MODE=1``, which
    vime sets. A tensor that the trainer's checkpoint lacks is named too. It has lost its values: restart the engine.

    Args:
        engine: Address of one engine, such as ``http://10.0.0.1:30000``; not of a router.
        trainer: Folder with the trainer's weights as a Hugging Face checkpoint, which the engine can read under this
            path. Or a function that sends all of them into the engine; it is called twice.

    Returns:
        The tensors that differ, the largest difference first; nothing if all are equal. Weights of LoRA adapters that
        the engine does not merge are not among them.

    Raises:
        ConnectionError: The engine does not answer, or refuses a request; the message has its words.
        ValueError: Kernels of the engine have taken its weights into a form of their own, as in vLLM on a CPU.
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

    # Once before there is anything to lose.
    load()
    _expect(checker, {"action": "reset" if is_vllm else "reset_tensors"})
    load()
    if is_vllm:
        mismatches = _expect(checker, {"action": "compare", "baseline": baseline}, "mismatches")
        # Behind the ranks.
        return [WeightDifference(name, math.nan) for name in sorted({each.rpartition(":")[2] for each in mismatches})]
    status, said = _post(checker, {"action": "compare"})
    found = [(name, float(largest)) for name, largest in _DIFFERENCE.findall(str(said.get("message")))]
    # A NaN has no place in an order.
    found = [(name, math.inf if math.isnan(largest) else largest) for name, largest in found]
    if status != 200 and not found:
        raise _refused(checker, said)
    # Of a tensor that several ranks name, the last counts.
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
        raise ConnectionError(f"{url}: no answer: {error}") from error
    try:
        said = json.loads(text or b"{}")
    except json.JSONDecodeError:
        said = text.decode(errors="replace")
    return status, said if isinstance(said, dict) else {"message": said}
