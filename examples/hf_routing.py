# SPDX-License-Identifier: Apache-2.0
"""Record the experts that a transformers model chooses during generation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mis_ext.onpolicy.routing.experts import RoutedExperts


@contextmanager
def record_hf_routing(model: Module) -> Iterator[HFRoutingRecord]:
    """In this context, record the experts that a transformers MoE model chooses for one batch of sequences.

    It supports all ways to feed a batch ``[B, t]`` once and in order: prefill in one or more chunks, decode with a KV
    cache, left padding with a two-dimensional ``attention_mask``. Any other forward pass is an error, such as a second
    ``generate`` or one without cache. Outputs are bitwise unchanged, and all hooks are removed.

    Args:
        model: A causal language model whose routers return ``(logits, scores, indices)``, such as Qwen3-MoE in
            transformers 5 (not in 4.57).

    Raises:
        ValueError: If the model has no such router; or, in a forward pass, if the batch cannot be recorded or does not
            continue the last one.
    """
    gates = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    if not gates:
        raise ValueError(f"{type(model).__name__} has no module whose class name ends in TopKRouter")
    record = HFRoutingRecord(num_experts=gates[0].num_experts)
    with ExitStack() as stack:
        hooks = [model.register_forward_pre_hook(record._before, with_kwargs=True)]
        hooks += [gate.register_forward_hook(record._after_gate) for gate in gates]
        hooks += [model.register_forward_hook(record._after)]
        for hook in hooks:
            stack.callback(hook.remove)
        yield record


class HFRoutingRecord:
    """The record of :func:`record_hf_routing` so far."""

    def __init__(self, *, num_experts: Any) -> None:
        self._num_experts = int(num_experts)
        self._gates: list[Tensor] = []
        self._is_token_BT = torch.empty(0)
        self._num_fed = 0
        self._rows: list[list[Tensor]] = []

    def samples(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """Return the experts of every sequence, from its first token that is not padding.

        Args:
            lengths: Tokens of each sequence, prompt and response. Later inputs, such as padding after an end token, are
                dropped. A last token that was not fed is not recorded.

        Raises:
            ValueError: If the batch has another number of sequences, or nothing was fed.
        """
        if len(lengths) != len(self._rows):
            raise ValueError(f"got {len(lengths)} lengths for a batch of {len(self._rows)} sequences")
        return [
            RoutedExperts.from_rows(torch.cat(rows)[:length], num_tokens=length, num_experts=self._num_experts)
            for rows, length in zip(self._rows, lengths, strict=True)
        ]

    def _before(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        # A wrapper that only forwards arguments has no argument names.
        tokens_BT, mask = given.get("input_ids", args[0] if len(args) == 1 else None), given.get("attention_mask")
        if not torch.is_tensor(tokens_BT) or tokens_BT.dim() != 2:
            raise ValueError("routing is recorded for input_ids [B, t], which this forward pass does not have")
        if given.get("cu_seq_lens_q") is not None or (
            mask is not None and (not torch.is_tensor(mask) or mask.dim() != 2)
        ):
            raise ValueError("routing is recorded for batches [B, t] with a two-dimensional attention_mask or none")
        if self._rows and len(self._rows) != len(tokens_BT):
            raise ValueError(f"a batch of {len(tokens_BT)} follows one of {len(self._rows)}: record each on its own")
        # Its name is past_key_values before transformers 5.24, and cache from then on.
        lengths = [int(value.get_seq_length()) for value in given.values() if hasattr(value, "get_seq_length")]
        start = lengths[0] if lengths else 0
        if start != self._num_fed:
            raise ValueError(
                f"a forward pass from position {start} on follows {self._num_fed} recorded positions: record each "
                "generate call on its own, with use_cache=True"
            )
        self._rows = self._rows or [[] for _ in tokens_BT]
        width = tokens_BT.size(1)
        self._is_token_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if mask is None else mask[:, -width:].bool()
        self._gates = []

    def _after_gate(self, _: Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._gates.append(output[2].detach().to(torch.int32))

    def _after(self, *_: Any) -> None:
        experts = torch.stack(self._gates, dim=1)
        experts = experts.view(*self._is_token_BT.shape, *experts.shape[1:])
        for rows, is_token_T, experts_TLK in zip(self._rows, self._is_token_BT, experts, strict=True):
            rows.append(experts_TLK[is_token_T].cpu())
        self._num_fed += self._is_token_BT.size(1)
