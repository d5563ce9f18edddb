# SPDX-License-Identifier: Apache-2.0
"""Recordings of the outputs of a model, by module and token: collected forward by forward, saved, and loaded.

Also from the files of SGLang's tensor dumper (``sglang.srt.debug_utils.dumper``).
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.files import regular_file
from mis_ext.onpolicy.bits import same_bits
from mis_ext.onpolicy.recording.rows import PlacedRows, Rows, place_rows

Kind = Literal["inputs", "outputs"]

_FORMAT = "mis_ext.onpolicy.recording/1"

_Key = tuple[str, str]

Entries = dict[str, dict[str, PlacedRows]]
"""Tensors by module name and label. A module's later calls in one forward are ``name#1``, ``name#2``, ...; the model
itself is ``""``. The label of a single output is ``""``, else its index or key. The label of an input begins with its
parameter.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """The outputs of a model, by module and token.

    Attributes:
        outputs: In the order of execution of the first forward that has them. An output that first appears in a later
            forward follows the output that ran before it there.
        inputs: Likewise.
        skipped: Inputs and outputs that were not recorded, with the reason, such as masks and caches.
    """

    outputs: Entries
    inputs: Entries = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path``."""
        tensors = {
            kind: {name: {label: rows._asdict() for label, rows in labels.items()} for name, labels in kept.items()}
            for kind, kept in (("outputs", self.outputs), ("inputs", self.inputs))
        }
        torch.save({"format": _FORMAT, **tensors, "skipped": dict(self.skipped)}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a file of :meth:`save`.

        Raises:
            ValueError: The file is not a recording.
        """
        content = load_tensors(path)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{os.fspath(path)} is not a recording of format {_FORMAT!r}")
        try:
            outputs, inputs = (_entries(content[kind]) for kind in ("outputs", "inputs"))
            return cls(outputs=outputs, inputs=inputs, skipped=dict(content["skipped"]))
        # Errors that a changed byte in the file can cause.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is a damaged recording: {type(error).__name__}: {error}") from None


class RecordingBuilder:
    """Collects rows of one forward after another; a row may be repeated."""

    def __init__(self) -> None:
        self._pieces: dict[Kind, dict[_Key, list[PlacedRows]]] = {"outputs": {}, "inputs": {}}
        self._order: dict[Kind, list[_Key]] = {"outputs": [], "inputs": []}
        self._last: dict[Kind, _Key] = {}
        self._skipped: dict[str, str] = {}

    def begin_forward(self) -> None:
        """Begin a forward, so that the next tensor comes first in the order of execution."""
        self._last = {}

    def add(self, kind: Kind, module: str, label: str, placed: PlacedRows) -> None:
        """Store the rows of one tensor of one forward."""
        key, order = (module, label), self._order[kind]
        if key not in self._pieces[kind]:
            self._pieces[kind][key] = []
            last = self._last.get(kind)
            order.insert(0 if last is None else order.index(last) + 1, key)
        self._pieces[kind][key].append(placed)
        self._last[kind] = key

    def skip(self, kind: Kind, module: str, label: str, reason: str) -> None:
        """Note an input or output that cannot be split by tokens, with the reason."""
        self._skipped[f"{describe(module, label)} {kind}"] = reason

    def build(self) -> Recording:
        """The recording of all added rows; equal repetitions of a row are merged."""
        skipped = dict(self._skipped)
        built: dict[Kind, Entries] = {"outputs": {}, "inputs": {}}
        for kind, keys in self._order.items():
            for order, key in enumerate(keys):
                pieces, where = self._pieces[kind][key], f"{describe(*key)} {kind}"
                if len({piece.values[:1].numel() for piece in pieces if len(piece.values)}) > 1:
                    skipped[where] = "the size of a row changes between forwards"
                    continue
                merged = _merge(pieces, where)
                # Keep only the merged rows, because large recordings fill the memory.
                self._pieces[kind][key] = [merged]
                built[kind].setdefault(key[0], {})[key[1]] = merged._replace(order=order)
        return Recording(outputs=built["outputs"], inputs=built["inputs"], skipped=skipped)


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """Load a file of ``torch.save`` to the CPU; only tensors and plain values."""
    try:
        return torch.load(regular_file(path), map_location="cpu", weights_only=True)
    except OSError:
        raise
    # On bytes that are not a pickle, the unpickler can raise any error, and torch's advice does not help here.
    except Exception as error:
        reason = (str(error).splitlines() or ["it ends early"])[0]
        raise ValueError(f"{os.fspath(path)} is not a file of tensors: {reason}") from error


