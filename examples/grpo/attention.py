# SPDX-License-Identifier: Apache-2.0
"""Core attention for Megatron-Core's layer spec that runs packed, context parallel, and without a GPU."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .layout import zigzag_positions


class _GatherTokens(torch.autograd.Function):
    """Concatenate the first dimension over a group. The gradient is summed over the group.

    ``torch.distributed.nn.functional.all_gather`` does the same, but its backward fails over gloo in a group that does
    not contain global rank 0.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(pieces, local.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(MegatronModule):
    """Causal attention over keys and values gathered from all context-parallel ranks.

    Megatron-Core's local ``DotProductAttention`` refuses context parallelism and packed sequences, and its other cores
    need Transformer Engine. This one is exact and simple rather than fast: the mask is dense over a micro-batch.
    """

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.cp_size = config.context_parallel_size
        self.cp_group = parallel_state.get_context_parallel_group()
        self.cp_rank = parallel_state.get_context_parallel_rank()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend causally within each sequence.

        Args:
            query: ``[S, B, heads, dim]``, or ``[T, heads, dim]`` when packed.
            key: The same with the number of key-value heads.
            value: As ``key``.
            attention_mask: Not used: the mask follows from the layout.
            attn_mask_type: Not used.
            attention_bias: Not used.
            packed_seq_params: Sequence boundaries of packed input.

        Returns:
            ``[S, B, heads * dim]``; packed input counts as ``B = 1``.
        """
        if packed_seq_params is None and self.cp_size == 1:
            # A plain causal mask: torch has faster kernels for it, and no device synchronization is needed.
            return _attend(query, key, value, is_causal=True)
        if packed_seq_params is None:
            lengths_S = torch.tensor([len(query) * self.cp_size], device=query.device)
        else:
            lengths_S = packed_seq_params.cu_seqlens_q.diff()
            query, key, value = (x.unsqueeze(1) if x.dim() == 3 else x for x in (query, key, value))
        mask = self._mask(lengths_S)
        if self.cp_size > 1:
            key, value = _GatherTokens.apply(key, self.cp_group), _GatherTokens.apply(value, self.cp_group)
        return _attend(query, key, value, attn_mask=mask)

    def _mask(self, lengths_S: Tensor) -> Tensor:
        """Return the mask of gathered keys that each local query may attend to, bool ``[T_local, T_all]``."""
        ranks = [zigzag_positions(lengths_S, cp_rank=rank, cp_size=self.cp_size) for rank in range(self.cp_size)]
        key_sequence, key_position = (torch.cat(parts) for parts in zip(*ranks, strict=True))
        query_sequence, query_position = ranks[self.cp_rank]
        same_sequence = query_sequence[:, None] == key_sequence
        return same_sequence & (query_position[:, None] >= key_position)


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """From ``[S, B, heads, dim]`` to ``[S, B, heads * dim]``."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    return output.permute(2, 0, 1, 3).flatten(2)
