# SPDX-License-Identifier: Apache-2.0
"""SGLang as the rollout engine of the example, in its own process (``engine_process.py``)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor

from .block_quantization import SCALE_SUFFIX, BlockQuantizer
from .engine import Completion, RolloutEngine
from .engine_process import TORCHRUN, EngineProcess, serve
from .engine_settings import CPU_SETTINGS, FIXED, Scalar, check_settings, machine_settings

__all__ = ["CPU_SETTINGS", "HIDDEN_FROM_ENGINE", "INSTALL_HINT", "SGLangEngine"]

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# SGLang stores these projections as one tensor, in this order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# SGLang ends a response up to two tokens before its context length, and rejects prompts within six tokens of it, so
# this many are added.
CONTEXT_MARGIN = 8

# Recorded for each run with SGLang's final values, even if not set.
RECORDED_SETTINGS = ("attention_backend", "kv_cache_dtype", "mem_fraction_static", "quantization", "sampling_backend")

IDLE_TIMEOUT = 60.0

TOP_P_WARNING = (
    "top_p={top_p}: SGLang samples from a part of the distribution, but reports log-probs of the whole "
    "distribution, not renormalized over that part. They are not the log-probs of the sampling policy"
)

# Variables of the trainer's torchrun job, and a switch that makes SGLang report log-probs at temperature 1.
HIDDEN_FROM_ENGINE = TORCHRUN | {"SGLANG_RETURN_ORIGINAL_LOGPROB"}

INSTALL_HINT = (
    "the engine sglang needs sglang, which is not installed: examples/run_sglang.sh and "
    "examples/true_on_policy_sglang.sh make an environment with it (on a CPU from requirements/sglang-cpu.txt and "
    "sglang-cpu-nodeps.txt)"
)


class SGLangEngine(RolloutEngine):
    """A ``sglang.Engine`` that takes and returns token ids, without a tokenizer.

    Args:
        hf_config: Configuration of the model. Its ``eos_token_id``, if any, ends a response.
        seed: Seed of the engine's sampler.
        workdir: Directory for the configuration and the engine's log, created if missing.
        dtype: Dtype of weights and activations.
        settings: Arguments of ``sglang.Engine``, which override those for the machine. With ``quantization: fp8`` every
            update sends block-quantized weights.
        max_batch_tokens: Prompt tokens per forward; longer prompts are split into chunks. None: SGLang's default.
        run_scheduler: Function for the engine's scheduler process, called instead of SGLang's ``run_scheduler_process``
            with the same arguments. A process without the trainer's modules must be able to import it by name.

    Attributes:
        settings: Arguments of ``sglang.Engine`` and a few more settings, with their final values.

    Raises:
        ModuleNotFoundError: If sglang is not installed.
        ValueError: If SGLang has no such setting, or the example sets it.
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
        max_batch_tokens: int | None = None,
        run_scheduler: Callable[..., None] | None = None,
    ) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise ModuleNotFoundError(INSTALL_HINT)
        self._workdir = Path(workdir).resolve()
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._dtype = dtype
        self._tied = bool(hf_config.tie_word_embeddings)
        self._context_length: int = hf_config.max_position_embeddings
        self._vocab_size: int = hf_config.vocab_size
        config_dir = self._workdir / "config"
        hf_config.save_pretrained(config_dir)
        self._version: int | None = None

        log = self._workdir / "sglang.log"
        self._worker = EngineProcess("SGLang", serve=_serve, log=log, hidden=HIDDEN_FROM_ENGINE)
        try:
            started = self._worker.call(
                "start",
                config=str(config_dir),
                seed=seed,
                dtype=dtype,
                settings=settings or {},
                max_batch_tokens=max_batch_tokens,
                run_scheduler=run_scheduler,
            )
        except BaseException:
            self.close()
            raise
        self._shapes: dict[str, tuple[int, ...]] = started["shapes"]
        self.settings: dict[str, Scalar] = started["settings"]
        self._quantizer = _quantizer(self.settings, self._shapes)

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, top_p: float = 1.0
    ) -> list[Completion]:
        """Sample one response for each prompt, see ``RolloutEngine``.

        Args:
            prompts: Token ids.
            max_new_tokens: Length at which sampling stops, at least 1.
            temperature: Divides the logits, above 0. The log-probs are those of ``log_softmax(logits / temperature)``.
            top_p: Share of the distribution to sample from; the log-probs stay those of the whole distribution.

        Raises:
            ValueError: If an argument is out of range, or the engine rejected a request.
            RuntimeError: If no weights were set, a response contradicts its request, or the engine died.
        """
        if self._version is None:
            raise RuntimeError("the SGLang engine has no weights of the trainer: call update_weights first")
        if temperature <= 0 or max_new_tokens < 1:
            raise ValueError(f"{temperature=} must be above 0 and {max_new_tokens=} at least 1")
        if not 0 < top_p <= 1:
            raise ValueError(f"{top_p=} must be above 0 and at most 1")
        if top_p < 1:
            warnings.warn(TOP_P_WARNING.format(top_p=top_p), stacklevel=2)
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self._context_length - max_new_tokens:
                raise ValueError(
                    f"request {index}: a prompt of {len(prompt)} tokens; with {max_new_tokens=} it must have between 1 "
                    f"and {self._context_length - max_new_tokens} (max_position_embeddings={self._context_length})"
                )
            # SGLang pads the vocabulary, and accepts ids in the padding as tokens.
            if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
                raise ValueError(
                    f"request {index}: token ids from {min(prompt)} to {max(prompt)}, vocab_size={self._vocab_size}"
                )
        if not prompts:
            return []
        sampling_params = {
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "top_p": top_p,
            "top_k": -1,
            "min_p": 0.0,
        }
        responses = self._worker.call("generate", input_ids=prompts, sampling_params=sampling_params)
        if len(responses) != len(prompts):
            raise RuntimeError(f"SGLang answered {len(responses)} of {len(prompts)} requests")
        return [
            _checked_completion(
                index, response, prompt_length=len(prompt), max_new_tokens=max_new_tokens, version=self._version
            )
            for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]

    def update_weights(self, state_dict: dict[str, Tensor], *, version: int) -> None:
        """Send weights, cast to the engine's dtype or quantized, and compare them with every tensor of the engine.

        SGLang skips unknown names and reports success, so a success proves nothing. The engine returns its tensors
        through a file, because its ``get_weights_by_name`` supports neither Qwen2 nor Qwen3.

        Args:
            state_dict: Every tensor of the model by transformers name.
            version: Recorded in each later completion.

        Raises:
            ValueError: If a tensor is missing, unknown, of another shape or not finite. The engine is unchanged.
            RuntimeError: If the engine does not have these weights afterwards. It does not generate until an update
                succeeds.
        """
        self._check_names_and_shapes(state_dict)
        weights = {
            name: tensor.detach().cpu()
            for name, tensor in state_dict.items()
            if not (self._tied and name == "lm_head.weight")
        }
        if self._quantizer is not None:
            weights = self._quantizer.quantize(weights)
        weights = {name: self._cast(name, tensor).contiguous() for name, tensor in weights.items()}
        self._version = None
        held_path = self._workdir / "held.safetensors"
        self._worker.call("update", weights=save(weights), version=str(version), held_path=str(held_path))
        held = load_file(held_path)
        held_path.unlink()
        _check_held(_as_held(weights), held, version)
        self._version = version

    def flush_cache(self) -> None:
        """Clear the keys and values of earlier prompts."""
        self._worker.call("flush_cache")

    def call_scheduler(self, method: str, **arguments: Any) -> None:
        """Call a method of the engine's scheduler, see ``run_scheduler``.

        Raises:
            RuntimeError: If it failed. This ends the engine.
        """
        self._worker.call("call_scheduler", method=method, arguments=arguments)

    def close(self) -> None:
        """Stop the engine and every process that it started. A second call does nothing."""
        self._worker.close()

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """Cast to the engine's dtype, unless quantized or a scale."""
        return tensor if tensor.dtype.itemsize == 1 or name.endswith(SCALE_SUFFIX) else tensor.to(self._dtype)

    def _check_names_and_shapes(self, state_dict: dict[str, Tensor]) -> None:
        for name in sorted(self._shapes.keys() | state_dict.keys()):
            if self._tied and name == "lm_head.weight":
                continue
            if name not in state_dict:
                raise ValueError(f"update_weights: {name} {list(self._shapes[name])} is missing from the state dict")
            if name not in self._shapes:
                raise ValueError(f"update_weights: the engine's model has no {name}")
            if tuple(state_dict[name].shape) != self._shapes[name]:
                raise ValueError(
                    f"update_weights: {name} has shape {list(state_dict[name].shape)}, "
                    f"the engine's model has {list(self._shapes[name])}"
                )
            if not state_dict[name].isfinite().all():
                raise ValueError(f"update_weights: {name} has values that are not finite")


