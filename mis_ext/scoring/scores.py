# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of tokens from their logits: two passes over the logits, and no copy of them.

With logits ``z`` divided by the temperature, a token's log-prob is ``z_t - log sum exp z`` and the entropy
``H = log sum exp z - sum p z``. Three sums over a row give both, and the gradient of a loss with ``g = dL/dlogp`` and
``h = dL/dH``: ``(g (1[v = t] - p_v) - h p_v (log p_v + H)) / temperature``. So the forward pass reads the logits once
and keeps a few numbers per token; the backward pass reads them once more and writes the gradient. PyTorch operations
implement it (``_logit_gradient`` of ``chunked.py``), and on a GPU, if Triton can be imported, kernels
(``gradient_kernel`` of ``triton_backend.py``). ``_sums`` of ``loss/policy.py`` computes ``g`` and ``h`` of the full
policy loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mis_ext.correction.collectives import Group, gather_rows, group_size
from mis_ext.scoring import chunked
from mis_ext.scoring.backend import wants_triton
from mis_ext.scoring.passes import (
    Backend,
    Coefficients,
    KeptColumns,
    RowSums,
    Targets,
    check_targets,
    finish,
    rows_named,
)
from mis_ext.validation import check_choice, check_integer, check_number, check_tensors

EntropyUse = Literal["gradient", "value", "none"]


class Scores(NamedTuple):
    """``[T]``, nats: log-probs with gradient, and entropy; None if it is not requested."""

    log_prob_T: Tensor
    entropy_T: Tensor | None


def score_tokens(
    logits: Tensor,
    token_T: Tensor,
    *,
    row_T: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyUse = "gradient",
    kept: KeptColumns | None = None,
    vocab_size: int | None = None,
    inplace: bool = False,
    tp_group: Group | None = None,
    tp_rank: int = 0,
) -> Scores:
    """Compute log-probs of tokens and the entropy of their distributions.

    Sums are float32 for logits of any dtype (float64 for float64). If both incoming gradients of a token are 0, its
    gradient is exactly 0, for any logits. Tensor-parallel ranks need one all-gather of a few numbers per token, and
    none in the backward pass. Results are bitwise equal on all ranks.

    Args:
        logits: ``[..., V]``, on each tensor-parallel rank its equal part of the vocabulary, in rank order.
        token_T: ``[T]``, ids in the whole vocabulary; an id outside has log-prob -inf.
        row_T: ``[T]``, the index of the row of logits that scores each token, over all leading dimensions. With a
            duplicate row the backward pass fails. None: every row, in order. Other rows are not read, and their
            gradient is 0.
        temperature: The divisor of the logits.
        entropy: ``gradient``: with gradient. ``value``: without gradient. ``none``: not computed.
        kept: The columns from which each token was sampled (top-p). The log-prob of a token is normalized over these
            columns, the entropy over all columns.
        vocab_size: Columns starting at this index are padding, which no sum includes. None: there is no padding.
        inplace: The backward pass writes the gradient over the logits. Do not read the logits afterwards; autograd
            raises an error if it notices.
        tp_group: The tensor-parallel ranks; None for one.
        tp_rank: This rank among them.

    Raises:
        ValueError: A setting is out of range, or shapes do not fit.
        TypeError: The logits are not floats, or ``token_T`` or ``row_T`` are not integers.
        RuntimeError: Another tensor-parallel rank rejected an argument or ran out of memory. It can report this only in
            a message of the same size. So ``token_T``, ``entropy`` and whether ``kept`` is given must be equal on all
            ranks, as in any collective.

    References:
        Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    with work_before_gather(entropy, kept is not None, token_T, tp_group, beside=logits):
        check_tensors({"logits": logits, "token_T": token_T})
        if logits.ndim == 0:
            raise ValueError("logits must be [..., V], got a tensor without dimensions")
        check_choice("entropy", entropy, get_args(EntropyUse))
        check_number("temperature", temperature, low=0.0, high=math.inf, open_low=True, open_high=True)
        logits_NV = logits.reshape(-1, logits.shape[-1])
        if not logits_NV.is_floating_point():
            raise TypeError(f"logits must be floating-point, got {logits_NV.dtype}")
        num_rows, width = logits_NV.shape
        check_targets(token_T, row_T, kept, num_rows=num_rows, rows="rows of logits", device=logits.device)
        check_part(width, "columns of logits", vocab_size=vocab_size, tp_group=tp_group, tp_rank=tp_rank)
        targets = Targets.of_rank(token_T, row_T, width=width, tp_rank=tp_rank, vocab_size=vocab_size)
        if kept is not None:
            bits_TC = kept.bits(first=targets.first, num_columns=targets.num_columns)
            targets = targets._replace(bits_TC=bits_TC)
        if logits_NV.stride(-1) != 1:
            logits_NV = logits_NV.contiguous()
        use = _Use(float(temperature), entropy, inplace, tp_group, choose_backend(logits_NV))
    with rows_named(num_rows, "rows of logits"):
        log_prob_T, entropy_T = _Scored.apply(logits_NV, targets, use)  # type: ignore[no-untyped-call]
    return Scores(log_prob_T, entropy_T)


def check_part(width: int, what: str, *, vocab_size: int | None, tp_group: Group | None, tp_rank: int) -> None:
    """Raise an error if rank or vocabulary do not fit this rank's ``width`` columns of the vocabulary."""
    ranks = group_size(tp_group)
    if not 0 <= check_integer("tp_rank", tp_rank) < ranks:
        raise ValueError(f"tp_rank must be in [0, {ranks - 1}], because tp_group has {ranks} ranks, got {tp_rank}")
    if vocab_size is not None and not 1 <= check_integer("vocab_size", vocab_size) <= width * ranks:
        raise ValueError(
            f"vocab_size must be in [1, {width * ranks}] for {ranks} ranks with {width} {what}, got {vocab_size}"
        )


