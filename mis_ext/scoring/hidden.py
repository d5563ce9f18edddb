# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of tokens from hidden states and the weight of the head, without all logits in memory.

:mod:`mis_ext.scoring.scores` explains how three sums over a row of logits give log-prob, entropy and their gradient. A
part of a row adds its own three sums, like the part of a tensor-parallel rank. So one matmul computes a tile of logits
(some tokens by some columns), which is read once, and the next tile reuses its memory. The backward pass computes each
tile again, replaces it by its gradient, and multiplies this by the weight and by the hidden states. The head needs four
matmuls in total; a loss from logits needs three. With few tokens, tiles are kept for the backward pass.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mis_ext.correction.collectives import Group, gather_rows, group_size, scatter_sum, sum_of_states
from mis_ext.scoring.chunked import accumulated, slices
from mis_ext.scoring.passes import (
    Backend,
    Coefficients,
    KeptColumns,
    RowSums,
    SortedColumns,
    Targets,
    check_targets,
    finish,
    merged,
    rows_named,
)
from mis_ext.scoring.scores import EntropyUse, Scores, check_part, choose_backend, gathered, work_before_gather
from mis_ext.validation import check_choice, check_number, check_tensors


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    token_T: Tensor,
    *,
    row_T: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyUse = "gradient",
    kept: KeptColumns | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    tp_group: Group | None = None,
    tp_rank: int = 0,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
) -> Scores:
    """Score tokens from the logits ``hidden @ weight.T``, one tile at a time.

    Logits and sums over tiles are float32 for operands of any dtype (float64 for float64). The gradient of a logit is
    rounded to the dtype of the operands before it is multiplied. If both incoming gradients of a token are 0, its
    hidden state does not affect any gradient. Tensor-parallel ranks exchange a few numbers per token in the forward
    pass, and the gradient of the hidden states of the tokens in the backward pass, each once.

    If a tile of all tokens is small (about 2,200 tokens with 151,936 columns, 3,500 with 18,992), tiles are kept for
    the backward pass: up to 512 MiB per call on a GPU, or 1 GiB in float64, also if a checkpoint recomputes the call.

    Args:
        hidden: ``[..., E]``, the input of the head.
        weight: ``[V, E]``, on each tensor-parallel rank its equal part of the vocabulary, in rank order.
        token_T: ``[T]``, ids in the whole vocabulary; an id outside has log-prob -inf.
        row_T: ``[T]``, the index of the hidden state that scores each token, over all leading dimensions. With a
            duplicate index the backward pass fails. None: all, in order. Other hidden states are not read, and their
            gradient is 0.
        temperature: The divisor of the logits.
        entropy: ``gradient``: with gradient. ``value``: without gradient. ``none``: not computed.
        kept: The columns from which each token was sampled (top-p). The log-prob of a token is normalized over these
            columns, the entropy over all columns.
        vocab_size: Columns starting at this index are padding, which is not computed. None: there is no padding.
        bias: ``[V]``, of the head.
        logit_scale: The factor of the logits with their bias (Cohere, Granite).
        soft_cap: The logits ``x`` become ``soft_cap tanh(x / soft_cap)`` (Gemma 2). None: no cap.
        tp_group: The tensor-parallel ranks; None for one. Each has the same hidden states, whose gradient is summed.
        tp_rank: This rank among them.
        sequence_parallel: Each rank has its part of the hidden states, in rank order. They are gathered, in both
            passes, and each rank gets the gradient of its part. ``row_T`` counts over all parts.
        gradient_accumulation_fusion: Add the gradient of the weight to ``weight.main_grad``, like Megatron-Core's flag
            of this name.

    Raises:
        ValueError: A setting is out of range, or shapes do not fit.
        TypeError: Hidden states and weight are not floats of the same dtype (autocast casts neither), or ``token_T`` or
            ``row_T`` are not integers.
        RuntimeError: Another tensor-parallel rank rejected an argument or ran out of memory. It can report this only in
            a message of the same size. So ``token_T``, ``entropy``, whether ``kept`` is given, and with
            ``sequence_parallel`` the shape of ``hidden`` must be equal on all ranks, as in any collective.

    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009.
    """
    states = hidden if sequence_parallel else None
    with work_before_gather(entropy, kept is not None, token_T, tp_group, beside=hidden, states=states):
        check_tensors({"hidden": hidden, "weight": weight, "token_T": token_T})
        if hidden.ndim == 0:
            raise ValueError("hidden must be [..., E], got a tensor without dimensions")
        hidden_NE = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
        _check_settings(entropy, temperature=temperature, logit_scale=logit_scale, soft_cap=soft_cap)
        num_states = len(hidden_NE) * (group_size(tp_group) if sequence_parallel else 1)
        _check_head(hidden_NE, weight, bias)
        check_targets(token_T, row_T, kept, num_rows=num_states, rows="hidden states", device=hidden.device)
        if sequence_parallel and tp_group is None:
            raise ValueError(
                "sequence_parallel must be False if tp_group is None, because nothing is gathered, got True"
            )
        check_part(len(weight), "rows of weight", vocab_size=vocab_size, tp_group=tp_group, tp_rank=tp_rank)
        parameter = weight if gradient_accumulation_fusion and weight.requires_grad else None
        _check_main_grad(parameter)
        backend = choose_backend(hidden_NE)
        targets = Targets.of_rank(token_T, row_T, width=len(weight), tp_rank=tp_rank, vocab_size=vocab_size)
    use = _Use(
        # A scale without a cap is part of the temperature.
        temperature=float(temperature) / (logit_scale if soft_cap is None else 1.0),
        logit_scale=float(logit_scale),
        soft_cap=soft_cap,
        entropy=entropy,
        tp_group=tp_group,
        tp_rank=tp_rank,
        sequence_parallel=sequence_parallel,
        parameter=parameter,
        backend=backend,
    )
    with rows_named(num_states, "hidden states"):
        log_prob_T, entropy_T = _Scored.apply(hidden_NE, weight, bias, targets, kept, use)  # type: ignore[no-untyped-call]
    return Scores(log_prob_T, entropy_T)