def _checked_completion(
    index: int, response: dict[str, Any], *, prompt_length: int, max_new_tokens: int, version: int
) -> Completion:
    """Convert one response of the engine. A RuntimeError shows where it contradicts its request."""
    token_ids, entries, meta = response["output_ids"], response["output_token_logprobs"], response["meta"]
    log_probs = [log_prob for log_prob, _ in entries]
    finish = meta["finish_reason"] or {"type": None}

    def check(holds: bool, found: str) -> None:
        if not holds:
            raise RuntimeError(f"SGLang, request {index}: {found}")

    check(
        finish["type"] in ("stop", "length"),
        f"finish reason {finish['type']!r} instead of 'stop' or 'length': {finish.get('message')}",
    )
    check(meta["prompt_tokens"] == prompt_length, f"{meta['prompt_tokens']} prompt tokens, {prompt_length} were sent")
    check(
        1 <= len(token_ids) <= max_new_tokens, f"{len(token_ids)} tokens, between 1 and {max_new_tokens} were asked for"
    )
    check(
        finish["type"] != "length" or len(token_ids) == max_new_tokens,
        f"stopped at the limit after {len(token_ids)} tokens, the limit is {max_new_tokens}",
    )
    check(len(log_probs) == len(token_ids), f"{len(log_probs)} log-probs for {len(token_ids)} tokens")
    for position, (token_id, (log_prob, scored_id)) in enumerate(zip(token_ids, entries, strict=True)):
        check(
            scored_id == token_id,
            f"position {position}: the log-prob is of token {scored_id}, the token is {token_id}",
        )
        check(math.isfinite(log_prob), f"position {position}: log-prob {log_prob} of token {token_id}")
    check(meta["weight_version"] == str(version), f"made by weights {meta['weight_version']!r}, current is {version!r}")
    return Completion(token_ids=token_ids, log_probs=log_probs, weight_version=version)