class _Use(NamedTuple):
    temperature: float
    entropy: EntropyUse
    inplace: bool
    tp_group: Group | None
    backend: Backend


class _Scored(torch.autograd.Function):
    """Log-prob ``log p_t`` of the token ``t``, and entropy ``H``, from logits ``z``: ``p = softmax(z / temperature)``.

    With ``g`` and ``h``, the incoming gradients of the log-prob and the entropy, the gradient of ``z_v`` is
    ``(g (1[v = t] - p_v) - h p_v (log p_v + H)) / temperature``. With ``kept``, ``p_v`` of the first term is normalized
    over the kept columns. ``_logit_gradient`` of ``chunked.py`` and ``gradient_kernel`` of ``triton_backend.py``
    compute it.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets: Targets, use: _Use) -> tuple[Tensor, Tensor | None]:
        scale, with_product, is_kept = 1.0 / use.temperature, use.entropy != "none", targets.bits_TC is not None
        with work_before_gather(use.entropy, is_kept, targets.token_T, use.tp_group, beside=logits_NV):
            sums = logits_NV.new_empty(6, len(targets.token_T), dtype=torch.float64)
            use.backend.row_sums(logits_NV, targets, sums, scale=scale, with_product=with_product)
        parts = gathered(RowSums.of(sums, with_product=with_product, is_kept=is_kept), use.tp_group)
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        log_prob_T, found = finish(parts, temperature=use.temperature, dtype=dtype)
        ctx.save_for_backward(logits_NV, targets.token_T, targets.row_T, targets.bits_TC, *found[:5])
        ctx.use, ctx.columns = use, (targets.first, targets.num_columns)
        ctx.set_materialize_grads(False)
        if use.entropy == "value":
            ctx.mark_non_differentiable(found.entropy_T)
        return log_prob_T, found.entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_T is None and entropy_grad_T is None:
            return None, None, None
        use: _Use = ctx.use
        logits_NV, token_T, row_T, bits_TC, *numbers = ctx.saved_tensors
        targets = Targets(token_T, row_T, *ctx.columns)._replace(bits_TC=bits_TC)
        slopes = Coefficients(*numbers)._replace(log_prob_grad_T=grad_T, entropy_grad_T=entropy_grad_T)
        out_NV = logits_NV.detach() if use.inplace else torch.empty_like(logits_NV)
        use.backend.gradient(logits_NV, targets, slopes, out_NV, scale=1.0 / use.temperature)
        if use.inplace:
            torch.autograd.graph.increment_version(logits_NV)
        return out_NV, None, None


@contextmanager
def work_before_gather(
    entropy: str,
    is_among_kept: bool,
    token_T: Tensor,
    group: Group | None,
    *,
    beside: Tensor,
    states: Tensor | None = None,
) -> Iterator[None]:
    """Run the work of a tensor-parallel rank before its first collective, and send an error before it is raised.

    The other ranks may not fail, for example if only this rank runs out of memory. The message is on the device of
    ``beside``. ``states`` are gathered first.
    """
    try:
        yield
    except Exception:
        # The message may fail for the refused arguments too. The first error is still raised.
        with suppress(Exception):
            if group is not None:
                if states is not None:
                    gather_rows(states, group)
                # The same number of values per token as on the other ranks.
                num_sums = 3 + (entropy != "none") + 2 * is_among_kept
                device = (beside if isinstance(beside, Tensor) else token_T).device
                message = torch.zeros(num_sums * len(token_T) + 1, dtype=torch.float64, device=device)
                message[-1] = 1.0
                gather_rows(message, group)
        raise


def gathered(sums: RowSums, group: Group | None) -> RowSums:
    """``[W, T]``: the sums over each rank's columns.

    Raises:
        RuntimeError: Another rank failed; on a GPU an asynchronous device assertion.
    """
    if group is None:
        return RowSums(*(None if x_T is None else x_T.unsqueeze(0) for x_T in sums))  # type: ignore[arg-type]
    given = [x_T for x_T in sums if x_T is not None]
    # The last value marks a failed rank.
    messages = gather_rows(torch.cat([*given, given[0].new_zeros(1)]), group)
    # One assertion per rank names the failed rank without waiting for the device.
    for rank, is_well in enumerate((messages[:, -1] == 0.0).unbind()):
        torch._assert_async(is_well, f"tensor-parallel rank {rank} failed to score: see the error of that rank")
    found = iter(messages[:, :-1].view(len(messages), len(given), len(given[0])).unbind(1))
    return RowSums(*(None if x_T is None else next(found).contiguous() for x_T in sums))  # type: ignore[arg-type]


FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(logits: Tensor) -> Backend:
    """The backend for these logits, see :mod:`mis_ext.scoring.backend`. float64 is eager.

    Raises:
        ValueError: ``MIS_EXT_BACKEND`` is neither eager nor triton, or is triton where Triton cannot run.
    """
    if logits.dtype in FUSED_DTYPES and wants_triton(logits.device):
        # Imported when needed: importing mis_ext must not import Triton.
        from mis_ext.scoring import triton_backend

        return triton_backend
    return chunked
