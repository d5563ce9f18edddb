# SPDX-License-Identifier: Apache-2.0
"""Cost and accuracy of scoring tokens from hidden states: ours, and every kernel of other projects.

    python lab/benchmarks/hidden.py --anchors FOLDER [--shapes T:H:V ...] [--exact T:H:V ...] [--json FILE]

``FOLDER`` holds checkouts ``verl/``, ``nemo-rl/`` and ``prime-rl/``, of which a few files are read; Liger-Kernel and
cut-cross-entropy (25.6 or later) are imported where they are installed. Nothing of theirs is part of this repository.
Liger's head in CuTe DSL needs ``nvidia-cutlass-dsl`` of the driver's CUDA, whose code a ``.pth`` file puts on the path:
beside ``site-packages`` Python reads none, and ``nvidia_cutlass_dsl/dsl_packages`` has to be on ``PYTHONPATH`` too.
What cannot run says why in its row. ``--json`` is written after every row; ``--show`` prints the tables of such files
together.

- **Cost** (``--shapes``): a forward and a backward pass to the gradients of hidden states and weight, bfloat16, medians
  of calls that take turns. *Above*: the peak of the allocator, less what was there before and less the two gradients in
  the dtype of their tensors. *By the products*: time over that of the four bare matrix products of the shape, which no
  head that makes logits twice can do without.
- **Errors** (``--exact``): against float64 from the same bfloat16 operands, every row and every column. Log-prob and
  entropy: the largest difference, nats. Gradients: the Frobenius norm of the difference over that of the gradient. The
  row ``float64, rounded once`` is what a bfloat16 gradient cannot be better than.

Rows have the shape of a trained model's: a token is 3 nats, plus or minus, from even odds with all others together. So
what skips small probabilities (cut cross entropy) skips here what it skips in training.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

# So that it runs where mis_ext is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import reporting
import torch
import torch.nn.functional as F
from scoring_measure import GIB, Row, guarded, say
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from workload import World

import mis_ext

ON_GPU = ["2048:4096:151936", "16384:4096:151936", "65536:4096:151936"]
ON_CPU = ["48:16:67"]
ROUNDS = 20
CHECKPOINT_ROWS, PRODUCT_ROWS = 1024, 16384
SEQUENCE = 2048
"""Tokens of a sequence where somebody wants a batch of them."""
FLOAT64_ROWS = 256

Gradient = Literal["both", "log-prob", "mean", "grpo", "none"]
"""What reaches hidden states and weight: slopes of log-prob and entropy, of the log-prob alone, of the mean of all
log-probs, of a GRPO loss whose slopes are those of the log-prob here, or nothing that could be compared."""


class Problem(NamedTuple):
    """Hidden states ``[T, H]``, weight ``[V, H]``, tokens ``[T]``, and the slopes ``[T]`` of log-prob and entropy."""

    hidden_TH: Tensor
    weight_VH: Tensor
    token_T: Tensor
    slope_T: Tensor
    of_entropy_T: Tensor
    advantages_S: Tensor


class Found(NamedTuple):
    """``[T]``, None where a way does not say it; the gradients are those of the two leaves."""

    log_prob_T: Tensor | None = None
    entropy_T: Tensor | None = None


class Way(NamedTuple):
    """One way, forward and backward. ``remark`` is for the table."""

    name: str
    call: Callable[[Problem], Found]
    gradient: Gradient
    remark: str = ""


def drawn(shape: str, *, device: torch.device, seed: int) -> Problem:
    """Rows as a trained model's, and the slopes of a GRPO loss with an entropy bonus."""
    num_tokens, width, num_columns = map(int, shape.split(":"))
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight_VH = torch.empty(num_columns, width, dtype=torch.bfloat16, device=device)
    for part in weight_VH.split(16384):
        part.copy_(normal(*part.shape) / math.sqrt(width))
    token_T = torch.randint(num_columns, (num_tokens,), generator=generator, device=device)
    # Logits of all other tokens are standard normal: their sum of exponentials is V exp(1/2).
    wanted_T = math.log(num_columns) + 0.5 + 3.0 * normal(num_tokens)
    hidden_TH = torch.empty(num_tokens, width, dtype=torch.bfloat16, device=device)
    for rows, tokens, wanted in zip(hidden_TH.split(8192), token_T.split(8192), wanted_T.split(8192), strict=True):
        own = weight_VH[tokens].float()
        rows.copy_(normal(*rows.shape) + own * (wanted / own.square().sum(-1)).unsqueeze(-1))
    sequences = max(num_tokens // SEQUENCE, 1)
    advantages_S = normal(sequences)
    slope_T = -advantages_S.repeat_interleave(num_tokens // sequences) / num_tokens
    of_entropy_T = -torch.rand(num_tokens, generator=generator, device=device) / num_tokens
    leaves = (hidden_TH.requires_grad_(), weight_VH.requires_grad_())
    return Problem(*leaves, token_T, slope_T, of_entropy_T, advantages_S)


# The compared functions


def ways(anchors: Path | None, device: torch.device) -> Iterator[Way | Row]:
    """All rows; a missing contender has a row with the reason."""
    yield Way("four bare matrix products", _products, "none", "no log-prob, no gradient of a loss")
    yield Way("mis_ext.score_hidden", partial(_score_hidden, "gradient"), "both")
    yield Way("mis_ext.score_hidden, entropy logged", partial(_score_hidden, "value"), "log-prob", "entropy: a value")
    yield Way("mis_ext.score_hidden, log-prob alone", partial(_score_hidden, "none"), "log-prob", "no entropy")
    yield Way("mis_ext.score_tokens over logits", _over_logits, "both", "in place")
    yield Way("torch, checkpointed chunks", _checkpointed, "both", f"chunks of {CHECKPOINT_ROWS:,} tokens")
    gpu_only: list[tuple[str, Callable[[str], Way]]] = [
        ("verl, linear_cross_entropy", partial(_verl_kernel, anchors)),
        ("Liger, fused scaled cross entropy (CuTe)", _liger_scaled),
        ("Liger, fused linear cross entropy", partial(_liger_cross_entropy, "none")),
        ("Liger, fused linear cross entropy, mean", partial(_liger_cross_entropy, "mean")),
        ("Liger, fused linear GRPO loss", _liger_grpo),
        ("Apple, cut cross entropy", partial(_cut, "cce")),
        ("Apple, cut cross entropy, exact", partial(_cut, "cce_exact")),
    ]
    anywhere: list[tuple[str, Callable[[str], Way]]] = [
        ("verl, FusedLinearForPPO", partial(_verl_chunks, anchors)),
        ("NeMo-RL, chunked linear", partial(_nemo_rl, anchors, device)),
        ("prime-rl, fused head", partial(_prime_rl, anchors)),
    ]
    for name, make in gpu_only + anywhere:
        if device.type != "cuda" and (name, make) in gpu_only:
            yield {"who": name, "missing": "its kernels need a GPU"}
            continue
        found = guarded(partial(make, name))
        yield found if isinstance(found, Way) else found | {"who": name}


def _given(problem: Problem, found: Found, *, entropy: bool) -> Found:
    """The backward pass of the slopes."""
    pairs = [(found.log_prob_T, problem.slope_T)]
    pairs += [(found.entropy_T, problem.of_entropy_T)] if entropy else []
    given = [(x_T, slope_T.to(x_T.dtype)) for x_T, slope_T in pairs if x_T is not None]
    torch.autograd.backward(*zip(*given, strict=True))
    return Found(*(None if x_T is None else x_T.detach() for x_T in found))


def _products(problem: Problem) -> Found:
    """Logits twice, then both gradients, as many rows at a time as keep the multiprocessors busy."""
    with torch.no_grad():
        hidden_TH, weight_VH = problem.hidden_TH, problem.weight_VH
        grad_TH, grad_VH = torch.empty_like(hidden_TH), torch.zeros_like(weight_VH)
        rows = min(len(hidden_TH), PRODUCT_ROWS)
        logits_NV = hidden_TH.new_empty(rows, len(weight_VH))
        for own, grad in zip(hidden_TH.split(rows), grad_TH.split(rows), strict=True):
            part = logits_NV[: len(own)]
            for _ in range(2):
                torch.mm(own, weight_VH.T, out=part)
            torch.mm(part, weight_VH, out=grad)
            grad_VH.addmm_(part.T, own)
        problem.hidden_TH.grad, problem.weight_VH.grad = grad_TH, grad_VH
    return Found()


def _score_hidden(entropy: Any, problem: Problem) -> Found:
    scores = mis_ext.score_hidden(problem.hidden_TH, problem.weight_VH, problem.token_T, entropy=entropy)
    return _given(problem, Found(*scores), entropy=entropy == "gradient")


def _over_logits(problem: Problem) -> Found:
    scores = mis_ext.score_tokens(F.linear(problem.hidden_TH, problem.weight_VH), problem.token_T, inplace=True)
    return _given(problem, Found(*scores), entropy=True)


def _checkpointed(problem: Problem) -> Found:
    def scored(hidden_NH: Tensor, weight_VH: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.linear(hidden_NH, weight_VH).float().log_softmax(-1)
        return log_p.gather(-1, token_N.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    rows = zip(problem.hidden_TH.split(CHECKPOINT_ROWS), problem.token_T.split(CHECKPOINT_ROWS), strict=True)
    parts = [checkpoint(scored, own, problem.weight_VH, token_N, use_reentrant=False) for own, token_N in rows]
    return _given(problem, Found(*(torch.cat(each) for each in zip(*parts, strict=True))), entropy=True)


def from_checkout(folder: Path | None, name: str, module: str, *stand_ins: str) -> Any:
    """A module of a checkout, without what its packages import at their own beginning.

    Args:
        folder: Where its first package lies.
        name: The checkout, for the message.
        module: What is imported.
        stand_ins: Modules that it imports for functions that are not called here.
    """
    if folder is None or not folder.is_dir():
        raise ValueError(f"no checkout {name}")
    for stand_in in stand_ins:
        sys.modules.setdefault(stand_in, _Anything(stand_in))
    packages = module.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = ModuleType(".".join(packages[:depth]))
        package.__path__ = [str(folder.joinpath(*packages[:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(module)


class _Anything(ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _verl_kernel(anchors: Path | None, name: str) -> Way:
    folder = None if anchors is None else anchors / "verl"
    function = from_checkout(folder, "verl", "verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def call(problem: Problem) -> Found:
        found = function(problem.hidden_TH, problem.weight_VH, problem.token_T, 1.0, "none")
        return _given(problem, Found(*found), entropy=True)

    return Way(name, call, "both", "Triton")


def _verl_chunks(anchors: Path | None, name: str) -> Way:
    folder = None if anchors is None else anchors / "verl"
    function = from_checkout(folder, "verl", "verl.utils.experimental.torch_functional").FusedLinearForPPOFunction

    def call(problem: Problem) -> Found:
        found = function.apply(problem.hidden_TH, problem.weight_VH, problem.token_T)
        return _given(problem, Found(*found), entropy=True)

    return Way(name, call, "both", "chunks of 512 tokens; entropy rounded to bfloat16")


def _nemo_rl(anchors: Path | None, device: torch.device, name: str) -> Way:
    folder = None if anchors is None else anchors / "nemo-rl"
    module = from_checkout(folder, "nemo-rl", "nemo_rl.distributed.model_utils")
    if not torch.distributed.is_initialized():
        file = Path(tempfile.mkdtemp()) / "store"
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{file}", rank=0, world_size=1)

    def call(problem: Problem) -> Found:
        group, columns = torch.distributed.group.WORLD, len(problem.weight_VH)
        # Its hidden states are [sequence, batch, width]; it counts tokens along the sequence.
        log_prob = module.ChunkedDistributedHiddenStatesToLogprobs.apply(
            problem.hidden_TH.unsqueeze(1), problem.token_T.unsqueeze(0), problem.weight_VH, 0, columns, 256, group
        )
        return _given(problem, Found(log_prob.squeeze(0)), entropy=False)

    return Way(name, call, "log-prob", "no entropy; chunks of 256 tokens, its default")


def _prime_rl(anchors: Path | None, name: str) -> Way:
    folder = None if anchors is None else anchors / "prime-rl" / "src"
    module = from_checkout(
        folder, "prime-rl", "prime_rl.trainer.models.layers.lm_head", "prime_rl.utils.logger", "prime_rl.utils.vlm"
    )

    def call(problem: Problem) -> Found:
        ones_T = torch.ones_like(problem.slope_T)
        function = module._SequenceChunkedLogProbEntropyFn
        found = function.apply(problem.hidden_TH, problem.weight_VH, problem.token_T, ones_T, 8192)
        return _given(problem, Found(*found), entropy=False)

    return Way(name, call, "log-prob", "entropy: a value; chunks of 8,192 tokens and columns, its default")


def _liger_scaled(name: str) -> Way:
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    def call(problem: Problem) -> Found:
        loss_T, entropy_T = function.apply(problem.hidden_TH, problem.weight_VH, problem.token_T, return_entropy=True)
        return _given(problem, Found(-loss_T, entropy_T), entropy=True)

    return Way(name, call, "both", "CuTe DSL, Hopper alone")


def _liger_cross_entropy(reduction: str, name: str) -> Way:
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction

    def call(problem: Problem) -> Found:
        settings = (None, None, -100, 0.0, 0.0, reduction)
        loss = function.apply(problem.hidden_TH, problem.weight_VH, problem.token_T, *settings)[0]
        if reduction == "none":
            return _given(problem, Found(-loss), entropy=False)
        loss.backward()
        return Found()

    remark = "no entropy" if reduction == "none" else "no entropy; gradients made in the forward: three products"
    return Way(name, call, "log-prob" if reduction == "none" else "mean", remark)


def _liger_grpo(name: str) -> Way:
    module = importlib.import_module("liger_kernel.chunked_loss")
    # On-policy and without a penalty: the slope of a log-prob is its advantage over the number of tokens.
    loss_of = module.LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")

    def call(problem: Problem) -> Found:
        sequences = len(problem.advantages_S)
        token_BL = problem.token_T.view(sequences, -1)
        hidden_BLH = problem.hidden_TH.view(*token_BL.shape, -1)
        mask_BL = torch.ones_like(token_BL)
        loss, _ = loss_of(hidden_BLH, problem.weight_VH, token_BL, mask_BL, problem.advantages_S)
        loss.backward()
        return Found()

    return Way(name, call, "grpo", "no entropy, no log-probs; float32 products")


def _cut(impl: str, name: str) -> Way:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def call(problem: Problem) -> Found:
        loss_T = function(problem.hidden_TH, problem.weight_VH, problem.token_T, reduction="none", impl=impl)
        return _given(problem, Found(-loss_T), entropy=False)

    remark = "omits what bfloat16 would round away" if impl == "cce" else "omits nothing, float32 sums"
    return Way(name, call, "log-prob", f"no entropy; {remark}")


class Record:
    """All rows, and the file that has them after each."""

    def __init__(self, header: dict[str, str], file: Path | None = None) -> None:
        self.header, self.rows, self._file = header, list[Row](), file

    def add(self, row: Row) -> Row:
        """One more, which may still change."""
        self.rows.append(row)
        self.save()
        return row

    def save(self) -> None:
        """Write the file, if there is one."""
        if self._file is not None:
            self._file.write_text(json.dumps({"header": self.header, "rows": self.rows}, indent=1))


# The cost


def part_cost(shape: str, found: list[Way | Row], world: World, options: argparse.Namespace, record: Record) -> None:
    """Peak of one call each, then times of calls that take turns."""
    problem = drawn(shape, device=world.device, seed=options.seed)
    taking_turns: list[tuple[Way, Row]] = []
    for way in found:
        row = _begun("cost", shape, way, options)
        if isinstance(way, Way) and "missing" not in row:
            say(shape, way.name)
            row |= guarded(partial(_first_calls, way, problem, world))
            if "missing" not in row:
                row["times"] = []
                taking_turns.append((way, row))
        record.add(row)
    for number in range(options.rounds):
        # Another one is the first of each round.
        first = number % max(len(taking_turns), 1)
        for way, row in taking_turns[first:] + taking_turns[:first]:
            is_measured = number >= options.least and sum(row["times"]) > options.budget
            if not is_measured and time.monotonic() < options.deadline:
                row["times"].append(_timed(way, problem, world))
        record.save()
    for _, row in taking_turns:
        if not row["times"]:
            row["missing"] = "no time left"
    record.save()


def _begun(part: str, shape: str, way: Way | Row, options: argparse.Namespace) -> Row:
    row: Row = {"part": part, "shape": shape}
    if isinstance(way, dict):
        return row | way
    row |= {"who": way.name, "gradient": way.gradient, "remark": way.remark}
    return row | ({"missing": "no time left"} if time.monotonic() > options.deadline else {})


def _first_calls(way: Way, problem: Problem, world: World) -> Row:
    """Code that compiles does so in the first call; the peak is of the second."""
    _timed(way, problem, world)
    if world.device.type != "cuda":
        return {"peak_bytes": None}
    _clear(problem)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(world.device)
    before = torch.cuda.memory_allocated(world.device)
    way.call(problem)
    world.synchronize()
    peak = torch.cuda.max_memory_allocated(world.device) - before
    return {"peak_bytes": peak - problem.hidden_TH.nbytes - problem.weight_VH.nbytes}


def _timed(way: Way, problem: Problem, world: World) -> float:
    _clear(problem)
    world.synchronize()
    start = time.perf_counter()
    way.call(problem)
    world.synchronize()
    return time.perf_counter() - start


def _clear(problem: Problem) -> None:
    problem.hidden_TH.grad = problem.weight_VH.grad = None


def _median(row: Row) -> float:
    return statistics.median(row["times"])


# How exact it is


class Exact(NamedTuple):
    """float64, from the same operands: scores ``[T]``, and the gradients by the slopes of both or of one."""

    log_prob_T: Tensor
    entropy_T: Tensor
    of_both: tuple[Tensor, Tensor]
    of_log_prob: tuple[Tensor, Tensor]


def exact(problem: Problem) -> Exact:
    """A few rows at a time."""
    hidden_TH, weight_VH = problem.hidden_TH.detach(), problem.weight_VH.detach().double()
    scores: list[tuple[Tensor, Tensor]] = []
    grads = [(torch.zeros_like(hidden_TH, dtype=torch.float64), torch.zeros_like(weight_VH)) for _ in range(2)]
    for begin in range(0, len(hidden_TH), FLOAT64_ROWS):
        part = slice(begin, begin + FLOAT64_ROWS)
        own = hidden_TH[part].double()
        log_p = (own @ weight_VH.T).log_softmax(-1)
        p = log_p.exp()
        entropy_N = -(p * log_p).sum(-1)
        place_N1 = problem.token_T[part].unsqueeze(-1)
        scores.append((log_p.gather(-1, place_N1).squeeze(-1), entropy_N))
        # g (1[v = t] - p_v) - h p_v (log p_v + H)
        slope_N1 = problem.slope_T[part].double().unsqueeze(-1)
        of_log_prob = (-slope_N1 * p).scatter_add_(-1, place_N1, slope_N1)
        of_entropy = problem.of_entropy_T[part].double().unsqueeze(-1) * p * (log_p + entropy_N.unsqueeze(-1))
        for slopes, (grad_TH, grad_VH) in zip((of_log_prob - of_entropy, of_log_prob), grads, strict=True):
            grad_TH[part] = slopes @ weight_VH
            grad_VH.addmm_(slopes.T, own)
    log_prob_T, entropy_T = (torch.cat(each) for each in zip(*scores, strict=True))
    return Exact(log_prob_T, entropy_T, *grads)


def part_exact(shape: str, found: list[Way | Row], world: World, options: argparse.Namespace, record: Record) -> None:
    """Errors of every way that says something."""
    problem = drawn(shape, device=world.device, seed=options.seed)
    truth = exact(problem)
    best = [_relative(grad.bfloat16(), grad) for grad in truth.of_both]
    names = {"part": "exact", "shape": shape, "who": "float64, rounded once", "gradient": "both"}
    record.add(names | dict(zip(("hidden_error", "weight_error"), best, strict=True)))
    for way in found:
        if isinstance(way, Way) and way.gradient in ("none", "mean"):
            continue
        row = _begun("exact", shape, way, options)
        if isinstance(way, Way) and "missing" not in row:
            say("errors", shape, way.name)
            row |= guarded(partial(_errors, way, problem, truth))
        record.add(row)


def _errors(way: Way, problem: Problem, truth: Exact) -> Row:
    _clear(problem)
    found = way.call(problem)
    row: Row = {}
    if found.log_prob_T is not None:
        row["log_prob_error"] = float((found.log_prob_T.double() - truth.log_prob_T).abs().max())
    if found.entropy_T is not None:
        row["entropy_error"] = float((found.entropy_T.double() - truth.entropy_T).abs().max())
    expected = truth.of_both if way.gradient == "both" else truth.of_log_prob
    for name, leaf, grad in zip(("hidden", "weight"), problem[:2], expected, strict=True):
        row[f"{name}_error"] = _relative(leaf.grad, grad)
    return row


def _relative(x: Tensor, truth: Tensor) -> float:
    pairs = zip(x.split(8192), truth.split(8192), strict=True)
    squares = [((a.double() - b).square().sum(), b.square().sum()) for a, b in pairs]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


# Tables

COST = [
    "T : H : V",
    "who",
    "gradient of",
    "median ms",
    "min",
    "max",
    "calls",
    "by the products",
    "above, GiB",
    "remark",
]
EXACT = ["T : H : V", "who", "gradient of", "log-prob, nats", "entropy, nats", "hidden states", "weight", "remark"]


def _cost_line(row: Row, products: dict[str, float]) -> list[str]:
    names = [_shape(row), row["who"], row.get("gradient", "-")]
    if "missing" in row:
        return [*names, *["-"] * 6, f"missing: {row['missing']}"]
    times = [f"{x * 1e3:,.1f}" for x in (_median(row), min(row["times"]), max(row["times"]))]
    ratio = _median(row) / products.get(row["shape"], math.nan)
    above = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:,.2f}"
    return [*names, *times, str(len(row["times"])), f"{ratio:.2f}", above, row["remark"]]


def _exact_line(row: Row) -> list[str]:
    names = [_shape(row), row["who"], row.get("gradient", "-")]
    if "missing" in row:
        return [*names, *["-"] * 4, f"missing: {row['missing']}"]
    keys = ("log_prob_error", "entropy_error", "hidden_error", "weight_error")
    return [*names, *(f"{row[key]:.1e}" if key in row else "-" for key in keys), row.get("remark", "")]


def _shape(row: Row) -> str:
    return " : ".join(f"{int(each):,}" for each in row["shape"].split(":"))


def markdown(rows: list[Row]) -> str:
    """Both tables."""
    costs = [row for row in rows if row["part"] == "cost"]
    products = {row["shape"]: _median(row) for row in costs if row.get("gradient") == "none" and row.get("times")}
    cost = [_cost_line(row, products) for row in costs]
    errors = [_exact_line(row) for row in rows if row["part"] == "exact"]
    tables = [("Cost", COST, cost), ("Errors against float64", EXACT, errors)]
    return "\n\n".join(f"## {title}\n\n{reporting.table(names, lines)}" for title, names, lines in tables if lines)


# The program


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--anchors", type=Path, metavar="FOLDER", help="checkouts verl/, nemo-rl/, prime-rl/")
    parser.add_argument("--shapes", nargs="*", metavar="T:H:V", help=f"of the costs; on a GPU {' '.join(ON_GPU)}")
    parser.add_argument("--exact", nargs="*", metavar="T:H:V", help=f"of the errors; on a GPU {ON_GPU[0]}")
    parser.add_argument("--ways", nargs="+", metavar="WORD", help="those with such a word in their name")
    parser.add_argument("--without", nargs="+", metavar="WORD", default=[], help="not those")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed calls of each way at most")
    parser.add_argument("--least", type=int, default=5, help="timed calls of each way at least, while time is left")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timed calls of each way")
    parser.add_argument("--seconds", type=float, default=math.inf, help="in all: nothing begins afterwards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, after every row")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the tables, and measure nothing")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.shapes = (ON_GPU if on_gpu else ON_CPU) if options.shapes is None else options.shapes
    options.exact = (ON_GPU[:1] if on_gpu else ON_CPU) if options.exact is None else options.exact
    options.deadline = time.monotonic() + options.seconds
    return options


def is_chosen(name: str, options: argparse.Namespace) -> bool:
    """Whether a contender is measured. The matmuls always are, as the baseline, unless left out by name."""
    if any(word in name for word in options.without):
        return False
    return options.ways is None or name.startswith("four") or any(word in name for word in options.ways)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print; the exit code."""
    options = parsed(arguments)
    if options.show:
        records = [json.loads(file.read_text()) for file in options.show]
        print("\n".join(dict.fromkeys(line for record in records for line in record["header"].values())))
        print(markdown([row for record in records for row in record["rows"]]))
        return 0
    world = World.join(options.device, 1)
    header = reporting.header(world, options.seed)
    for path in (options.anchors, options.json):
        if path is not None:
            header["command"] = header["command"].replace(str(path), path.name)
    print(*header.values(), sep="\n", flush=True)
    found = [
        way
        for way in ways(options.anchors, world.device)
        if is_chosen(way.name if isinstance(way, Way) else way["who"], options)
    ]
    record = Record(header, options.json)
    for part, shapes in ((part_exact, options.exact), (part_cost, options.shapes)):
        for shape in shapes:
            part(shape, found, world, options, record)
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    print(markdown(record.rows), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
