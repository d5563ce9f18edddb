"""Routing replay in Megatron-Core: its routers take the experts that the rollout engine chose, or tell their own.

An object of ours stands in each router's ``router_replay`` slot. Megatron-Core's own ``RouterReplay`` is steered
through a list of all routers that any model of the process ever built, takes any number of rows (a token without a row
is silently routed nowhere), cannot leave a token to its router, and its backward queue grows without a backward pass
too.

The method, R3: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product

import torch
from torch import Tensor
from torch.nn import Module

from mis_ext.onpolicy.megatron_routers import Occupant, Routers, TopK, is_in_backward
from mis_ext.onpolicy.routing import NOT_RECORDED
from mis_ext.onpolicy.routing_layout import LocalRouting


@contextmanager
def replay_routing(model: Module | Sequence[Module], micro_batches: Sequence[LocalRouting]) -> Iterator[None]:
    """Inside, the model's routers take the given experts; how these are weighted stays the trainer's own.

    Gradients reach the routers through the scores of the replayed experts. Forward passes consume ``micro_batches`` in
    order, and so do the recomputations of checkpointed layers: the block must include the backward passes then. At its
    end every mixture-of-experts layer must have consumed all of them. The routers are restored, also by an exception.

    Args:
        model: A Megatron-Core model, or this rank's model chunks. It need not be built for replay. Layers of
            multi-token prediction keep their own routing: rollout engines do not report one.
        micro_batches: The experts of every micro-batch, see :meth:`RoutingLayout.local`.

    Raises:
        ValueError: The routing does not fit the model, the model routes in a way that cannot be replayed, or a layer
            did not consume exactly its rows.
    """
    routers = Routers.of(model)
    for routing in micro_batches:
        _check_fit(routing, routers)
    replays = [
        _Replay(layer.name, [routing.experts_TLK[:, layer.column] for routing in micro_batches])
        for layer in routers.layers
    ]
    with ExitStack() as stack:
        for chunk, replay in product(routers.chunks, replays):
            stack.callback(chunk.register_forward_pre_hook(replay.before_pass).remove)
        stack.enter_context(routers.occupied_by(replays))
        yield
    for replay in replays:
        replay.check_consumed()


@contextmanager
def record_routing(model: Module | Sequence[Module]) -> Iterator[RoutingRecord]:
    """Inside, the experts that the model's routers use are recorded: within :func:`replay_routing`, the replayed ones.

    No output changes by a bit. Recomputations in a backward pass are not recorded again.

    Args:
        model: A Megatron-Core model, or this rank's model chunks.

    Raises:
        ValueError: The model has no mixture-of-experts layers, or routes in a way that cannot be recorded.
    """
    routers = Routers.of(model)
    recorders = [_Recorder(layer.router.router_replay) for layer in routers.layers]
    with routers.occupied_by(recorders):
        yield RoutingRecord(routers, recorders)


class RoutingRecord:
    """What :func:`record_routing` has seen so far."""

    def __init__(self, routers: Routers, recorders: list[_Recorder]) -> None:
        self._num_layers = routers.num_layers
        self._recorders = {layer.column: recorder for layer, recorder in zip(routers.layers, recorders, strict=True)}

    def micro_batches(self) -> list[Tensor]:
        """Per forward pass ``[T, L, K]``, int32, rows in the routers' order; -1 in layers of other pipeline stages.

        ``all_reduce`` with ``ReduceOp.MAX`` over the pipeline group completes the layers, before
        :meth:`RoutingLayout.samples`.

        Raises:
            ValueError: Layers ran a different number of times, or none ran.
        """
        passes = {len(recorder.passes) for recorder in self._recorders.values()}
        if len(passes) != 1 or 0 in passes:
            raise ValueError(f"every router must have run equally often and at least once, got {sorted(passes)} passes")
        return [self._stacked(index) for index in range(*passes)]

    def _stacked(self, index: int) -> Tensor:
        columns = {column: recorder.passes[index] for column, recorder in self._recorders.items()}
        absent_TK = torch.full_like(next(iter(columns.values())), NOT_RECORDED)
        return torch.stack([columns.get(column, absent_TK) for column in range(self._num_layers)], dim=1)


class _Recorder:
    """Stands before what was in a router's slot, and keeps what is chosen."""

    def __init__(self, inner: Occupant | None) -> None:
        self._inner = inner
        self.passes: list[Tensor] = []

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        choose = default_compute_topk
        if self._inner is None:
            values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            values, experts = self._inner.get_replay_topk(scores, topk, num_groups, group_topk, choose)
        if not is_in_backward():
            self.passes.append(experts.int())
        return values, experts


class _Replay:
    """Gives out the rows of one layer, micro-batch after micro-batch."""

    def __init__(self, layer: str, micro_batches: list[Tensor]) -> None:
        self._layer = layer
        self._micro_batches = micro_batches
        self._num_forward = self._num_recomputed = 0
        self._pass_has_grad = self._is_checkpointed = False

    def before_pass(self, *_: object) -> None:
        self._pass_has_grad = torch.is_grad_enabled()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        rows_TK = self._next_rows(scores, topk)
        _, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts_TK = torch.where(rows_TK == NOT_RECORDED, own_TK, rows_TK)
        return scores.gather(1, experts_TK), experts_TK

    def _next_rows(self, scores: Tensor, topk: int) -> Tensor:
        is_recomputing = is_in_backward()
        index = self._num_recomputed if is_recomputing else self._num_forward
        if index >= len(self._micro_batches):
            raise ValueError(f"{self._layer} runs more often than there are micro-batches ({len(self._micro_batches)})")
        rows_TK = self._micro_batches[index].to(scores.device).long()
        if rows_TK.shape != (len(scores), topk):
            raise ValueError(
                f"{self._layer} routes {len(scores)} tokens to {topk} experts each, and the routing of micro-batch "
                f"{index} is {[*rows_TK.shape]}: another layout, padding, or order of micro-batches"
            )
        if is_recomputing:
            self._num_recomputed += 1
        else:
            self._num_forward += 1
            # Checkpointing runs a layer without gradients first, and once more in the backward pass.
            self._is_checkpointed |= self._pass_has_grad and not torch.is_grad_enabled()
        return rows_TK

    def check_consumed(self) -> None:
        expected = len(self._micro_batches)
        if self._num_forward != expected:
            raise ValueError(f"{self._layer} ran for {self._num_forward} of {expected} micro-batches")
        if self._num_recomputed != expected and (self._num_recomputed or self._is_checkpointed):
            raise ValueError(
                f"{self._layer} is recomputed in the backward pass, and {self._num_recomputed} of {expected} backward "
                "passes ran: the block must include them, or it must run the model under torch.no_grad"
            )


def _check_fit(routing: LocalRouting, routers: Routers) -> None:
    _, layers, topk = routing.experts_TLK.shape
    got = layers, topk, routing.num_experts
    expected = routers.num_layers, routers.config.moe_router_topk, routers.config.num_moe_experts
    if got != expected:
        raise ValueError(
            f"the routing has (layers, topk, num_experts) = {got} and the model {expected}, "
            "counting the mixture-of-experts layers of all pipeline stages"
        )