def _entries(plain: dict[str, dict[str, dict[str, Any]]]) -> Entries:
    entries: Entries = {}
    for module, labels in plain.items():
        entries[module] = {label: PlacedRows(order=fields.pop("order"), **fields) for label, fields in labels.items()}
        for placed in entries[module].values():
            if not placed.sequence_N.shape == placed.position_N.shape == placed.values.shape[:1]:
                raise ValueError("a tensor does not have one place for each row")
    return entries


def describe(module: str, label: str = "") -> str:
    """A tensor's name in messages: its module, and its label in brackets if it has one."""
    name = module or "(model)"
    return f"{name}[{label}]" if label else name


def _merge(pieces: list[PlacedRows], where: str) -> PlacedRows:
    """One sorted piece without repetitions; a single piece that is already sorted is returned unchanged."""
    dtypes = {piece.values.dtype for piece in pieces}
    if len(dtypes) > 1:
        raise ValueError(f"{where}: the dtype changes between forwards: {sorted(map(str, dtypes))}")
    values, sequence_N, position_N, _ = merged = pieces[0] if len(pieces) == 1 else _cat(pieces)
    next_sequence, next_position = sequence_N.diff(), position_N.diff()
    if bool(((next_sequence > 0) | ((next_sequence == 0) & (next_position > 0))).all()):
        return merged
    by_position = position_N.argsort(stable=True)
    index = by_position[sequence_N[by_position].argsort(stable=True)]
    values, sequence_N, position_N = values[index], sequence_N[index], position_N[index]
    again = (sequence_N[1:] == sequence_N[:-1]) & (position_N[1:] == position_N[:-1])
    if again.any():
        other = again.nonzero()[:, 0]
        changed = ~same_bits(values[other], values[other + 1]).flatten(1).all(1)
        if changed.any():
            row = other[changed][0]
            raise ValueError(
                f"{where}: sequence {int(sequence_N[row])}, position {int(position_N[row])} was recorded twice with "
                f"different bits ({int(changed.sum())} rows in all); record each token once"
            )
        keep = torch.cat([torch.ones(1, dtype=torch.bool), ~again])
        values, sequence_N, position_N = values[keep], sequence_N[keep], position_N[keep]
    return PlacedRows(values, sequence_N, position_N)


def _cat(pieces: list[PlacedRows]) -> PlacedRows:
    # An empty piece can have any row shape.
    shape = next((piece.values.shape[1:] for piece in pieces if len(piece.values)), pieces[0].values.shape[1:])
    return PlacedRows(
        torch.cat([piece.values.reshape(len(piece.values), *shape) for piece in pieces]),
        torch.cat([piece.sequence_N for piece in pieces]),
        torch.cat([piece.position_N for piece in pieces]),
    )


_FILE = re.compile(r"step=(?P<step>\d+)___rank=0___dump_index=(?P<index>\d+)___name=(?P<name>.+)\.pt")
_PREFIX = "non_intrusive__"
_TOKENS = ("positions", "seq_lens", "rids")
# The last "output" or "inputs.N" is from the dumper, because modules can have these names too.
_MODULE_TENSOR = re.compile(r"(?:(?P<module>.+)\.)?(?:inputs\.(?P<argument>[^.]+)|output)(?:\.(?P<key>.+))?")


class _Dump(NamedTuple):
    path: Path
    name: str

    def load(self) -> dict[str, Any]:
        content = load_tensors(self.path)
        if not isinstance(content, dict) or "value" not in content or not isinstance(content.get("meta"), dict):
            raise ValueError(f"{self.path} is not a dump: it must be a dict with 'value' and 'meta'")
        return content


