"""slime's and Miles' trainer rounds keys and values as the cache of their engine does."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch.distributed as dist

from mis_ext.onpolicy.kv_cache import simulate_kv_cache, simulates_kv_cache

FLAGS = ("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path")

_logger = logging.getLogger(__name__)


def simulate_engine_cache(args: Namespace, *given: Any) -> None:
    """Let the trainer round keys and values as the engine's cache of 8 bits does.

    For the two flags that call a function before the trainer computes::

        --custom-megatron-before-log-prob-hook-path mis_ext.simulate_engine_cache
        --custom-megatron-before-train-step-hook-path mis_ext.simulate_engine_cache

    The first call makes the model round to the dtype of ``--sglang-kv-cache-dtype`` in every later pass, see
    :func:`mis_ext.onpolicy.simulate_kv_cache`; queries too with ``--sglang-attention-backend fa3``.

    Args:
        args: The host's.
        given: The model and the prefix of what is scored; or the rollout's and the step's number, the model, the
            optimizer and its scheduler.

    Raises:
        ValueError: The cache is not of 8 bits or not known, only one of the flags is set, or the host calls with other
            arguments.
    """
    if len(given) not in (2, 5):
        raise ValueError(f"simulate_engine_cache is called with {len(given)} arguments behind args, not with 2 or 5")
    model = given[0] if len(given) == 2 else given[2]
    if simulates_kv_cache(model):
        return
    if missing := [flag for flag in FLAGS if not getattr(args, flag, None)]:
        flag = missing[0].replace("_", "-")
        raise ValueError(f"--{flag} is not set: without it some passes would not round. Give both flags")
    dtype = getattr(args, "sglang_kv_cache_dtype", None)
    if dtype is None:
        raise ValueError(
            "the host has read no sglang_kv_cache_dtype: with --debug-train-only slime does not read SGLang's flags. "
            "Write it into the file of --custom-config-path"
        )
    if dtype in ("auto", "bf16", "bfloat16"):
        raise ValueError(f"sglang_kv_cache_dtype={dtype!r}: there is nothing to simulate. Remove both flags")
    backend = getattr(args, "sglang_attention_backend", None)
    found = simulate_kv_cache(model, dtype, queries=backend == "fa3")
    if not dist.is_initialized() or dist.get_rank() == 0:
        _logger.info("mis_ext: %d attention layers round keys and values to %s", found.num_layers, dtype)
