# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer on a CPU, of a few parameters and of a real model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

BF16 = torch.bfloat16
SHAPES = {"matrix": (700, 600), "norm": (600,), "head": (601, 3)}


@contextmanager
def optimizer_of(
    *,
    rank: int = 0,
    size: int = 1,
    is_distributed: bool,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(SHAPES),
    frozen: Collection[str] = (),
    experts: Collection[str] = (),
    **settings: Any,
) -> Iterator[tuple[Any, Any]]:
    """Megatron-Core's own, with its model: of the ranks that have met, or of one of ``size`` that exchange nothing."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo.cpu import megatron_device
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import MegatronModule, TransformerConfig

    class Model(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, shape in shapes.items():
                generator = torch.Generator().manual_seed(sum(shape))
                drawn = torch.randn(shape, generator=generator) * 0.02
                parameter = torch.nn.Parameter(drawn.to(config.params_dtype), requires_grad=name not in frozen)
                parameter.allreduce = name not in experts
                setattr(self, name, parameter)

    settings = {"bf16": True, "params_dtype": BF16} | settings
    with nullcontext() if dist.is_initialized() else alone(rank, size):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **settings)
        layout = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=is_distributed)
        options = OptimizerConfig(optimizer="adam", lr=1e-6, use_distributed_optimizer=is_distributed, **settings)
        with megatron_device(torch.device("cpu")):
            model = DistributedDataParallel(config, layout, Model(config))
            yield get_megatron_optimizer(options, [model], use_gloo_process_groups=False), model.module


@contextmanager
def alone(rank: int, size: int) -> Iterator[None]:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Quantized(torch.Tensor):
    """Stands for a type of Transformer Engine."""


@contextmanager
def model_of_ranks(**layout: int) -> Iterator[tuple[Any, Any]]:
    """Megatron-Core's distributed optimizer and a mixture of experts with tied embeddings, of the ranks that have met.

    Parameters of one shape are equal, and so are their gradients, on every rank.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from grpo.cpu import megatron_device
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine, Megatron-Core 0.16 forgets to define this name, which its routers look up.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
    sizes |= {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
    off = ("add_bias_linear", "perform_initialization", "bias_dropout_fusion", "masked_softmax_fusion")
    off += ("gradient_accumulation_fusion", "persist_layer_norm")
    settings = {"bf16": True, "params_dtype": BF16}
    parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
    try:
        # Checkpoints wait for a GPU. torch 2.13 gave collectives of Megatron-Core other names.
        no_gpu = mock.patch("torch.cuda.synchronize", return_value=None)
        with megatron_device(torch.device("cpu")), no_gpu, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = TransformerConfig(
                **sizes, **dict.fromkeys(off, False), **settings, **layout, pipeline_dtype=BF16, normalization="RMSNorm"
            )
            model = GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm"),
                vocab_size=64,
                max_sequence_length=8,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=True,
            )
            options = OptimizerConfig(optimizer="adam", lr=2e-5, use_distributed_optimizer=True, **settings)
            chunk = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                model.bfloat16(),
            )
            for parameter in model.parameters():
                generator = torch.Generator().manual_seed(sum(parameter.shape))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            optimizer = get_megatron_optimizer(options, [chunk], use_gloo_process_groups=False)
            optimizer.reload_model_params()
            yield optimizer, model
    finally:
        parallel_state.destroy_model_parallel()


def step(optimizer: Any, model: Any, *, number: int) -> None:
    """An optimizer step, by gradients that are drawn from a parameter's shape and the number of the step."""
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(sum(parameter.shape) + 1000 * number)
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def sharded_state(optimizer: Any, model: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron-LM saves of both, in its default format."""
    metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
    metadata["singleton_local_shards"] = False
    weights = model.sharded_state_dict(metadata=metadata)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading, metadata=metadata)}