def read_sglang_dumps(
    directory: str | os.PathLike[str],
    *,
    requests: Sequence[str] | None = None,
) -> Recording:
    """Read the activations of rank 0 from a directory of dumps, by module and token.

    ``DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all`` dumps every module's inputs and outputs and, in each step (one
    forward), three names that define its tokens: their ``positions [T]``, the lengths of the requests up to and
    including this step, ``seq_lens [S]``, and their ids, ``rids``. A dump of ``input_ids`` is an input of the model.
    Any other dump counts as the output of a module ``name``, or ``name.N`` in layer N. Gradients, parameters and
    recomputed activations are skipped. If SGLang computes logits only for the last token of each request, only these
    rows exist.

    Args:
        directory: ``<dir>/<exp>``, or ``<dir>`` if it has a single experiment.
        requests: The request ids in the order of the sequences 0, 1, ...; other requests (a server's warm-up) are
            skipped. By default the order of appearance.

    Raises:
        ValueError: There are no dumps; a step lacks one of the three names, has different values of one, or they are
            inconsistent; no step has one of the ``requests``; a request was retracted and run again with different
            bits; or a file is unreadable.
    """
    steps = _steps(Path(directory))
    seen: dict[str, int] = {}
    builder = RecordingBuilder()
    for step, dumps in sorted(steps.items()):
        position_T, length_S, requests_S = (_only(step, name, dumps, os.fspath(directory)) for name in _TOKENS)
        sequence_S = [seen.setdefault(str(request), len(seen)) for request in requests_S]
        if requests is not None:
            sequence_S = [requests.index(x) if (x := str(request)) in requests else -1 for request in requests_S]
        builder.begin_forward()
        rows = _rows(step, torch.as_tensor(position_T), torch.as_tensor(length_S).tolist(), sequence_S)
        _add(builder, [dump for dump in dumps if dump.name not in _TOKENS], rows)
    unknown = [request for request in requests or () if request not in seen]
    if unknown:
        raise ValueError(f"{os.fspath(directory)} has no request {unknown}; it has {[*seen]}")
    return builder.build()


def _steps(directory: Path) -> dict[int, list[_Dump]]:
    """The dumps of each step, in order of creation."""
    folders = [folder for folder in sorted(directory.iterdir()) if folder.is_dir()]
    if not any(directory.glob("*.pt")) and len(folders) == 1:
        directory = folders[0]
    found: dict[int, list[tuple[int, _Dump]]] = defaultdict(list)
    for path in directory.glob("*.pt"):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            dump = _Dump(path, match["name"].partition("___")[0])
            found[int(match["step"])].append((int(match["index"]), dump))
    if not found:
        several = f"; it has several experiments: {[folder.name for folder in folders]}" if folders else ""
        raise ValueError(f"no dumps of rank 0 in {directory}{several}")
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
    """Split the step's tokens into its requests: the last position of a request is its length minus one."""
    if position_T.dim() != 1 or len(lengths) != len(sequences):
        raise ValueError(
            f"step {step}: positions must have one dimension, and there must be as many lengths as request ids; got "
            f"{[*position_T.shape]}, {len(lengths)} and {len(sequences)}"
        )
    sequence_T: list[int] = []
    last: list[int] = []
    for length, sequence in zip(lengths, sequences, strict=True):
        rest = position_T[len(sequence_T) :].tolist()
        if length - 1 not in rest or rest[: rest.index(length - 1) + 1] != [*range(rest[0], length)]:
            raise ValueError(f"step {step}: positions {rest} do not start with the end of a request of length {length}")
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
        if placed is None:
            builder.skip(kind, call, label, f"no token dimensions in {[*value.shape]}")
        else:
            builder.add(kind, call, label, placed)


def _place(name: str, layer: Any) -> tuple[Kind, str, str]:
    """Return the module of a dump, its label there, and whether it is an input or an output."""
    if name == "input_ids":
        return "inputs", "", name
    match = _MODULE_TENSOR.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if match is None:
        return "outputs", name if layer is None else f"{name}.{layer}", ""
    label = ".".join(part for part in (match["argument"], match["key"]) if part)
    return "outputs" if match["argument"] is None else "inputs", match["module"] or "", label
