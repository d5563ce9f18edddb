# SPDX-License-Identifier: Apache-2.0
"""Drawn cases for ``mis_ext.scoring``, and their float64 reference."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.scoring import KeptColumns, score_tokens


class Case(NamedTuple):
    """Logits, arguments, and incoming gradients."""

    logits: Tensor
    token_T: Tensor
    keys: dict[str, Any]
    grad_T: Tensor
    entropy_grad_T: Tensor | None = None
    kept_TV: Tensor | None = None

    def to(self, device: str) -> Case:
        def moved(x: Any) -> Any:
            if isinstance(x, KeptColumns):
                return KeptColumns(*map(moved, x))
            return x.to(device) if isinstance(x, Tensor) else x

        on_device = Case(*map(moved, self))
        return on_device._replace(keys={name: moved(value) for name, value in self.keys.items()})


class Answer(NamedTuple):
    log_prob_T: Tensor
    entropy_T: Tensor | None
    gradient: Tensor


def drawn(
    seed: int, *, most_columns: int = 700, parts: int = 1, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> Case:
    """A case of random sizes, rows, strides, magnitudes and settings; the columns can be cut into ``parts``."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_rows, num_columns = random.randint(1, 24), random.choice([1, 2, 31, 64, random.randint(3, most_columns)])
    num_columns *= parts
    magnitude = 10.0 ** random.uniform(-1, 1.5)
    around = random.choice([0.0, 1e2, -1e3])
    wide = torch.randn(num_rows, num_columns + 5, generator=generator) * magnitude + around
    wide = wide.to(random.choice(dtypes))
    logits = wide[:, 2 : num_columns + 2] if random.random() < 0.3 else wide[:, 2 : num_columns + 2].contiguous()
    keys: dict[str, Any] = {"entropy": random.choice(["gradient", "gradient", "value", "none"])}
    num_tokens = num_rows
    if random.random() < 0.7:
        num_tokens = random.randint(0, num_rows)
        keys["row_T"] = torch.randperm(num_rows, generator=generator)[:num_tokens]
    if random.random() < 0.6:
        keys["temperature"] = random.choice([0.3, 0.7, 1.3, 2.0])
    size = num_columns
    if random.random() < 0.3:
        size = keys["vocab_size"] = random.randint(1, num_columns)
    token_T = torch.randint(size, (num_tokens,), generator=generator)
    kept_TV = None
    if random.random() < 0.4:
        kept_TV = torch.rand(num_tokens, size, generator=generator) < random.choice([0.02, 0.5])
        is_recorded_T = torch.rand(num_tokens, generator=generator) < 0.8
        token_N, id_N = kept_TV.nonzero().unbind(-1)
        # In any order, and some of them twice.
        order_N = torch.cat([torch.randperm(len(id_N), generator=generator), torch.arange(len(id_N) // 3)])
        keys["kept"] = KeptColumns(id_N[order_N], token_N[order_N], is_recorded_T)
        kept_TV[~is_recorded_T] = True
    grad_T, entropy_grad_T = torch.randn(2, num_tokens, generator=generator)
    return Case(
        logits.unsqueeze(0) if random.random() < 0.5 else logits,
        token_T,
        keys,
        grad_T,
        entropy_grad_T if keys["entropy"] == "gradient" else None,
        kept_TV,
    )


def answered(case: Case, *, inplace: bool = False, **more: Any) -> Answer:
    """The tested function."""
    leaf = case.logits.clone(memory_format=torch.preserve_format).requires_grad_()
    if not case.logits.is_contiguous():
        # A clone of a slice is dense: with the strides of the original again.
        leaf = torch.empty_strided(leaf.shape, case.logits.stride(), dtype=leaf.dtype, device=leaf.device)
        leaf = leaf.copy_(case.logits).requires_grad_()
    scores = score_tokens(leaf * 1 if inplace else leaf, case.token_T, inplace=inplace, **case.keys | more)
    outputs, grads = [scores.log_prob_T], [case.grad_T.to(scores.log_prob_T.dtype)]
    if case.entropy_grad_T is not None:
        outputs, grads = [*outputs, scores.entropy_T], [*grads, case.entropy_grad_T.to(scores.log_prob_T.dtype)]
    (gradient,) = torch.autograd.grad(outputs, leaf, grads)
    return Answer(*scores, gradient)


def judged(case: Case) -> Answer:
    """The same in float64, with the textbook softmax."""
    leaf = case.logits.double().detach().requires_grad_()
    rows_NV = leaf.reshape(-1, leaf.shape[-1])[:, : case.keys.get("vocab_size")] / case.keys.get("temperature", 1.0)
    row_T = case.keys.get("row_T")
    rows_TV = rows_NV if row_T is None else rows_NV[row_T]
    log_p_TV = rows_TV.log_softmax(-1)
    entropy_T = -torch.where(log_p_TV == -torch.inf, 0.0, log_p_TV.exp() * log_p_TV.clamp_min(-1e300)).sum(-1)
    if case.kept_TV is not None:
        kept_TV = case.kept_TV.clone().scatter_(-1, case.token_T.unsqueeze(-1), True)
        log_p_TV = rows_TV.masked_fill(~kept_TV, -torch.inf).log_softmax(-1)
    log_prob_T = log_p_TV.gather(-1, case.token_T.unsqueeze(-1)).squeeze(-1)
    total = (log_prob_T * case.grad_T).sum()
    if case.entropy_grad_T is not None:
        total = total + (entropy_T * case.entropy_grad_T).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    has_entropy = case.keys.get("entropy", "gradient") != "none"
    return Answer(log_prob_T.detach(), entropy_T.detach() if has_entropy else None, gradient)


def assert_near(case: Case, found: Answer, wanted: Answer) -> None:
    """Within a few roundings of float32, and for the gradient one to the dtype of the logits.

    A difference of two logits has an error of half a unit in its last place, and so has its product with the inverse
    temperature. The error grows with the spread of the logits.
    """
    if len(case.token_T) == 0:
        assert found.log_prob_T.shape == (0,)
        assert not found.gradient.any()
        return
    unit = 2.0**-24
    logits = case.logits.double()
    temperature = case.keys.get("temperature", 1.0)
    spread = float((logits[logits > -torch.inf].max() - logits[logits > -torch.inf].min()) / temperature) + 1.0
    near = 8 * unit * spread
    torch.testing.assert_close(found.log_prob_T.double(), wanted.log_prob_T, rtol=4 * unit, atol=near)
    if wanted.entropy_T is None:
        assert found.entropy_T is None
    else:
        torch.testing.assert_close(found.entropy_T.double(), wanted.entropy_T, rtol=4 * unit, atol=near)
    # Each slope has an error of as many units of its own factor as the size of the exponent; for an entropy, twice
    # that.
    largest = float(case.grad_T.abs().max()) + float(
        0 if case.entropy_grad_T is None else case.entropy_grad_T.abs().max()
    )
    rounding = torch.finfo(case.logits.dtype).eps
    torch.testing.assert_close(
        found.gradient.double(),
        wanted.gradient,
        rtol=rounding,
        atol=near * largest / temperature * 2 + 2 * torch.finfo(case.logits.dtype).tiny,
    )
