# SPDX-License-Identifier: Apache-2.0
"""Inference engines that sample the responses, with their own kernels, dtype, and log-probs."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import attn_mask_is_needed
from transformers.models.auto import AutoModelForCausalLM

from .engine_settings import Scalar

EngineName = Literal["transformers", "sglang", "vllm"]
# Names of continuous batching with torch's attention; the first before transformers 5.19.
SDPA = "paged|sdpa" if "paged|sdpa" in AttentionInterface().valid_keys() else "sdpa"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response.

    Attributes:
        token_ids: The sampled tokens.
        log_probs: Their log-probs under the distribution that they were sampled from, temperature included.
        weight_version: Version of the weights that sampled them.
    """

    token_ids: list[int]
    log_probs: list[float]
    weight_version: int


class RolloutEngine(Protocol):
    """An inference engine with its own copy of the policy.

    Attributes:
        settings: Its settings, for the record of the run.
    """

    settings: dict[str, Scalar]

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, top_p: float = 1.0
    ) -> list[Completion]:
        """Sample one response for each prompt, in order.

        Args:
            prompts: Token ids.
            max_new_tokens: Length at which sampling stops; it stops earlier only at an end token of the config.
            temperature: Divides the logits.
            top_p: Share of the distribution to sample from, 1 for all. Below 1, SGLang's log-probs are still those of
                the whole distribution, and vLLM's are renormalized over the share.
        """
        ...

    def update_weights(self, state_dict: dict[str, Tensor], *, version: int) -> None:
        """Load new weights: transformers names, float32. Later completions have this ``version``."""
        ...

    def close(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""
        ...


class TransformersEngine:
    """Continuous batching of transformers in bfloat16: paged KV cache, own sampler and log-probs.

    It samples from torch's default generator: save and restore it to repeat a run.

    Attributes:
        cuda_graphs: Whether to replay batches as CUDA graphs, which do not call hooks of modules. Default: on a GPU,
            with an attention without a mask, because padding would widen a mask.
    """

    _PAGE_SIZE = 128
    _POLL_SECONDS = 1.0

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = SDPA,
        max_batch_tokens: int = 4096,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=dtype)
        self._attention = attention
        self._model.eval().to(device)
        # The default of transformers is flash attention only.
        self.cuda_graphs = device == "cuda" and not attn_mask_is_needed(self._model.config)
        self._max_batch_tokens = max_batch_tokens
        self.settings: dict[str, Scalar] = {"dtype": str(dtype), "attention": attention, "device": device}
        torch.manual_seed(seed)
        self._version = 0
        self._manager = None
        self._capacity = (0, 0)
        self._loop_settings = (0.0, False)

    @property
    def model(self) -> PreTrainedModel:
        """The model that generates."""
        return self._model

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, top_p: float = 1.0
    ) -> list[Completion]:
        """Sample one response per prompt from the whole distribution, see ``RolloutEngine``."""
        if top_p != 1:
            raise ValueError(f"{top_p=}: the engine transformers samples from the whole distribution")
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        self._start(num_requests=len(prompts), max_length=longest, temperature=temperature)
        # Submit all requests at once, so that batches and therefore samples do not depend on timing.
        with self._manager.pause():
            request_ids = self._manager.add_requests(prompts, max_new_tokens=max_new_tokens)
        outputs = {}
        while len(outputs) < len(prompts):
            output = self._manager.get_result(timeout=self._POLL_SECONDS)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("The generation thread of transformers stopped; its error is logged above.")
            elif output.error is not None:
                raise RuntimeError(f"transformers could not finish {output.request_id}: {output.error}")
            elif output.is_finished():
                outputs[output.request_id] = output
        return [
            Completion(
                token_ids=list(outputs[request_id].generated_tokens),
                log_probs=list(outputs[request_id].logprobs),
                weight_version=self._version,
            )
            for request_id in request_ids
        ]

    @torch.no_grad()
    def update_weights(self, state_dict: dict[str, Tensor], *, version: int) -> None:
        """Copy new weights into the running model, see ``RolloutEngine``."""
        own = self._model.state_dict()
        if own.keys() != state_dict.keys():
            raise ValueError(f"The weights do not fit the model: {sorted(own.keys() ^ state_dict.keys())}")
        with self._manager.pause() if self._manager is not None else nullcontext():
            for name, weight in state_dict.items():
                own[name].copy_(weight)
        self._version = version

    def close(self) -> None:
        """Stop the generation thread."""
        if self._manager is not None:
            self._manager.destroy()
            self._manager = None

    def _start(self, *, num_requests: int, max_length: int, temperature: float) -> None:
        """Keep one generation loop for all calls. Only a larger workload or other settings need a new loop."""
        enough = num_requests <= self._capacity[0] and max_length <= self._capacity[1]
        settings = temperature, self.cuda_graphs
        if self._manager is not None and enough and settings == self._loop_settings:
            return
        self.close()
        self._capacity, self._loop_settings = (num_requests, max_length), settings
        num_pages = num_requests * -(-max_length // self._PAGE_SIZE)
        end_token = self._model.config.eos_token_id
        generation_config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1 if end_token is None else end_token,
            pad_token_id=0,
        )
        batching_config = ContinuousBatchingConfig(
            return_logprobs=True,
            page_size=self._PAGE_SIZE,
            num_blocks=num_pages,
            # CUDA graphs start with a request of this many tokens, which must fit.
            max_batch_tokens=min(self._max_batch_tokens, num_pages * self._PAGE_SIZE),
            max_requests_per_batch=num_requests,
            use_cuda_graph=self.cuda_graphs,
            # Preparing a batch before the last one is done would depend on timing.
            use_async_batching=False,
            # This is for tensor parallelism, which this model does not use, although torchrun's environment suggests
            # it.
            disable_nccl_graph_mixing=False,
            # A shared prefix would survive a weight update, but its cached keys belong to the previous weights.
            allow_block_sharing=False,
        )
        # A new generation loop seeds the default generator.
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            # From transformers 5.19 on, it rejects unknown attention names at its start.
            self._model.set_attn_implementation("paged|eager")
            self._manager = self._model.init_continuous_batching(generation_config, batching_config)
            self._model.set_attn_implementation(self._attention)
            self._manager.warmup()
        self._manager.start()


def create_engine(
    name: EngineName,
    *,
    hf_config: PretrainedConfig,
    seed: int,
    workdir: Path,
    settings: dict[str, Scalar] | None = None,
) -> RolloutEngine:
    """Start an engine with arbitrary weights; call ``update_weights`` before sampling.

    Args:
        name: ``transformers``, ``sglang`` or ``vllm``.
        hf_config: Configuration of the model.
        seed: Seed of the sampler.
        workdir: A folder for files of the engine.
        settings: Settings of the engines ``sglang`` and ``vllm``; they override those of the example.

    Raises:
        ValueError: If there is no such engine, or it has no such setting.
    """
    if name == "transformers":
        if settings:
            raise ValueError("the engine transformers has no settings")
        return TransformersEngine(hf_config, seed=seed)
    if name == "sglang":
        from .sglang_engine import SGLangEngine

        return SGLangEngine(hf_config=hf_config, seed=seed, workdir=workdir, settings=settings)
    if name == "vllm":
        from .vllm_engine import VLLMEngine

        return VLLMEngine(hf_config=hf_config, seed=seed, workdir=workdir, settings=settings)
    raise ValueError(f"rollout engine {name!r}: expected 'transformers', 'sglang' or 'vllm'")
