# SPDX-License-Identifier: Apache-2.0
"""verl on a CPU: a platform and two engines in its own registries; one of ``VERL_USE_EXTERNAL_MODULES``.

``recorded`` samples nothing: it returns random tokens with log-probs near those of a model with nearly equal logits. A
tenth of them is off by a factor of 3.3, up or down. ``vllm_cpu`` is a ``vllm.LLM`` in bfloat16. verl's own ``vllm``
writes weights into the tensors of vLLM's model, which on a CPU are packed and empty. Both get what verl sends as files.
"""

from __future__ import annotations

import collections
import functools
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from verl.utils import distributed
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

try:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry
except ImportError:  # verl 0.8.0 has no platforms: a device is a module of PyTorch.
    PlatformBase, PlatformRegistry = object, None

VOCABULARY = 32
END = 1


class PlatformCPU(PlatformBase):
    """What verl asks of a device. It has no platform of this kind."""

    device_name, vendor_name = "cpu", "cpu"
    device_module = types.SimpleNamespace(
        **{name: lambda *_, **__: 0 for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated")},
        **{name: lambda *_, **__: 0 for name in ("memory_reserved", "empty_cache", "synchronize", "ipc_collect")},
        is_available=lambda: False,
        get_device_name=lambda *_: "CPU",
        mem_get_info=lambda *_: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nothing(self, *_: Any, **__: Any) -> None:
        """There is nothing to do."""

    set_device = synchronize = manual_seed = manual_seed_all = nothing
    set_allocator_settings = empty_cache = nvtx_range = profiler_start = profiler_stop = cudart = nothing


if PlatformRegistry is None:
    from verl.utils import attention_utils, npu_flash_attn_utils
    from verl.workers.engine import base

    vars(torch.cpu).update(vars(PlatformCPU.device_module))
    base.get_device_name = lambda: "cuda"
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    attention_utils._get_attention_functions = lambda: [getattr(npu_flash_attn_utils, name) for name in names]
else:
    PlatformRegistry.register(platform="cpu")(PlatformCPU)


class Engine:
    """A server of verl's, without a model: the same tokens and log-probs in every run."""

    def __init__(self) -> None:
        self.asked: collections.Counter[tuple[int, ...]] = collections.Counter()

    async def generate(self, prompt_ids: list[int], **_: Any) -> TokenOutput:
        """Tokens by the prompt and how often it was asked before: requests arrive in any order."""
        prompt = tuple(prompt_ids)
        self.asked[prompt] += 1
        draw = np.random.default_rng([*prompt, self.asked[prompt]])
        length = int(draw.integers(4, 13))
        tokens = draw.integers(2, VOCABULARY, size=length)
        tokens[-1] = END
        off = draw.choice([-1.2, 0.0, 1.2], p=[0.05, 0.9, 0.05], size=length) + draw.normal(0.0, 0.05, size=length)
        log_probs = np.minimum(-np.log(VOCABULARY) + off, -1e-3)
        return TokenOutput(
            token_ids=tokens.tolist(),
            log_probs=log_probs.tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0},
        )

    async def nothing(self, *_: Any, **__: Any) -> None:
        """It has no memory to free, and no cache."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class VLLM(Engine):
    """vLLM itself, a request at a time and with a seed of its own: equal weights give equal responses in every run."""

    def __init__(self, model: str, max_tokens: int) -> None:
        from vllm import LLM

        super().__init__()
        self.max_tokens, self.loaded = max_tokens, ""
        self.engine = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=64,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            distributed_executor_backend="uni",
            enforce_eager=True,
            disable_log_stats=True,
        )

    async def generate(self, prompt_ids: list[int], *, sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        """One response, after the newest weights."""
        from vllm import SamplingParams

        newest = max(Path(os.environ["RUN"]).glob("*.pt"), key=lambda path: int(path.stem))
        if newest.name != self.loaded:
            weights = list(torch.load(newest).items())
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.engine.reset_prefix_cache()
            self.loaded = newest.name
        prompt = tuple(prompt_ids)
        self.asked[prompt] += 1
        given = {key: sampling_params[key] for key in ("temperature", "top_p", "top_k", "repetition_penalty")}
        parameters = SamplingParams(
            **given,
            max_tokens=self.max_tokens,
            seed=hash((*prompt, self.asked[prompt])) % 2**31,
            stop_token_ids=[END],
            logprobs=0,
            detokenize=False,
        )
        (output,) = self.engine.generate([{"prompt_token_ids": prompt_ids}], parameters, use_tqdm=False)
        answer, step = output.outputs[0], int(newest.stem)
        places = zip(answer.token_ids, answer.logprobs, strict=True)
        return TokenOutput(
            token_ids=list(answer.token_ids),
            log_probs=[place[token].logprob for token, place in places],
            stop_reason="completed",
            extra_fields={"global_steps": step, "min_global_steps": step, "max_global_steps": step},
        )


class Replica(RolloutReplica):
    """What verl's trainer sees of the engine."""

    async def launch_servers(self) -> None:
        """One actor."""
        is_real = self.config.name == "vllm_cpu"
        engine, given = (VLLM, (self.model_config.path, self.config.response_length)) if is_real else (Engine, ())
        self.servers = [ray.remote(engine).options(num_cpus=0).remote(*given)]
        self._server_handle, self._server_address = self.servers[0], f"{self.config.name}:0"


class Adapter(BaseRollout):
    """What a worker of verl sees of the engine."""

    async def resume(self, tags: list[str]) -> None:
        """It has no memory to take."""

    async def release(self) -> None:
        """It has no memory to free."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Write them, whole at once."""
        path = Path(os.environ["RUN"]) / f"{global_steps}.pt"
        torch.save({name: tensor.clone() for name, tensor in weights}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


# It would ask for "cpu:gloo,cpu:gloo", which PyTorch refuses.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)
# The third is a recorded engine too: rLLM takes no other names than verl's.
for name in ("recorded", "vllm_cpu", "sglang"):
    _ROLLOUT_REGISTRY[name, "async"] = "on_cpu.Adapter"
    RolloutReplicaRegistry.register(name, lambda: Replica)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The reward: how many tokens are even."""
    return float(sum(int(word) % 2 == 0 for word in solution_str.split() if word.isdigit()))
