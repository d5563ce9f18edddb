"""The golden record: what is kept of a case, its file, and the comparison of two results.

A file is a compressed archive of four flat tensors and an index. The loss is kept as the bits in which it differs from
``pg_loss * gradient``: nearly all are zero, and no bit is lost.
"""

import hashlib
import io
import json
import lzma
import math
import platform
from pathlib import Path
from typing import NamedTuple

import torch
from golden_data import draw
from golden_grid import LAYOUTS, Case, configurations
from golden_ranks import run_layout

FOLDER = Path(__file__).parent
EXACT = ("loss", "gradient", "masks")
RELATIVE, ABSOLUTE = 1e-6, 1e-7


class Result(NamedTuple):
    """The numbers of one case, rank after rank; metrics are sums over the context-parallel ranks."""

    loss: torch.Tensor
    gradient: torch.Tensor
    masks: torch.Tensor
    metrics: dict[str, list[float]]


def compute(case: Case, *, device: str = "cpu") -> tuple[Result, torch.Tensor]:
    """What the code of today gives, and the ``pg_loss`` that went in."""
    ranks_by_dp = run_layout(
        configurations()[case.config],
        LAYOUTS[case.layout],
        case.kind,
        per_token_loss=case.reducer == "token sums",
        device=device,
    )
    ranks = [rank for cp_ranks in ranks_by_dp for rank in cp_ranks]
    pg_loss, loss, gradient, masks = (torch.cat(column) for column in zip(*(rank[:4] for rank in ranks), strict=True))
    names = list(ranks[0].metrics)
    if any(list(rank.metrics) != names for rank in ranks):
        raise AssertionError(f"{case.name}: the ranks return different metrics")
    metrics = {name: [sum(rank.metrics[name] for rank in cp_ranks) for cp_ranks in ranks_by_dp] for name in names}
    return Result(loss, gradient, masks, metrics), pg_loss


