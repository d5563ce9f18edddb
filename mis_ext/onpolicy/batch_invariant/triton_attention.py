"""Attention on CUDA whose every output row has the same bits in a prefill, a chunk of it or a decode."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mis_ext.correction.triton.launch import IS_HIP, Launcher, launching_on
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing, seen_keys, split_runs
from mis_ext.onpolicy.batch_invariant.triton_attention_kernels import (
    BLOCK_N,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from mis_ext.onpolicy.batch_invariant.triton_inputs import (
    FLOAT32_PRODUCTS,
    check_products,
    check_tensors,
)

_launch_forward = Launcher(forward_kernel)
_launch_query_gradient = Launcher(query_gradient_kernel)
_launch_key_gradient = Launcher(key_gradient_kernel)

MAX_HEAD_DIM = 256
# Heads above this need other tiles to fit.
_WIDE = 128


class Tile(NamedTuple):
    """How many queries a program takes at a time, and how it is launched; keys come in blocks of ``BLOCK_N``."""

    BLOCK_M: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Tiles of the forward kernel and of both gradients'."""

    forward: Tile
    gradient: Tile


def choose_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """The tiles for a dtype and a head dimension; nothing else may choose them."""
    is_wide = head_dim > _WIDE
    if dtype == torch.float32:
        # Both operands of a product pass through registers, which are the limit.
        forward, gradient = (Tile(32, 8, 1), Tile(16, 8, 1)) if is_wide or IS_HIP else (Tile(32, 4, 1), Tile(32, 4, 1))
    elif IS_HIP:
        forward, gradient = Tile(64, 8, 1), Tile(64, 8, 1)
    else:
        forward, gradient = (Tile(64, 8, 2), Tile(64, 8, 1)) if is_wide else (Tile(64, 4, 3), Tile(64, 4, 2))
    return Tiles(forward, gradient)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences by an online softmax in float32 over blocks that start at the first key seen.

    A value that is not finite reaches the queries that see its key, and others whose tile reads it: all keys from the
    first to the last that one of its queries may see.

    Args:
        query: ``[T, H, D]`` of one dtype with the others, the sequences one after the other; ``D`` at most 256.
        key: ``[U, G, D]``; ``H`` is a multiple of ``G``, and head ``h`` attends to ``h // (H // G)``.
        value: ``[U, G, D]``.
        packing: Where the sequences are, and what their queries may see.

    Returns:
        The output ``[T, H, D]``, 0 where a query may attend to nothing or is of no sequence, and the logarithm of the
        sum of its exponentials, ``[H, T]`` float32.
    """
    query, packing = _with_positive_scale(query, packing)
    call = _Call.prepare(query, key, value, packing, in_runs=True)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)
    tile = choose_tiles(query.dtype, query.shape[2]).forward
    slots = packing.key_slots
    num_tiles = -(-max(packing.max_seqlen_q, 1) // tile.BLOCK_M)
    # What is after the last sequence is one more.
    num_programs = num_tiles * query.shape[1] * call.bounds[0].numel()
    tensors, numbers = (output, lse, query if slots is None else slots), (0 if slots is None else slots.stride(0),)
    call.launch(_launch_forward, tile, num_tiles, num_programs, tensors, numbers, HAS_SLOTS=slots is not None)
    return output, lse


def _with_positive_scale(query: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
    """The kernel scales the largest score, which must then be the largest."""
    if packing.scale > 0:
        return query, packing
    if packing.scale < 0:
        return -query, packing._replace(scale=-packing.scale)
    return torch.zeros_like(query), packing._replace(scale=1.0)


def attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`attention_forward` by query, key and value; the same bits on every run.

    Two passes that recompute the weights (Dao, "FlashAttention-2", arXiv 2307.08691), the second over keys, so that
    nothing is added up by atomic operations. They are contiguous, in the dtype of the query; ``output`` and ``lse`` are
    what the forward returned.
    """
    call = _Call.prepare(query, key, value, packing)
    check_tensors({"query": query, "grad_output": grad_output, "output": output})
    shapes = [*grad_output.shape], [*output.shape], [*lse.shape]
    if shapes != ([*query.shape], [*query.shape], [query.shape[1], query.shape[0]]) or lse.dtype != torch.float32:
        raise ValueError(
            f"for a query {[*query.shape]}, grad_output and output must have its shape and lse be [H, T] float32, got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]} {lse.dtype}"
        )
    grad_output, output, lse = grad_output.contiguous(), output.contiguous(), lse.contiguous()
    delta = torch.empty_like(lse)
    grad_query, grad_key, grad_value = (
        torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    tile = choose_tiles(query.dtype, query.shape[2]).gradient
    num_sequences = call.bounds[0].numel() - 1
    num_tiles = -(-packing.max_seqlen_q // tile.BLOCK_M)
    tensors: tuple[Tensor, ...] = output, lse, grad_output, delta, grad_query
    call.launch(_launch_query_gradient, tile, num_tiles, num_tiles * query.shape[1] * num_sequences, tensors)
    num_tiles = -(-packing.max_seqlen_k // BLOCK_N.value)
    tensors = lse, grad_output, delta, grad_key, grad_value
    call.launch(_launch_key_gradient, tile, num_tiles, num_tiles * key.shape[1] * num_sequences, tensors)
    return grad_query, grad_key, grad_value


class _Call(NamedTuple):
    """What all three kernels get; ``bounds`` are those of the runs of queries, and where their masks start."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bounds: tuple[Tensor, ...]
    scale: float
    constants: dict[str, Any]

    @classmethod
    def prepare(cls, query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, in_runs: bool = False) -> _Call:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, mask, _ = packing
        check_tensors({"query": query, "key": key, "value": value})
        check_products(query.dtype, query.device)
        _check_shapes(query, key, value)
        _check_lengths(query, cu_seqlens_q, cu_seqlens_k)
        if mask is None:
            # Nothing is computed, for which a decode would wait.
            bounds = cu_seqlens_q, cu_seqlens_k[:-1], cu_seqlens_k[1:], cu_seqlens_q
        else:
            _check_mask(mask, query, (cu_seqlens_q.numel() - 1, query.shape[1], max_seqlen_q, max_seqlen_k))
            runs = split_runs(packing if in_runs else packing._replace(mask=None))
            words = _packed_words(_from_first_key(mask) if in_runs and mask.numel() else mask)
            mask = words.expand(-1, query.shape[1], -1, -1)
            bounds = *runs[:3], runs.sequence_R * mask.stride(0) + runs.row_R * mask.stride(2)
        constants = {
            "QUERIES_PER_KEY": query.shape[1] // key.shape[1],
            "HEAD_DIM": query.shape[2],
            "IS_CAUSAL": is_causal,
            "HAS_MASK": mask is not None,
            # The parts of three products of TF32 would not fit into shared memory.
            "PRECISION": "ieee" if query.shape[2] > _WIDE else FLOAT32_PRODUCTS,
            "BLOCK_D": max(16, 1 << (query.shape[2] - 1).bit_length()),
        }
        # Only the last dimension must be dense, and the rows of a block of keys within a distance of 32 bits.
        query, key, value = (
            x if x.stride(2) == 1 and x.stride(0) < 2**31 // BLOCK_N.value else x.contiguous()
            for x in (query, key, value)
        )
        return cls(query, key, value, mask, tuple(x.contiguous() for x in bounds), float(scale), constants)

    def launch(
        self,
        launcher: Launcher,
        tile: Tile,
        num_tiles: int,
        num_programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...] = (),
        **constants: bool,
    ) -> None:
        """A program per sequence, head and tile of rows; ``num_tiles`` are those of the longest sequence."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if num_programs == 0 or len(query) == 0:
            return
        with launching_on(query):
            launcher(
                num_programs,
                (query, key, value, query if mask is None else mask, *tensors, *self.bounds),
                (
                    *(num_tiles, query.shape[1], query.shape[0], self.scale),
                    *(stride for x in (query, key, value) for stride in x.stride()[:2]),
                    *((0, 0) if mask is None else mask.stride()[1:3]),
                    *numbers,
                ),
                {**self.constants, **constants, "BLOCK_M": tile.BLOCK_M},
                {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            )


def _from_first_key(mask: Tensor) -> Tensor:
    """The mask, each query's part of it from the first key on that it sees."""
    num_keys = mask.shape[-1]
    key_SQJ = seen_keys(mask)[0][..., None] + torch.arange(num_keys, device=mask.device)
    index = key_SQJ.clamp(max=num_keys - 1)[:, None].expand(-1, mask.shape[1], -1, -1)
    return mask.gather(-1, index) & (key_SQJ < num_keys)[:, None]


def _packed_words(mask: Tensor) -> Tensor:
    """A bit per key, the first the lowest, 64 to a word: ``[..., blocks]`` int64."""
    padded = pad(mask, (0, -mask.shape[-1] % BLOCK_N.value))
    bits = padded.view(*padded.shape[:-1], padded.shape[-1] // 8, 8)
    places = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return torch.where(bits, places, 0).sum(-1, dtype=torch.uint8).view(torch.int64)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = {"query": [*query.shape], "key": [*key.shape], "value": [*value.shape]}
    if any(len(shape) != 3 for shape in shapes.values()) or shapes["key"] != shapes["value"]:
        raise ValueError(f"query must be [T, H, D], key and value [U, G, D], got {shapes}")
    (_, num_heads, head_dim), (_, num_groups, key_dim) = shapes["query"], shapes["key"]
    if head_dim != key_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the last dimensions must be equal and in [1, {MAX_HEAD_DIM}], got {head_dim} and {key_dim}")
    if num_groups == 0 or num_heads % num_groups:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_groups} key heads")


def _check_lengths(query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, lengths in {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}.items():
        if lengths.dtype != torch.int32 or lengths.device != query.device:
            raise TypeError(f"{name} must be int32 on {query.device}, got {lengths.dtype} on {lengths.device}")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.numel() == 0:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must be [S + 1], got {[*cu_seqlens_q.shape]} and {[*cu_seqlens_k.shape]}"
        )


def _check_mask(mask: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool or mask.device != query.device:
        raise TypeError(f"mask must be bool on {query.device}, got {mask.dtype} on {mask.device}")
    num_sequences, num_heads, longest_q, longest_k = shape
    if mask.dim() != 4 or mask.shape[1] not in (1, num_heads):
        raise ValueError(f"mask must be [S, 1 or {num_heads}, max_seqlen_q, max_seqlen_k], got {[*mask.shape]}")
    if (mask.shape[0], *mask.shape[2:]) != (num_sequences, longest_q, longest_k):
        raise ValueError(f"mask must be {[num_sequences, mask.shape[1], longest_q, longest_k]}, got {[*mask.shape]}")
