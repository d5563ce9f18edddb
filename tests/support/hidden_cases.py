# SPDX-License-Identifier: Apache-2.0
"""Drawn cases for ``score_hidden``, and their float64 reference from ``naive_scoring``."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
from naive_scoring import naive_score_hidden
from torch import Tensor

from mis_ext.scoring import KeptColumns, hidden, score_hidden, score_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """Operands, arguments, and incoming gradients; ``naive`` has the same arguments for ``naive_scoring``."""

    hidden_NE: Tensor
    weight_VE: Tensor
    bias_V: Tensor | None
    token_T: Tensor
    keys: dict[str, Any]
    naive: dict[str, Any]
    grad_2T: Tensor

    def on(self, device: str) -> Case:
        """The case on another device, except the arguments for ``naive_scoring``."""
        keys = {name: _on(device, value) for name, value in self.keys.items()}
        return Case(*(_on(device, value) for value in self))._replace(keys=keys, naive=self.naive)


class Answer(NamedTuple):
    log_prob_T: Tensor
    entropy_T: Tensor | None
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None

    def on(self, device: str) -> Answer:
        """Only its tensors, on another device."""
        return Answer(*(None if x is None else x.detach().to(device) for x in self))


def _on(device: str, value: Any) -> Any:
    if isinstance(value, KeptColumns):
        return KeptColumns(*(_on(device, x) for x in value))
    return value.to(device) if isinstance(value, Tensor) else value


def drawn(seed: int, *, dtypes: tuple[torch.dtype, ...] = DTYPES, ranks: int = 1, most_rows: int = 40) -> Case:
    """A case of random sizes, rows, strides, magnitudes and settings."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_rows, size, width = random.randint(1, most_rows), random.randint(1, 120) * ranks, random.randint(1, 24)
    dtype = random.choice(dtypes)
    magnitude = 10.0 ** random.uniform(-1, 0.5)
    hidden_NE = (torch.randn(num_rows, width + 3, generator=generator) * magnitude)[:, :width].to(dtype)
    if random.random() < 0.7:
        hidden_NE = hidden_NE.contiguous()
    weight_VE = torch.randn(size, width, generator=generator).to(dtype)
    bias_V = torch.randn(size, generator=generator).to(dtype) if random.random() < 0.3 else None
    same: dict[str, Any] = {}
    if random.random() < 0.6:
        same["temperature"] = random.choice([0.3, 0.7, 1.3, 2.0])
    if random.random() < 0.3:
        same["logit_scale"] = random.choice([0.25, 1.5])
    if random.random() < 0.3:
        same["soft_cap"] = random.choice([3.0, 30.0])
    if random.random() < 0.3:
        same["vocab_size"] = random.randint(1, size)
    keys, naive = dict(same), dict(same)
    keys["entropy"] = random.choice(["gradient", "gradient", "value", "none"])
    row_T = torch.arange(num_rows)
    if random.random() < 0.7:
        row_T = keys["row_T"] = torch.randperm(num_rows, generator=generator)[: random.randint(1, num_rows)]
        naive["rows"] = row_T.tolist()
    real = same.get("vocab_size", size)
    token_T = torch.randint(real, row_T.shape, generator=generator)
    if random.random() < 0.4:
        kept_TV = torch.rand(len(row_T), real, generator=generator) < random.choice([0.02, 0.5])
        is_recorded_T = torch.rand(len(row_T), generator=generator) < 0.8
        token_N, id_N = kept_TV.nonzero().unbind(-1)
        order_N = torch.cat([torch.randperm(len(id_N), generator=generator), torch.arange(len(id_N) // 3)])
        keys["kept"] = KeptColumns(id_N[order_N], token_N[order_N], is_recorded_T)
        naive["kept"] = [
            ids_V.nonzero().flatten().tolist() if is_recorded else None
            for ids_V, is_recorded in zip(kept_TV, is_recorded_T, strict=True)
        ]
    grad_2T = torch.randn(2, len(row_T), generator=generator)
    return Case(hidden_NE, weight_VE, bias_V, token_T, keys, naive, grad_2T)


def answered(case: Case, **more: Any) -> Answer:
    """The tested function."""
    leaves = [x.detach().requires_grad_() for x in (case.hidden_NE, case.weight_VE, case.bias_V) if x is not None]
    bias_V = leaves[2] if len(leaves) > 2 else None
    scores = score_hidden(leaves[0], leaves[1], case.token_T, bias=bias_V, **case.keys | more)
    outputs = [x for x in scores if x is not None and x.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [g.to(outputs[0].dtype) for g in case.grad_2T[: len(outputs)]])
    return Answer(*scores, *grads, *[None] * (3 - len(grads)))


def judged(case: Case) -> Answer:
    """``naive_scoring`` in float64."""
    leaves = [
        x.detach().double().requires_grad_() for x in (case.hidden_NE, case.weight_VE, case.bias_V) if x is not None
    ]
    bias_V = leaves[2] if len(leaves) > 2 else None
    log_prob_T, entropy_T = naive_score_hidden(*leaves[:2], case.token_T.tolist(), bias=bias_V, **case.naive)
    total = (log_prob_T * case.grad_2T[0]).sum()
    if case.keys["entropy"] == "gradient":
        total = total + (entropy_T * case.grad_2T[1]).sum()
    grads = torch.autograd.grad(total, leaves)
    has_entropy = case.keys["entropy"] != "none"
    return Answer(log_prob_T, entropy_T if has_entropy else None, *grads, *[None] * (3 - len(grads)))


def assert_near(case: Case, found: Answer, wanted: Answer, *, passes: int = 1, ranks: int = 1) -> None:
    """Within roundings of float32, and for gradients of the dtype of the operands.

    A logit is a sum of ``E`` products, each with an error of half a unit. The gradient of a logit has the error of its
    exponent, and is rounded to the dtype of the operands, twice with a cap. Both are multiplied by the other operand,
    summed, and rounded: for the weight in each of ``passes``, for hidden states on each of ``ranks``.
    """
    unit, eps = 2.0**-24, torch.finfo(case.hidden_NE.dtype).eps
    keys = case.keys
    scale = keys.get("logit_scale", 1.0) / keys.get("temperature", 1.0)
    rows_TE = case.hidden_NE.double()
    if "row_T" in keys:
        rows_TE = rows_TE[keys["row_T"]]
    weight_VE = case.weight_VE.double()
    bias = 0.0 if case.bias_V is None else float(case.bias_V.double().abs().max())
    largest = scale * (float((rows_TE.abs() @ weight_VE.abs().t()).max()) + bias) + 1.0
    near = 8 * unit * largest
    for name in ("log_prob_T", "entropy_T"):
        value, exact = getattr(found, name), getattr(wanted, name)
        assert (value is None) == (exact is None)
        if value is not None:
            torch.testing.assert_close(value.double(), exact, rtol=4 * unit, atol=near)
    slope_TV = slopes_of(case, rows_TE @ weight_VE.t()).abs()
    off_TV = eps * slope_TV + 2 * near * scale * case.grad_2T.double().abs().sum(0).unsqueeze(-1)
    if "vocab_size" in keys:
        off_TV[:, keys["vocab_size"] :] = 0.0
    tiny = torch.finfo(case.hidden_NE.dtype).tiny
    near_TE = off_TV @ weight_VE.abs() + ranks * eps * (slope_TV @ weight_VE.abs())
    wanted_NE, found_NE = wanted.hidden_grad, found.hidden_grad.double()
    row_T = keys.get("row_T", torch.arange(len(rows_TE)))
    assert ((found_NE - wanted_NE)[row_T].abs() <= near_TE + tiny).all()
    assert torch.equal(found_NE.index_fill(0, row_T, 0.0), torch.zeros_like(found_NE))
    near_VE = off_TV.t() @ rows_TE.abs() + passes * eps * (slope_TV.t() @ rows_TE.abs())
    assert ((found.weight_grad.double() - wanted.weight_grad).abs() <= near_VE + tiny).all()
    assert (found.bias_grad is None) == (wanted.bias_grad is None)
    if found.bias_grad is not None:
        near_V = off_TV.sum(0) + eps * slope_TV.sum(0)
        assert ((found.bias_grad.double() - wanted.bias_grad).abs() <= near_V + tiny).all()


def slopes_of(case: Case, products_TV: Tensor) -> Tensor:
    """``[T, V]``, float64: the gradient of ``h w + b``, by :func:`score_tokens` over all logits."""
    leaf = products_TV.detach().requires_grad_()
    scores = score_tokens(
        logits_of(case, leaf),
        case.token_T,
        **{name: case.keys[name] for name in ("temperature", "entropy", "kept", "vocab_size") if name in case.keys},
    )
    outputs = [x for x in scores if x is not None and x.requires_grad]
    return torch.autograd.grad(outputs, leaf, list(case.grad_2T[: len(outputs)].double()))[0]


def logits_of(case: Case, products_TV: Tensor) -> Tensor:
    """The transformation of ``h w`` by a model's own head."""
    logits = products_TV if case.bias_V is None else products_TV + case.bias_V.detach().to(products_TV.dtype)
    logits = logits * case.keys.get("logit_scale", 1.0)
    cap = case.keys.get("soft_cap")
    return logits if cap is None else cap * (logits / cap).tanh()


def with_tiles(monkeypatch: Any, *, tile: int, slopes: int, states: int, device: str = "cpu") -> None:
    """Tiles as small as those of a large vocabulary."""
    for name, size in (("TILE", tile), ("SLOPES", slopes), ("STATES", states)):
        monkeypatch.setitem(getattr(hidden, name), device, size)