class _Use(NamedTuple):
    temperature: float
    logit_scale: float
    soft_cap: float | None
    entropy: EntropyUse
    tp_group: Group | None
    tp_rank: int
    sequence_parallel: bool
    parameter: Tensor | None
    backend: Backend


def _check_settings(entropy: str, *, temperature: float, logit_scale: float, soft_cap: float | None) -> None:
    check_choice("entropy", entropy, get_args(EntropyUse))
    for name, value in (("temperature", temperature), ("logit_scale", logit_scale), ("soft_cap", soft_cap)):
        if value is not None:
            check_number(name, value, low=0.0, high=math.inf, open_low=True, open_high=True)


def _check_head(hidden_NE: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not hidden_NE.is_floating_point():
        raise TypeError(f"hidden must be floating-point, got {hidden_NE.dtype}")
    if bias is not None:
        check_tensors({"bias": bias})
    for name, values in (("weight", weight), ("bias", bias)):
        if values is not None and values.dtype != hidden_NE.dtype:
            hint = ""
            if torch.is_autocast_enabled(hidden_NE.device.type):
                hint = f"; autocast casts neither: pass {name}.to(hidden.dtype)"
            raise TypeError(
                f"{name} is {values.dtype}, but hidden is {hidden_NE.dtype}: both must have the same dtype{hint}"
            )
        if values is not None and values.device != hidden_NE.device:
            raise ValueError(f"{name} is on {values.device}, but hidden is on {hidden_NE.device}")
    if weight.ndim != 2 or weight.shape[1] != hidden_NE.shape[1]:
        raise ValueError(f"weight must be [V, {hidden_NE.shape[1]}], with E of hidden, got shape {list(weight.shape)}")
    if 0 in weight.shape:
        raise ValueError(f"weight has shape {list(weight.shape)}: neither V nor E may be 0")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias has shape {list(bias.shape)}, and weight has {list(weight.shape)}; bias must be [V]")


def _check_main_grad(parameter: Tensor | None) -> None:
    if parameter is None:
        return
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is None or main_grad.shape != parameter.shape:
        found = "None" if main_grad is None else list(main_grad.shape)
        raise ValueError(
            f"gradient_accumulation_fusion: weight.main_grad must have the shape {list(parameter.shape)} of weight, "
            f"got {found}"
        )
    if not main_grad.is_floating_point():
        raise TypeError(f"gradient_accumulation_fusion: weight.main_grad must be floating-point, got {main_grad.dtype}")


class _Head(NamedTuple):
    """Parameters of the logits ``cap(scale (h w + b))``; without a cap, the scale includes the temperature."""

    weight_VE: Tensor
    bias_V: Tensor | None
    scale: float
    cap: float | None

    def logits(self, rows_NE: Tensor, columns: slice, out_NV: Tensor) -> None:
        """Write a tile of logits."""
        multiply(rows_NE, self.weight_VE[columns].t(), out_NV)
        if self.bias_V is not None:
            out_NV += self.bias_V[columns]
        if self.cap is not None:
            out_NV.mul_(self.scale / self.cap).tanh_().mul_(self.cap)

    def before_cap(self, slopes_NV: Tensor, logits_NV: Tensor) -> None:
        """Turn the gradient of capped logits into that of ``h w + b``."""
        if self.cap is not None:
            logits_NV.div_(self.cap).square_().neg_().add_(1.0).mul_(self.scale)
            slopes_NV.mul_(logits_NV)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        targets: Targets,
        kept: KeptColumns | None,
        use: _Use,
    ) -> tuple[Tensor, Tensor | None]:
        whole_NE = _whole(hidden_NE, use)
        no_cast = torch.autocast(hidden_NE.device.type, enabled=False)
        meeting = work_before_gather(use.entropy, kept is not None, targets.token_T, use.tp_group, beside=whole_NE)
        with meeting, no_cast:
            ctx.kept = None if kept is None else kept.sorted()
            head = _Head(weight_VE, bias_V, use.logit_scale, use.soft_cap)
            parts, ctx.held = _row_sums(head, whole_NE, targets, ctx.kept, use)
            sums = None if use.tp_group is None else merged(parts, temperature=use.temperature)
        parts = parts if sums is None else gathered(sums, use.tp_group)
        dtype = torch.promote_types(hidden_NE.dtype, torch.float32)
        log_prob_T, found = finish(parts, temperature=use.temperature, dtype=dtype)
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, targets.token_T, targets.row_T, *found[:5])
        ctx.use, ctx.columns = use, (targets.first, targets.num_columns)
        ctx.set_materialize_grads(False)
        if use.entropy == "value":
            ctx.mark_non_differentiable(found.entropy_T)
        return log_prob_T, found.entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None, None, None)
        if grad_T is None and entropy_grad_T is None:
            return None, None, None, *nothing
        use: _Use = ctx.use
        hidden_NE, weight_VE, bias_V, token_T, row_T, *numbers = ctx.saved_tensors
        slopes = Coefficients(*numbers)._replace(log_prob_grad_T=grad_T, entropy_grad_T=entropy_grad_T)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        whole_NE = _whole(hidden_NE, use)
        targets = Targets(token_T, row_T, *ctx.columns)
        # Allocate this first: a rank that fails later needs it to report the error.
        hidden_grad = whole_NE.new_empty(len(token_T), whole_NE.shape[1]) if wants_hidden else None
        try:
            gradients = _Gradients(
                hidden_TE=hidden_grad,
                weight_VE=_weight_gradient(weight_VE, targets.num_columns, use.parameter) if wants_weight else None,
                bias_V=torch.zeros_like(bias_V, dtype=accumulated(weight_VE)) if wants_bias else None,
                adds_to_weight=use.parameter is not None,
            )
            if row_T is not None:
                targets.token_of_rows(len(whole_NE))
            with torch.autocast(hidden_NE.device.type, enabled=False):
                head = _Head(weight_VE, bias_V, use.logit_scale, use.soft_cap)
                # The kept tiles are overwritten: a second backward pass computes all tiles again.
                held, ctx.held = ctx.held, None
                _add_gradients(head, whole_NE, targets, ctx.kept, slopes, use, held, gradients)
        except Exception:
            # The other ranks must neither wait nor continue with a partial gradient.
            if hidden_grad is not None and use.tp_group is not None:
                _sum_of_ranks(hidden_grad.fill_(torch.nan), row_T, len(whole_NE), use)
            raise
        if hidden_grad is not None:
            hidden_grad = _sum_of_ranks(hidden_grad, row_T, len(whole_NE), use)
        weight_grad = gradients.weight_VE if use.parameter is None else _dummy(use.parameter, weight_VE)
        bias_grad = None if gradients.bias_V is None else gradients.bias_V.to(weight_VE.dtype)
        return hidden_grad, weight_grad, bias_grad, *nothing


