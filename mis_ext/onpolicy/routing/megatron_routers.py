"""The routers of a Megatron-Core model: which layers they are, and the slot through which their choice passes.

``topk_routing_with_score_function`` (Megatron-Core 0.16) asks the object in a router's ``router_replay`` slot for its
experts, if there is one. What occupies the slot has ``get_replay_topk``, with Megatron-Core's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Module

# Otherwise a router does not ask the slot, or does not keep to the answer.
_REQUIRED = {"moe_router_fusion": False, "moe_expert_capacity_factor": None, "cuda_graph_impl": "none"}


# A router's own choice from (scores, topk, num_groups, group_topk): values and indices, both ``[T, K]``.
TopK = Callable[..., tuple[Tensor, Tensor]]


class Occupant(Protocol):
    """What may stand in the replay slot of a Megatron-Core router: it chooses the experts of each token."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """The scores and the indices of the experts, both ``[T, K]``, from the scores of all, ``[T, E]``."""
        ...


class Layer(NamedTuple):
    """A mixture-of-experts layer; ``column`` counts those of the whole model from 0."""

    name: str
    router: Any
    column: int


class Routers(NamedTuple):
    """The mixture-of-experts layers of a model that are on this rank, of ``num_layers`` in the whole model."""

    chunks: list[Module]
    config: Any
    num_layers: int
    layers: list[Layer]

    @classmethod
    def find(cls, model: Module | Sequence[Module]) -> Routers:
        """The routers of a model or of this rank's model chunks, without those of multi-token prediction.

        What wraps a chunk, such as Megatron-Core's ``DistributedDataParallel`` and ``Float16Module``, is left aside.

        Raises:
            TypeError: A chunk has no Megatron-Core configuration.
            ValueError: The model has no mixture-of-experts layers, its routers do not go by their slot, or some are
                missing though there is no other pipeline stage.
        """
        chunks = [_unwrapped(chunk) for chunk in ([model] if isinstance(model, Module) else model)]
        config: Any = chunks[0].config
        _check_routable(config)
        every = config.moe_layer_freq
        pattern = [index % every == 0 for index in range(config.num_layers)] if isinstance(every, int) else every
        moe_layers = [index for index, is_moe in enumerate(pattern) if is_moe]
        layers = [
            Layer(name, module, moe_layers.index(module.layer_number - 1))
            for chunk in chunks
            for name, module in chunk.named_modules()
            if hasattr(module, "router_replay") and "mtp" not in name.split(".")
        ]
        if config.pipeline_model_parallel_size == 1 and len(layers) != len(moe_layers):
            raise ValueError(
                f"found the routers of {len(layers)} of {len(moe_layers)} mixture-of-experts layers: pass all chunks "
                "(Megatron-Core before 0.16 has no router_replay slot)"
            )
        return cls(chunks, config, len(moe_layers), layers)

    @contextmanager
    def occupied_by(self, occupants: Sequence[Occupant]) -> Iterator[None]:
        """Put one occupant into each layer's slot, and back what was there, also after an exception."""
        previous = [layer.router.router_replay for layer in self.layers]
        try:
            for layer, occupant in zip(self.layers, occupants, strict=True):
                layer.router.router_replay = occupant
            yield
        finally:
            for layer, occupant in zip(self.layers, previous, strict=True):
                layer.router.router_replay = occupant


def _unwrapped(chunk: Module) -> Module:
    """The model inside its wrappers, which name it ``module``."""
    while isinstance(inner := getattr(chunk, "module", None), Module):
        chunk = inner
    if not hasattr(chunk, "config"):
        raise TypeError(f"{type(chunk).__name__} is no Megatron-Core model: it has no config")
    return chunk


def _check_routable(config: Any) -> None:
    if config.num_moe_experts is None:
        raise ValueError("the model has no mixture-of-experts layers")
    if "sinkhorn" in config.moe_router_load_balancing_type:
        raise ValueError(
            "routing with moe_router_load_balancing_type = 'sinkhorn' can be neither replayed nor recorded"
        )
    for key, legal in _REQUIRED.items():
        value = getattr(config, key)
        if value != legal:
            raise ValueError(
                f"routing with {key} = {value!r} can be neither replayed nor recorded: set it to {legal!r}"
            )
