# SPDX-License-Identifier: Apache-2.0
"""A small MoE model in Megatron-Core, its replayed routing, and the calls of its routers.

Without Megatron-Core, a test module that imports this one is skipped.
"""

# The imports after the skip need packages that only the example's environment has.
# ruff: noqa: E402

import copy
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

for needed in ("megatron", "transformers"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} not installed (requirements/example.txt)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    from toy_moe import MoEShape, score

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.replay import replay_routing
from mis_ext.onpolicy.routing.routing_layout import LocalRouting, RoutingLayout

# Layers 0 and 2 are mixtures of experts, layer 1 is dense.
SHAPE = MoEShape(num_layers=3, moe_layer_freq=2, hidden_size=32, expert_size=16, num_experts=8, topk=2, vocab_size=64)


def tokens(batch: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_routing(length: int, *, seed: int, layers: int = 2, topk: int = 2, num_experts: int = 8) -> RoutedExperts:
    """Any experts, for all tokens except the last."""
    order = torch.rand(length - 1, layers, num_experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return RoutedExperts.from_rows(order[..., :topk], num_tokens=length, num_experts=num_experts)


def padded_routing(lengths: tuple[int, ...] = (6, 6), *, seed: int = 0, length: int = 6) -> LocalRouting:
    samples = [random_routing(n, seed=seed + index) for index, n in enumerate(lengths)]
    return RoutingLayout.padded(lengths, padded_length=length).local(samples)


@contextmanager
def router_outputs(model: torch.nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor, Tensor]]]]:
    """Input, gate weights and routing map of every router call, as the dispatcher gets them."""
    seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, args, out, name=name: seen.setdefault(name, []).append((args[0].flatten(0, 1), *out))
        )
        for name, module in model.named_modules()
        if name.endswith("router")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def chosen(routing_map_TE: Tensor) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in routing_map_TE]


def used_experts(seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]], call: int = 0) -> Tensor:
    """``[T, routers, K]``: the experts of the routers in one of their calls, each row ascending."""
    maps = [calls[call][2] for calls in seen.values()]
    return torch.stack([routing_map.nonzero()[:, 1].view(len(routing_map), -1) for routing_map in maps], dim=1)


def gradients(model: torch.nn.Module) -> list[Tensor]:
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return grads


def slots(model: torch.nn.Module) -> list[object]:
    return [module.router_replay for module in model.modules() if hasattr(module, "router_replay")]


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "Megatron-Core": lambda function, x: tensor_parallel.checkpoint(function, False, x),
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "not reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
}


def recompute(module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, *, kind: str) -> None:
    """Recompute a layer, or the whole decoder, in the backward pass."""

    def run(*, hidden_states: Tensor, forward=module.forward, **rest: object) -> object:
        return CHECKPOINTS[kind](lambda x: forward(hidden_states=x, **rest), hidden_states)

    monkeypatch.setattr(module, "forward", run)


def checkpoint_layers(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, *, kind: str) -> None:
    for layer in model.decoder.layers:
        recompute(layer, monkeypatch, kind=kind)


def backward_reversed(losses: list[Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def score_plainly(model: torch.nn.Module) -> Tensor:
    return score(model, tokens())


def train_on(
    model: torch.nn.Module,
    *,
    scorer: Callable[[torch.nn.Module], Tensor] = score_plainly,
    before: Tensor | float = 0,
    passes: int = 1,
) -> None:
    """Train on one micro-batch, also with a score from before the replay."""
    with replay_routing(model, [padded_routing()]):
        loss = (scorer(model) + before).sum()
        for _ in range(passes):
            loss.backward(retain_graph=True)


def train_under(routings: list[LocalRouting], model: torch.nn.Module, *, backward_passes: int) -> None:
    with replay_routing(model, routings):
        scored = [score(model, tokens()) for _ in routings]
        for log_probs in scored[:backward_passes]:
            log_probs.sum().backward()


@torch.no_grad()
def score_under(routings: list[LocalRouting], model: torch.nn.Module, *, passes: int) -> None:
    with replay_routing(model, routings):
        for _ in range(passes):
            score(model, tokens())


def pipeline_stage(model: torch.nn.Module) -> torch.nn.Module:
    stage = torch.nn.Module()
    stage.config = copy.copy(model.config)
    stage.config.pipeline_model_parallel_size = 2
    return stage


class Wrapper(torch.nn.Module):
    """Like torch's ``DistributedDataParallel``, it has no config."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


def wrap_in_megatron(model: torch.nn.Module) -> torch.nn.Module:
    model.config.bf16, model.config.params_dtype = True, torch.bfloat16
    half = Float16Module(model.config, model)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), half)
