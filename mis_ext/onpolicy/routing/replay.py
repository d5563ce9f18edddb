# SPDX-License-Identifier: Apache-2.0
"""Routing replay in Megatron-Core: its routers use the experts of the rollout engine.

``topk_routing_with_score_function`` (Megatron-Core 0.16) gets the experts from the object in a router's
``router_replay`` slot, if there is one. This module sets its own object there. Megatron-Core's own ``RouterReplay`` is
controlled through a list of all routers of all models in the process. It accepts any number of rows (a token without a
row is silently routed nowhere), cannot leave a token to its router, and its backward queue grows even without a
backward pass.

The method, R3: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from mis_ext.onpolicy.routing.experts import NOT_RECORDED
from mis_ext.onpolicy.routing.routing_layout import LocalRouting


@contextmanager
def replay_routing(model: Module | Sequence[Module], micro_batches: Sequence[LocalRouting]) -> Iterator[None]:
    """In this block, the model's routers use the given experts. Their weights are still the trainer's.

    Gradients reach the routers through the scores of the replayed experts. Forward passes consume ``micro_batches`` in
    order; at the end of the block every mixture-of-experts layer must have consumed all of them. Checkpointed layers
    are recomputed with the experts of their own micro-batch, in any order of the backward passes; then the block must
    include these. The routers are restored, also after an exception.

    Args:
        model: A Megatron-Core model, or this rank's model chunks. It need not be built for replay. Layers of
            multi-token prediction keep their own routing, because rollout engines do not report it.
        micro_batches: The experts of every micro-batch, see :meth:`RoutingLayout.local`.

    Raises:
        TypeError: The model has no Megatron-Core configuration.
        ValueError: The routing does not fit the model, the model's routing cannot be replayed, a layer did not consume
            exactly its rows, or it is recomputed without a forward pass of the block, or twice for one.
    """
    chunks = [_unwrapped(chunk) for chunk in ([model] if isinstance(model, Module) else model)]
    config: Any = chunks[0].config
    layers, num_layers = _find_layers(chunks, config)
    expected = num_layers, config.moe_router_topk, config.num_moe_experts
    for routing in micro_batches:
        got = *routing.experts_TLK.shape[1:], routing.num_experts
        if got != expected:
            raise ValueError(
                f"the routing has (layers, topk, num_experts) = {got}, but the model has {expected}, counting the "
                "mixture-of-experts layers of all pipeline stages"
            )
    columns = [layer.column for layer in layers]

    @lru_cache(maxsize=1)
    def rows_on(device: torch.device, micro_batch: int) -> Tensor:
        """``[T, layers of this rank, K]``; all layers share one copy to the device."""
        return micro_batches[micro_batch].experts_TLK[:, columns].to(device)

    passes = ForwardPasses()
    replays = [_Replay(layer, rows_on, index, len(micro_batches), passes) for index, layer in enumerate(layers)]
    with passes.watch(chunks), ExitStack() as stack:
        for layer, replay in zip(layers, replays, strict=True):
            # Also after an exception.
            stack.callback(setattr, layer.router, "router_replay", layer.router.router_replay)
            layer.router.router_replay = replay
        yield
    for replay in replays:
        replay.check_consumed()


class _Replay:
    """Provides the rows of one layer: each forward pass takes the next micro-batch."""

    def __init__(
        self,
        layer: _Layer,
        rows_on: Callable[[torch.device, int], Tensor],
        index: int,
        num_micro_batches: int,
        passes: ForwardPasses,
    ) -> None:
        self._name = layer.name
        self._rows_on, self._index, self._num_micro_batches = rows_on, index, num_micro_batches
        self._passes = passes
        self._taken: list[ForwardPass] = []
        self._recomputed: set[int] = set()
        self._is_checkpointed = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        # While autograd's engine is running, a forward pass recomputes a checkpointed layer.
        is_recomputed = torch._C._current_graph_task_id() != -1
        micro_batch = self._recomputed_micro_batch() if is_recomputed else self._next_micro_batch()
        rows_TK = self._rows_on(scores.device, micro_batch)[:, self._index].long()
        if rows_TK.shape != (len(scores), topk):
            raise ValueError(
                f"{self._name} routes {len(scores)} tokens to {topk} experts each, but the routing of micro-batch "
                f"{micro_batch} is {[*rows_TK.shape]}: check layout, padding, and order of micro-batches"
            )
        _, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts_TK = torch.where(rows_TK == NOT_RECORDED, own_TK, rows_TK)
        return scores.gather(1, experts_TK), experts_TK

    def _next_micro_batch(self) -> int:
        if len(self._taken) == self._num_micro_batches:
            raise ValueError(f"{self._name} runs more often than there are micro-batches ({self._num_micro_batches})")
        self._taken.append(self._passes.current)
        # Reentrant checkpointing runs a layer without gradients first, and once more in the backward pass.
        self._is_checkpointed |= self._passes.current.has_grad and not torch.is_grad_enabled()
        return len(self._taken) - 1

    def _recomputed_micro_batch(self) -> int:
        node = int(torch._C._current_autograd_node()._sequence_nr())
        found = [micro_batch for micro_batch, taken in enumerate(self._taken) if node in taken.nodes]
        if not found:
            raise ValueError(
                f"{self._name} is recomputed for a checkpoint that is not from a forward pass of the model in the "
                "block: checkpoint layers of the model, and do not nest checkpoints"
            )
        if found[0] in self._recomputed:
            raise ValueError(
                f"{self._name} is recomputed twice for micro-batch {found[0]}: by two backward passes, or by nested "
                "checkpoints"
            )
        self._recomputed.add(found[0])
        return found[0]

    def check_consumed(self) -> None:
        if len(self._taken) != self._num_micro_batches:
            raise ValueError(f"{self._name} ran for {len(self._taken)} of {self._num_micro_batches} micro-batches")
        due = [micro_batch for micro_batch, taken in enumerate(self._taken) if taken.has_backward]
        ran = [index for index in due if index in self._recomputed or self._taken[index].ran_backward]
        if (self._is_checkpointed or self._recomputed) and ran != due:
            raise ValueError(
                f"{self._name} is recomputed in the backward pass, but only {len(ran)} of {len(due)} backward passes "
                "ran: the block must include them, or it must run the model under torch.no_grad"
            )


# Autograd numbers its nodes in order of creation. It recomputes a checkpoint while it runs a node of the forward pass
# that created the checkpoint: the checkpoint itself, or one of its operations with use_reentrant=False. So the number
# of this node identifies the forward pass, for any order of the backward passes, without reading a tensor.
@dataclass(eq=False)
class ForwardPass:
    """One forward pass of a model chunk.

    Attributes:
        has_grad: Whether it was called with gradients enabled.
        nodes: The numbers of its autograd nodes with gradients.
        has_backward: Whether its output requires gradients.
        ran_backward: Whether gradients of its output were computed.
    """

    has_grad: bool = False
    nodes: range = range(0)
    has_backward: bool = False
    ran_backward: bool = False


class ForwardPasses:
    """Tracks the running, or else the last, forward pass of the watched chunks."""

    def __init__(self) -> None:
        self.current = ForwardPass()

    @contextmanager
    def watch(self, chunks: Sequence[Module]) -> Iterator[None]:
        """Watch the chunks' forward passes."""
        with ExitStack() as stack:
            for chunk in chunks:
                stack.callback(chunk.register_forward_pre_hook(self._before).remove)
                stack.callback(chunk.register_forward_hook(self._after).remove)
            yield

    def _before(self, *_: object) -> None:
        start = torch._C._autograd._get_sequence_nr()
        self.current = ForwardPass(has_grad=torch.is_grad_enabled(), nodes=range(start, start))

    def _after(self, _: Module, __: object, output: object) -> None:
        ended = self.current
        if ended.has_grad:
            ended.nodes = range(ended.nodes.start, torch._C._autograd._get_sequence_nr())
        outputs = [x for x in tree_leaves(output) if torch.is_tensor(x) and x.requires_grad]
        ended.has_backward = bool(outputs)

        def note_backward(_: object) -> None:
            ended.ran_backward = True

        register_multi_grad_hook(outputs, note_backward, mode="any")