# --- ranks


def _whole(hidden_NE: Tensor, use: _Use) -> Tensor:
    """The hidden states of all ranks, if each has a part of them."""
    return gather_rows(hidden_NE, use.tp_group).flatten(0, 1) if use.sequence_parallel else hidden_NE


def _sum_of_ranks(grad_TE: Tensor, row_T: Tensor | None, num_states: int, use: _Use) -> Tensor:
    """``[N, E]``: the gradient of this rank's hidden states, from the parts of all ranks for the tokens."""
    if not use.sequence_parallel:
        grad_TE = sum_of_states(grad_TE, use.tp_group)
    if row_T is not None:
        grad_TE = grad_TE.new_zeros(num_states, grad_TE.shape[1]).index_copy_(0, row_T.long(), grad_TE)
    return scatter_sum(grad_TE, use.tp_group, rank=use.tp_rank) if use.sequence_parallel else grad_TE


# --- both passes


class _Gradients(NamedTuple):
    """Accumulators of gradients; None if a gradient is not needed."""

    hidden_TE: Tensor | None
    weight_VE: Tensor | None
    bias_V: Tensor | None
    adds_to_weight: bool


def _row_sums(
    head: _Head, hidden_NE: Tensor, targets: Targets, kept: SortedColumns | None, use: _Use
) -> tuple[RowSums, Tensor | None]:
    """``[W, T]`` each, over the ``W`` tiles of this rank's columns, and the last tiles, if some are held."""
    tiles = tiles_of(len(targets.token_T), targets.num_columns, hidden_NE)
    num_held = 0 if head.cap is not None else tiles.held
    places = hidden_NE.new_empty(max(num_held, 1), tiles.tokens * tiles.columns, dtype=accumulated(hidden_NE))
    scale, with_product = 1.0 / use.temperature, use.entropy != "none"
    num_tokens, parts = len(targets.token_T), list(slices(targets.num_columns, tiles.columns))
    # Rows of an even length have the same alignment, so kernels are compiled once for them.
    sums = hidden_NE.new_empty(6, len(parts), num_tokens + num_tokens % 2, dtype=torch.float64)[..., :num_tokens]
    for part in slices(num_tokens, tiles.tokens):
        rows_NE = hidden_NE[part] if targets.row_T is None else hidden_NE.index_select(0, targets.row_T[part])
        for number, columns in enumerate(parts):
            logits_NV = view(places[number % len(places)], len(rows_NE), length(columns))
            head.logits(rows_NE, columns, logits_NV)
            of_tile, out = _tile(targets, kept, part, columns), sums[:, number, part]
            use.backend.row_sums(logits_NV, of_tile, out, scale=scale, with_product=with_product)
    return RowSums.of(sums, with_product=with_product, is_kept=kept is not None), places if num_held else None


