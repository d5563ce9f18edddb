# SPDX-License-Identifier: Apache-2.0
"""The files of SGLang's tensor dumper (``sglang.srt.debug_utils.dumper``) as a recording."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.onpolicy.recording.recordings import Kind, Recording, RecordingBuilder, Repeated, digest, load_tensors
from mis_ext.onpolicy.recording.rows import Rows, place_rows

_FILE = re.compile(r"step=(?P<step>\d+)___rank=(?P<rank>\d+)___dump_index=(?P<index>\d+)___name=(?P<name>.+)\.pt")
_PREFIX = "non_intrusive__"
# The last "output" or "inputs.N" is the dumper's: modules can be called that too.
_MODULE_TENSOR = re.compile(r"(?:(?P<module>.+)\.)?(?:inputs\.(?P<argument>[^.]+)|output)(?:\.(?P<key>.+))?")


class _Dump(NamedTuple):
    path: Path
    step: int
    name: str

    def load(self) -> dict[str, Any]:
        content = load_tensors(self.path)
        if not isinstance(content, dict) or "value" not in content or not isinstance(content.get("meta"), dict):
            raise ValueError(f"{self.path} is no dump: it must hold a dict with 'value' and 'meta'")
        return content


def read_sglang_dumps(
    directory: str | os.PathLike[str],
    *,
    requests: Sequence[str] | None = None,
    positions: str = "positions",
    lengths: str = "seq_lens",
    request_ids: str = "rids",
    rank: int = 0,
    repeated: Repeated = "error",
) -> Recording:
    """The activations in a directory of dumps, by module and token.

    ``DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all`` dumps every module's inputs and outputs and, in each step (one
    forward), the three names that say which tokens it holds. A dump of ``input_ids`` is an input of the model; any
    other counts as the output of a module ``name``, or ``name.N`` in layer N. Gradients, parameters and recomputed
    activations are left out. Logits that SGLang computes for the last token of each request only have the rows of
    these tokens.

    Args:
        directory: ``<dir>/<exp>``, or ``<dir>`` where it holds a single experiment.
        requests: The request ids in the order of the sequences 0, 1, ...; requests that are not listed (a server's
            warm-up) are left out. By default the order in which they appear.
        positions: Name of the dump of the tokens' absolute positions, ``[T]``.
        lengths: Name of the dump of the requests' lengths up to and including this step, ``[S]``.
        request_ids: Name of the dump of the S request ids.
        rank: Whose dumps to read; parts that tensor parallelism splits are not put together.
        repeated: Which of several different values of one row stays, when a request was retracted and run again.

    Raises:
        ValueError: There are no dumps; a step lacks one of the three names, has one twice with different values, or
            they contradict each other; no step has one of the ``requests``; a file is unreadable.
    """
    steps = _steps(Path(directory), rank)
    seen: dict[str, int] = {}
    builder = RecordingBuilder()
    for step, dumps in sorted(steps.items()):
        position_T, length_S, requests_S = (
            _only(step, name, dumps, os.fspath(directory)) for name in (positions, lengths, request_ids)
        )
        sequence_S = [seen.setdefault(str(request), len(seen)) for request in requests_S]
        if requests is not None:
            sequence_S = [requests.index(x) if (x := str(request)) in requests else -1 for request in requests_S]
        builder.begin_forward()
        rows = _rows(step, torch.as_tensor(position_T), torch.as_tensor(length_S).tolist(), sequence_S)
        _add(builder, [dump for dump in dumps if dump.name not in (positions, lengths, request_ids)], rows)
    unknown = [request for request in requests or () if request not in seen]
    if unknown:
        raise ValueError(f"{os.fspath(directory)} has no request {unknown}; it has {[*seen]}")
    return builder.build(repeated=repeated)


def _steps(directory: Path, rank: int) -> dict[int, list[_Dump]]:
    """The dumps of each step, in the order in which they were made."""
    folders = [folder for folder in sorted(directory.iterdir()) if folder.is_dir()]
    if not any(directory.glob("*.pt")) and len(folders) == 1:
        directory = folders[0]
    found: dict[int, list[tuple[int, _Dump]]] = defaultdict(list)
    for path in directory.glob("*.pt"):
        match = _FILE.fullmatch(path.name)
        if match is not None and int(match["rank"]) == rank:
            dump = _Dump(path, int(match["step"]), match["name"].partition("___")[0])
            found[dump.step].append((int(match["index"]), dump))
    if not found:
        several = f"; it holds several experiments: {[folder.name for folder in folders]}" if folders else ""
        raise ValueError(f"no dumps of rank {rank} in {directory}{several}")
    return {step: [dump for _, dump in sorted(dumps)] for step, dumps in found.items()}


def _only(step: int, name: str, dumps: list[_Dump], directory: str) -> Any:
    values = [dump.load()["value"] for dump in dumps if dump.name == name]
    if not values:
        raise ValueError(f"{directory}: step {step} has no dump {name!r}, so its tokens are unknown")
    plain = [value.tolist() if isinstance(value, Tensor) else value for value in values]
    if any(value != plain[0] for value in plain):
        raise ValueError(f"{directory}: step {step} has several different dumps {name!r}; a step must be one forward")
    return values[0]


def _rows(step: int, position_T: Tensor, lengths: list[int], sequences: list[int]) -> Rows:
    """Cut the step's tokens into its requests: each one's last position is its length minus one."""
    if position_T.dim() != 1 or len(lengths) != len(sequences):
        raise ValueError(
            f"step {step}: positions must have one dimension, and lengths and request ids be as many; got "
            f"{[*position_T.shape]}, {len(lengths)} and {len(sequences)}"
        )
    sequence_T: list[int] = []
    last: list[int] = []
    for length, sequence in zip(lengths, sequences, strict=True):
        rest = position_T[len(sequence_T) :].tolist()
        if length - 1 not in rest or rest[: rest.index(length - 1) + 1] != [*range(rest[0], length)]:
            raise ValueError(f"step {step}: positions {rest} do not go on with a request of length {length}")
        sequence_T += [sequence] * (length - rest[0])
        last.append(len(sequence_T) - 1)
    if len(sequence_T) != len(position_T):
        raise ValueError(f"step {step}: {len(position_T)} positions for {len(sequence_T)} tokens of requests")
    sequence_ids = torch.tensor(sequence_T, dtype=torch.long)
    return Rows(
        sequence=sequence_ids,
        position=torch.where(sequence_ids >= 0, position_T.long(), -1),
        kept=torch.tensor(last, dtype=torch.long),
    )


def _add(builder: RecordingBuilder, dumps: list[_Dump], rows: Rows) -> None:
    calls: Counter[tuple[Kind, str, str]] = Counter()
    for dump in dumps:
        if dump.name.startswith(("grad__", "param__")) or dump.name == "req_pool_indices":
            continue
        content = dump.load()
        value, meta = content["value"], content["meta"]
        if not isinstance(value, Tensor) or meta.get("recompute_status") == "recompute":
            continue
        kind, module, label = _place(dump.name, meta.get("layer_id"))
        count = calls[kind, module, label]
        calls[kind, module, label] += 1
        call = f"{module}#{count}" if count else module
        placed = place_rows(value, rows, where=dump.path.name)
        if placed is not None:
            builder.add(kind, call, label, placed)
            continue
        builder.skip(kind, call, label, f"no token dimensions in {[*value.shape]}")
        if kind == "inputs":
            builder.note(call, label, digest(value))


def _place(name: str, layer: Any) -> tuple[Kind, str, str]:
    """Whether a dump is an input or an output, of which module, and its label there."""
    if name == "input_ids":
        return "inputs", "", name
    match = _MODULE_TENSOR.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if match is None:
        return "outputs", name if layer is None else f"{name}.{layer}", ""
    label = ".".join(part for part in (match["argument"], match["key"]) if part)
    return "outputs" if match["argument"] is None else "inputs", match["module"] or "", label