def _as_held(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and join weights with transformers names to SGLang's format."""
    whole_of = {part: whole for whole, parts in FUSED.items() for part in parts}
    held: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        part = next((component for component in name.split(".") if component in whole_of), None)
        if part is None:
            held[name] = tensor
            continue
        whole = whole_of[part]
        if part == FUSED[whole][0]:
            held[name.replace(part, whole)] = torch.cat([weights[name.replace(part, p)] for p in FUSED[whole]])
    return held


def _check_held(expected: dict[str, Tensor], held: dict[str, Tensor], version: int) -> None:
    """Raise a RuntimeError unless the engine has exactly the expected tensors.

    Its vocabulary may have more rows, because SGLang pads it.
    """
    if "model.embed_tokens.weight" not in held and "lm_head.weight" in held:
        # Tied weights: SGLang may write the tensor under either name.
        held = {"model.embed_tokens.weight" if n == "lm_head.weight" else n: t for n, t in held.items()}
    prefix = f"SGLang does not have the weights of version {version}"
    if differing := sorted(expected.keys() ^ held.keys()):
        side = "only in what was sent" if differing[0] in expected else "only in the engine"
        raise RuntimeError(f"{prefix}: {differing[0]} is {side}")
    for name, want in expected.items():
        have = held[name]
        if have.dtype != want.dtype or have.shape[1:] != want.shape[1:] or have.shape[0] < want.shape[0]:
            raise RuntimeError(
                f"{prefix}: {name} is {have.dtype} {list(have.shape)}, expected {want.dtype} {list(want.shape)}"
            )
        have = have[: want.shape[0]]
        wrong = have.view(torch.uint8) != want.view(torch.uint8) if want.dtype.itemsize == 1 else have != want
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise RuntimeError(
                f"{prefix}: {int(wrong.sum())} of {wrong.numel()} values of {name} differ, first at {list(where)}: "
                f"{have[where].item()} instead of {want[where].item()}"
            )


def _check_success(answer: tuple[bool, str]) -> None:
    """Raise a RuntimeError if SGLang reports that a step of a weight update failed."""
    success, message = answer
    if not success:
        raise RuntimeError(f"SGLang could not update its weights: {message}")


def _resolved(server_args: Any) -> dict[str, Scalar]:
    """Return all settings with the values that SGLang uses. Version 0.5.17 overwrites the given values with them."""
    resolved = server_args.resolved_dict() if hasattr(server_args, "resolved_dict") else vars(server_args)
    return {key: value if isinstance(value, Scalar) else str(value) for key, value in resolved.items()}


def _quantizer(settings: Mapping[str, Scalar], shapes: Mapping[str, tuple[int, ...]]) -> BlockQuantizer | None:
    """Return the quantizer of the weights, if the settings need one."""
    method = settings.get("quantization")
    if method is None:
        return None
    if method == "blockwise_int8":
        raise ValueError(f"quantization={method!r}: SGLang cannot update such weights once it has loaded them; use fp8")
    return BlockQuantizer.create(str(method), shapes)


class _Worker:
    """The engine's side of the process: one method per command."""

    def __init__(self) -> None:
        self.engine: Any = None

    def start(
        self,
        *,
        config: str,
        seed: int,
        dtype: torch.dtype,
        settings: dict[str, Scalar],
        max_batch_tokens: int | None,
        run_scheduler: Callable[..., None] | None,
    ) -> dict[str, Any]:
        """Start the engine on random weights. Return its settings, and the shape of every tensor by name."""
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            sys.path.insert(0, str(Path(__file__).resolve().parent / "sglang_cpu"))

        # Otherwise a context longer than that of the configuration is rejected. Positions stay within it.
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"

        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
        from transformers import AutoConfig, AutoModelForCausalLM

        known = inspect.signature(ServerArgs).parameters.keys()
        version = importlib.metadata.version("sglang")
        check_settings(settings, known=known, fixed=FIXED["sglang"], engine=f"SGLang {version}")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=dtype)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        quantizer = _quantizer(settings, shapes)
        if quantizer is not None:
            quantizer.write_config(Path(config))
            if not on_gpu and run_scheduler is None:
                from .sglang_cpu_products import run_scheduler
        if run_scheduler is not None:
            Engine.run_scheduler_process_func = staticmethod(run_scheduler)
        head_dim = getattr(model.config, "head_dim", model.config.hidden_size // model.config.num_attention_heads)
        own = {
            "model_path": config,
            # Read no weights: the trainer sends them before the first request.
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": str(dtype).removeprefix("torch."),
            "context_length": model.config.max_position_embeddings + CONTEXT_MARGIN,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "chunked_prefill_size": max_batch_tokens,
            "random_seed": seed,
            "log_level": "warning",
        }
        quantization = quantizer.settings() if quantizer is not None else {}
        passed = own | machine_settings(on_gpu=on_gpu, head_dim=head_dim, known=known) | quantization | settings
        self.engine = Engine(**passed)
        resolved = _resolved(self.engine.server_args)
        used = {key: resolved[key] for key in sorted({*passed, *RECORDED_SETTINGS} & resolved.keys())}
        return {
            "shapes": shapes,
            "settings": used | ({"weight_block_size": quantizer.block_size} if quantizer is not None else {}),
        }

    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of SGLang's responses that the trainer's side uses."""
        responses = self.engine.generate(input_ids=input_ids, sampling_params=sampling_params, return_logprob=True)
        return [
            {
                "output_ids": list(response["output_ids"]),
                "output_token_logprobs": [entry[:2] for entry in response["meta_info"]["output_token_logprobs"]],
                "meta": {
                    key: response["meta_info"][key] for key in ("finish_reason", "prompt_tokens", "weight_version")
                },
            }
            for response in responses
        ]

    def update(self, *, weights: bytes, version: str, held_path: str) -> None:
        """Load weights in safetensors format, and write the engine's tensors to ``held_path``."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        self.flush_cache()
        # Sent through shared memory, so the tensors must live until the scheduler has read them.
        named_tensors = list(load(weights).items())
        # ``Engine.update_weights_from_tensor`` has no version argument; this is the function that it calls.
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(named_tensors)], weight_version=version
        )
        with self._weight_update():
            updated = self.engine.loop.run_until_complete(
                self.engine.tokenizer_manager.update_weights_from_tensor(request, None)
            )
        _check_success(updated)
        path = Path(held_path)
        self.engine.save_sharded_model(path=str(path.parent), pattern=path.name, max_size=None)

    @contextmanager
    def _weight_update(self) -> Iterator[None]:
        """Begin and end an update, as newer versions of SGLang require."""
        if not hasattr(self.engine, "begin_weight_update"):
            yield
            return
        _check_success(self.engine.begin_weight_update())
        try:
            yield
        finally:
            # Also after a failure, because otherwise a second update could not begin.
            ended = self.engine.end_weight_update()
        _check_success(ended)

    def call_scheduler(self, *, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the scheduler with plain arguments."""
        self.engine.collective_rpc(method, **arguments)

    def flush_cache(self) -> None:
        """Clear cached prefixes after the scheduler has finished its last request."""
        request = self.engine.tokenizer_manager.flush_cache(timeout_s=IDLE_TIMEOUT)
        flushed = self.engine.loop.run_until_complete(request)
        if not flushed.success:
            raise RuntimeError(f"SGLang is not idle after {IDLE_TIMEOUT} seconds: {flushed.message}")

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        if self.engine is not None:
            self.engine.shutdown()


def _serve(descriptor: int) -> None:
    serve(descriptor, _Worker())