class _Layer(NamedTuple):
    """A mixture-of-experts layer; ``column``: its index among those of the whole model, from 0."""

    name: str
    router: Any
    column: int


# With other values a router does not read the slot, or does not use its experts.
_REQUIRED = {"moe_router_fusion": False, "moe_expert_capacity_factor": None, "cuda_graph_impl": "none"}


def _find_layers(chunks: Sequence[Module], config: Any) -> tuple[list[_Layer], int]:
    """The layers on this rank, without multi-token prediction, and their number in the whole model."""
    if config.num_moe_experts is None:
        raise ValueError("the model has no mixture-of-experts layers")
    if "sinkhorn" in config.moe_router_load_balancing_type:
        raise ValueError("routing with moe_router_load_balancing_type = 'sinkhorn' cannot be replayed")
    for key, legal in _REQUIRED.items():
        value = getattr(config, key)
        if value != legal:
            raise ValueError(f"routing with {key} = {value!r} cannot be replayed: set it to {legal!r}")
    every = config.moe_layer_freq
    pattern = [index % every == 0 for index in range(config.num_layers)] if isinstance(every, int) else every
    moe_layers = [index for index, is_moe in enumerate(pattern) if is_moe]
    layers = [
        _Layer(name, module, moe_layers.index(module.layer_number - 1))
        for chunk in chunks
        for name, module in chunk.named_modules()
        if hasattr(module, "router_replay") and "mtp" not in name.split(".")
    ]
    if config.pipeline_model_parallel_size == 1 and len(layers) != len(moe_layers):
        raise ValueError(
            f"found the routers of {len(layers)} of {len(moe_layers)} mixture-of-experts layers: pass all chunks "
            "(Megatron-Core before 0.16 has no router_replay slot)"
        )
    return layers, len(moe_layers)


def _unwrapped(chunk: Module) -> Module:
    """The model inside its wrappers, which store it as ``module``."""
    while isinstance(inner := getattr(chunk, "module", None), Module):
        chunk = inner
    if not hasattr(chunk, "config"):
        raise TypeError(f"{type(chunk).__name__} is not a Megatron-Core model: it has no config")
    return chunk