def _add_gradients(
    head: _Head,
    hidden_NE: Tensor,
    targets: Targets,
    kept: SortedColumns | None,
    slopes: Coefficients,
    use: _Use,
    held: Tensor | None,
    out: _Gradients,
) -> None:
    """Add ``Z W`` to the gradient of the states and ``Z^T h`` to that of the weight; ``Z``: gradient of ``h W^T``."""
    tiles = tiles_of(len(targets.token_T), targets.num_columns, hidden_NE)
    weight_VE, dtype, scale = head.weight_VE, accumulated(hidden_NE), 1.0 / use.temperature
    places = hidden_NE.new_empty(1, tiles.rows * tiles.columns, dtype=dtype) if held is None else held
    slope = hidden_NE.new_empty(tiles.tokens * tiles.columns)
    parts = list(slices(targets.num_columns, tiles.columns))
    # Held tiles first: then the other tiles can use their memory.
    num_made = len(parts) - tiles.held
    order = [*range(num_made, len(parts)), *range(num_made)]
    for part in slices(len(targets.token_T), tiles.tokens):
        of_part = slopes.of_tokens(part)
        rows_TE = hidden_NE[part] if targets.row_T is None else hidden_NE.index_select(0, targets.row_T[part])
        # A product with a slope of 0 would still pass on a NaN.
        rows_TE = torch.where(of_part.is_wanted().unsqueeze(-1), rows_TE, 0.0)
        of_rows = [(rows, of_part.of_tokens(rows)) for rows in slices(len(rows_TE), tiles.rows)]
        own_TE = total_TE = None if out.hidden_TE is None else out.hidden_TE[part]
        if own_TE is not None and targets.num_columns > tiles.columns and own_TE.dtype != dtype:
            total_TE = torch.empty_like(own_TE, dtype=dtype)
        for number in order:
            columns = parts[number]
            slopes_TV = view(slope, len(rows_TE), length(columns))
            for rows, coefficients in of_rows:
                logits_NV = view(places[number % len(places)], length(rows), length(columns))
                if held is None or number < num_made:
                    head.logits(rows_TE[rows], columns, logits_NV)
                tokens = slice(part.start + rows.start, part.start + rows.stop)
                of_tile, slopes_NV = _tile(targets, kept, tokens, columns), slopes_TV[rows]
                use.backend.gradient(logits_NV, of_tile, coefficients, slopes_NV, scale=scale)
                head.before_cap(slopes_NV, logits_NV)
            if total_TE is not None:
                multiply(slopes_TV, weight_VE[columns], total_TE, adds=number != order[0])
            if out.weight_VE is not None:
                multiply(slopes_TV.t(), rows_TE, out.weight_VE[columns], adds=out.adds_to_weight or part.start > 0)
            if out.bias_V is not None:
                out.bias_V[columns] += slopes_TV.sum(0, dtype=dtype)
        if own_TE is not None and total_TE is not None and total_TE is not own_TE:
            own_TE.copy_(total_TE)