def fingerprint(case: Case) -> str:
    """Of the inputs of a case: a record of other inputs is no record."""
    digest = hashlib.sha256(json.dumps(configurations()[case.config], sort_keys=True).encode())
    for index, lengths in enumerate(LAYOUTS[case.layout].lengths):
        for column in draw(case.kind, lengths, seed=7 + index):
            digest.update(torch.cat(column).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def machine() -> str:
    """What decides the bits of `exp`: the processor's kind and the torch that runs on it."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


class Record:
    """Results by name of their case."""

    def __init__(self, backend: str) -> None:
        self.path = FOLDER / f"{backend}.pt.xz"
        self.machine = machine()
        self._index: dict[str, dict] = {}
        self._names: list[list[str]] = []
        self._parts: dict[str, list[torch.Tensor]] = {"loss": [], "gradient": [], "masks": [], "metrics": []}
        self._sizes = dict.fromkeys(self._parts, 0)

    @property
    def cases(self) -> list[str]:
        """Names of all cases."""
        return list(self._index)

    def add(self, case: Case, result: Result, pg_loss: torch.Tensor) -> None:
        """Keep a result."""
        if result.loss.dtype != torch.float32 or result.gradient.dtype != torch.float32:
            raise TypeError(f"{case.name}: loss {result.loss.dtype} and gradient {result.gradient.dtype}")
        if not ((result.masks == 0) | (result.masks == 1)).all():
            raise ValueError(f"{case.name}: a mask is neither 0 nor 1")
        names = list(result.metrics)
        if names not in self._names:
            self._names.append(names)
        values = torch.tensor(list(result.metrics.values()), dtype=torch.float64)
        parts = {
            "loss": _bits(result.loss) ^ _bits(pg_loss * result.gradient),
            "gradient": result.gradient,
            "masks": result.masks.to(torch.uint8),
            "metrics": values.flatten(),
        }
        starts = dict(self._sizes)
        for quantity, part in parts.items():
            self._parts[quantity].append(part)
            self._sizes[quantity] += part.numel()
        spans = {quantity: [starts[quantity], self._sizes[quantity]] for quantity in parts}
        self._index[case.name] = {"inputs": fingerprint(case), "names": self._names.index(names), **spans}

    def get(self, case: Case, pg_loss: torch.Tensor) -> Result:
        """The recorded result of a case.

        Raises:
            ValueError: The inputs are no longer those that were recorded.
        """
        entry = self._index[case.name]
        if entry["inputs"] != fingerprint(case):
            raise ValueError(f"{case.name}: its inputs are not those of the record")
        part = {quantity: self._parts[quantity][0][slice(*entry[quantity])] for quantity in self._parts}
        loss = (_bits(pg_loss * part["gradient"]) ^ part["loss"]).view(torch.float32)
        names = self._names[entry["names"]]
        metrics = dict(zip(names, part["metrics"].reshape(len(names), -1).tolist(), strict=True))
        return Result(loss, part["gradient"], part["masks"].float(), metrics)

    def save(self) -> None:
        """Write the file."""
        file = io.BytesIO()
        index = json.dumps({"machine": self.machine, "names": self._names, "cases": self._index})
        torch.save({"index": index} | {name: torch.cat(parts) for name, parts in self._parts.items()}, file)
        self.path.write_bytes(lzma.compress(file.getvalue(), preset=9))

    @classmethod
    def load(cls, backend: str) -> "Record":
        """Read the file of a backend."""
        record = cls(backend)
        content = torch.load(io.BytesIO(lzma.decompress(record.path.read_bytes())), weights_only=True)
        index = json.loads(content.pop("index"))
        record.machine, record._names, record._index = index["machine"], index["names"], index["cases"]
        record._parts = {name: [part] for name, part in content.items()}
        return record


class Difference(NamedTuple):
    """How one quantity of one case differs from the record.

    ``error`` is in tolerances: up to 1 is allowed. Numbers that are NaN today are apart from it, in ``is_lost``.
    """

    quantity: str
    case: str
    is_exact: bool
    is_lost: bool
    error: float
    example: str


def differences(case: Case, actual: Result, expected: Result) -> list[Difference]:
    """Loss, gradient, masks and each recorded metric; a metric that is new today is none of ours."""
    pairs = {name: (getattr(actual, name), getattr(expected, name)) for name in EXACT}
    for name, values in expected.metrics.items():
        today = actual.metrics.get(name)
        pairs[name] = (
            torch.tensor([], dtype=torch.float64) if today is None else torch.tensor(today, dtype=torch.float64),
            torch.tensor(values, dtype=torch.float64),
        )
    return [_difference(name, case.name, today, recorded) for name, (today, recorded) in pairs.items()]


def is_wrong(difference: Difference, *, needs_bits: bool) -> bool:
    """Beyond what the quantity is allowed: masks differ in nothing, with ``needs_bits`` loss and gradient neither."""
    if difference.quantity == "masks" or (needs_bits and difference.quantity in EXACT):
        return not difference.is_exact
    return difference.is_lost or difference.error > 1.0


def _difference(quantity: str, case: str, actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    if actual.shape != expected.shape:
        example = "other shape" if actual.numel() else "not there"
        return Difference(quantity, case, is_exact=False, is_lost=False, error=math.inf, example=example)
    actual, expected = actual.double(), expected.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    lost = actual.isnan() & ~same
    error = ((actual - expected).abs() / (RELATIVE * expected.abs() + ABSOLUTE)).nan_to_num(nan=math.inf)
    error = torch.where(same | lost, 0.0, error)
    worst = int((error + lost * 1e-9).argmax()) if error.numel() else 0
    return Difference(
        quantity,
        case,
        is_exact=bool(same.all()),
        is_lost=bool(lost.any()),
        error=float(error[worst]) if error.numel() else 0.0,
        example=f"{actual[worst]:.9g}, was {expected[worst]:.9g}" if error.numel() else "",
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)