def _weight_gradient(weight_VE: Tensor, num_columns: int, parameter: Tensor | None) -> Tensor:
    if parameter is None:
        grad_VE = torch.empty_like(weight_VE, memory_format=torch.contiguous_format)
        grad_VE[num_columns:] = 0.0
        return grad_VE
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main_grad


def _dummy(parameter: Tensor, weight_VE: Tensor) -> Tensor | None:
    """Placeholder for autograd if the gradient is already in ``main_grad``.

    Megatron-Core's hooks run when a gradient arrives, and drop it if ``grad_added_to_main_grad`` is set. If the weight
    is also an embedding, they add the gradient.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
    return make(weight_VE, requires_grad=False)


def _tile(targets: Targets, kept: SortedColumns | None, tokens: slice, columns: slice) -> Targets:
    """The targets of a tile, which a backend treats like the logits of one rank."""
    first, num_columns = targets.first + columns.start, length(columns)
    bits_TC = None if kept is None else kept.bits(first=first, num_columns=num_columns, tokens=tokens)
    return Targets(targets.token_T[tokens], None, first, num_columns, bits_TC)


TILE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits per tile of the backward pass, in float32: 256 MiB on a GPU."""
SLOPES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Gradients of logits per tile, in the dtype of the weight: 256 MiB in bfloat16. The forward pass has no gradients, so
it has room for the same number of logits, 512 MiB.
"""
STATES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Elements of the gradient of hidden states that are summed at a time, in float32: 256 MiB."""
TOKENS, COLUMNS = 1 << 14, 1 << 15
"""Largest sizes of a tile. Larger tiles do not make a matmul faster."""


class Tiles(NamedTuple):
    """Sizes of a tile: tokens and columns of a pass, and rows of the backward pass.

    ``held``: the number of tiles that are kept for the backward pass. Tiles are kept if each has all tokens in both
    passes and the forward pass has room for them. A large call would gain little.
    """

    tokens: int
    columns: int
    rows: int
    held: int


def tiles_of(num_tokens: int, num_columns: int, hidden_NE: Tensor) -> Tiles:
    """Equal tiles within the limits of the device of the hidden states."""
    device = hidden_NE.device.type
    tile, slopes, states = (sizes.get(device, sizes["cuda"]) for sizes in (TILE, SLOPES, STATES))
    tokens = _even(num_tokens, min(states // max(hidden_NE.shape[1], 1), TOKENS))
    columns = _even(num_columns, min(slopes // tokens, COLUMNS))
    rows = _even(tokens, tile // columns)
    is_whole = rows == tokens == max(num_tokens, 1)
    held = min(slopes // (tokens * columns), -(-num_columns // columns)) if is_whole else 0
    return Tiles(tokens, columns, rows, held)


def _even(number: int, most: int) -> int:
    """The size of equal parts, at most ``most``; if possible a multiple of 128 for several parts."""
    if number <= most:
        return max(number, 1)
    most = max(most, 1)
    size = -(-number // -(-number // most))
    return min(-(-size // 128) * 128, most)


def length(part: slice) -> int:
    """Size of a part."""
    return int(part.stop - part.start)


def view(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """``[rows, columns]``, a view of the beginning of a flat buffer."""
    return buffer[: rows * columns].view(rows, columns)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write ``a @ b``, or add it, with sums in float32 and one rounding to the dtype of ``out``."""
    if a.dtype == out.dtype and (a.is_cuda or a.dtype not in _SHORT):
        torch.addmm(out, a, b, beta=1.0 if adds else 0.0, out=out)
        return
    widens = widening(a.device, a.dtype) if a.is_cuda and out.dtype == torch.float32 else "nothing"
    if adds and widens == "mm and addmm":
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    elif not adds and widens != "nothing":
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        long = accumulated(a)
        product = a.to(long) @ b.to(long) if widens == "nothing" else torch.mm(a, b, out_dtype=torch.float32)
        out.add_(product) if adds else out.copy_(product)


_SHORT = (torch.bfloat16, torch.float16)


@functools.cache
def widening(device: torch.device, dtype: torch.dtype) -> Literal["mm and addmm", "mm", "nothing"]:
    """Return the matmuls of 16-bit floats that this torch writes in float32, available since 2.8."""
    a, out = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return "nothing"
    try:
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return "mm"
    return "mm and addmm"
