# SPDX-License-Identifier: Apache-2.0
"""SGLang's model runner in this process, for many models one after the other.

What produces tokens and log-probs is SGLang's own: model code, attention backend, key-value cache, CUDA graphs and
sampler. Left out is what stands around it: server, scheduler process, tokenizer, cache of prefixes. The calls are those
of ``sglang.benchmark.one_batch``. Written for SGLang 0.5.17 on a GPU and 0.5.23 on a CPU.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from grpo.block_quantization import BlockQuantizer
from grpo.sglang_cpu_products import use_float32_products
from grpo.sglang_engine import CPU_SETTINGS, FUSED
from onpolicy.sglang_scheduler import EVERYTHING, align
from safetensors.torch import load_file, save_file
from torch import Tensor

from .engines import kept_tokens

GPU_SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "disable_prefill_cuda_graph": True,
    "disable_overlap_schedule": True,
    # An upper bound only: the cache is as large as the batch needs. SGLang takes what other processes allocate while
    # it starts for its own, and ends above this share.
    "mem_fraction_static": 0.9,
    # Others reorder the experts' weights after loading, which load() would not do.
    "moe_runner_backend": "triton",
}
# SGLang has kernels for the rotation of these on CUDA.
ROTATING_HEAD_DIMS = (64, 128, 256, 512)
# Log-probs are those at the sampling temperature.
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
STEPS_BETWEEN_LOOKS = 8
# Of an 8-bit cache, which some models have beside 8-bit weights; 1 where the checkpoint has none.
CACHE_SCALES = ("attn.k_scale", "attn.v_scale")
# Qwen3-MoE's names, and Mixtral's.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
UP, DOWN = ("up_proj", "w3"), ("down_proj", "w2")
# What chooses the experts of a layer, in Qwen3-MoE and in Mixtral.
CHOOSING = (".mlp.topk", ".block_sparse_moe.topk")


class Generated(NamedTuple):
    """What the runner returns; P is the length of a row's prompt, and L that of all responses.

    Attributes:
        ids: [B, L], int64.
        logprobs: [B, L], float32: the sampler's, of softmax(logits / temperature).
        experts: For each row [P + L - 1, layers, experts of a token], int64, of every token but the last, which is no
            input. None without experts.
        kept: [B, L, vocabulary], bool: the tokens that top-p kept. None where it keeps all.
        log_mass: [B, L], float32: log of the probability of the kept tokens together.
    """

    ids: Tensor
    logprobs: Tensor
    experts: list[Tensor] | None
    kept: Tensor | None
    log_mass: Tensor | None


class SGLangRunner:
    """Samples responses of one length from weights that change between calls; one runner at a time in a process.

    SGLang makes the default process group of the process, and ``close`` destroys it. Not for a process of torchrun,
    whose rendezvous that group would join.

    Args:
        hf_config: A Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral configuration. Tied embeddings are one weight: of the
            embedding. SGLang's Mixtral has no tied embeddings.
        device: A CUDA device or the CPU.
        batch_size: Prompts of every call. CUDA graphs are captured for this size only.
        max_length: Tokens of a prompt and its response, at most the configuration's ``max_position_embeddings``.
        settings: Arguments of SGLang's ``ServerArgs``, above the defaults here: ``{"kv_cache_dtype": "fp8_e5m2"}``.
        quantizer: The checkpoint is quantized by it, and ``load`` takes what its ``quantize`` returns.
        cache_scale: Of keys and values in a cache of 8 bits.
        seed: Of the first weights and of the sampler, which has its own stream of random numbers.

    Raises:
        ValueError: ``max_length`` is too long, or the weights would be quantized, which ``load`` cannot write.
        RuntimeError: The process already has a process group, or SGLang's model has tensors that are not in the
            transformers model, or of another shape: on a CPU it pads experts' widths to multiples of 64.
    """

    def __init__(
        self,
        hf_config: Any,
        *,
        device: torch.device,
        batch_size: int,
        max_length: int,
        settings: Mapping[str, Any] | None = None,
        quantizer: BlockQuantizer | None = None,
        cache_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        settings = dict(settings or {})
        if max_length > hf_config.max_position_embeddings:
            raise ValueError(f"max_length is {max_length}, the model has {hf_config.max_position_embeddings} positions")
        if settings.get("quantization"):
            raise ValueError("quantization: SGLang stores such weights in another form: give a quantizer instead")
        if torch.distributed.is_initialized():
            raise RuntimeError("SGLang needs a process without a process group")
        self._device = device
        self._batch_size = batch_size
        self._max_length = max_length
        self._vocab_size: int = hf_config.vocab_size
        self._differs: Tensor | None = None
        self.used_cuda_graphs: bool | None = None
        self._num_calls = 0
        self._alignment = ExitStack()

        on_cpu = device.type == "cpu"
        if on_cpu:
            _prepare_cpu()
            use_float32_products()
        elif getattr(hf_config, "num_experts", 0) and hf_config.head_dim not in ROTATING_HEAD_DIMS:
            _write_cache_apart()
        os.environ.pop(ORIGINAL_LOGPROB, None)
        # A dense model of billions of weights is not drawn, written and read again.
        is_empty = not _is_mixture(hf_config)
        with tempfile.TemporaryDirectory(prefix="sglang-runner-") as folder:
            shapes = _write_checkpoint(hf_config, Path(folder), quantizer, seed=seed, is_empty=is_empty)
            arguments: dict[str, Any] = {
                "model_path": folder,
                # With quantized weights it would draw scales of the cache too.
                **({"load_format": "dummy"} if is_empty and quantizer is None else {}),
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "context_length": max_length,
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_radix_cache": True,
                "page_size": 1,
                "random_seed": seed,
                "log_level": "error",
                "cuda_graph_bs_decode": [batch_size],
                "cuda_graph_max_bs_decode": batch_size,
                **(CPU_SETTINGS if on_cpu else GPU_SETTINGS),
                "max_total_tokens": batch_size * max_length,
                "max_running_requests": batch_size,
                **(quantizer.settings() if quantizer else {}),
                **settings,
            }
            self._deterministic = bool(arguments.get("enable_deterministic_inference"))
            self._runner = None
            with _kept_random_state(device), self._own_arithmetic():
                try:
                    self._runner = _start(arguments, gpu_id=device.index or 0)
                finally:
                    # A failed start leaves its process groups, with which no other could start.
                    if self._runner is None:
                        _leave_groups()
        self._rows = _engine_rows(dict(self._runner.model.named_parameters()), shapes)
        # SGLang gives up the loaders of int8 weights once it has used them, and its Llama looks for the scales of
        # blocks under another name than its own.
        self._writes_rows = quantizer is not None and (
            quantizer.method == "blockwise_int8" or hf_config.model_type == "llama"
        )
        self._chosen, self._num_routers = _record_experts(self._runner.model)
        self._chosen_in_graph: list[Tensor] = []
        if cache_scale != 1:
            _scale_cache(self._runner.model, cache_scale, device)
        is_captured = device.type == "cuda" and not arguments.get("disable_cuda_graph")
        if is_captured and (self._num_routers or cache_scale != 1):
            self._capture()
        self._random_state = _seeded_state(device, seed)
        self._clear_pools()

    def align(self) -> None:
        """Let the engine compute as an aligned trainer does, until it is closed."""
        align(self._runner, self._alignment, EVERYTHING)
        if self._device.type == "cuda":
            self._capture()

    def widen_cache(self) -> None:
        """Make room for keys and values in the model's dtype beside those that are rounded, for ``wide_cache``."""
        pool, dtype, buffers = self._runner.token_to_kv_pool, self._runner.dtype, ("k_buffer", "v_buffer")
        self._narrow: dict[str, Any] = {name: getattr(pool, name) for name in ("dtype", "store_dtype", *buffers)}
        self._wide: dict[str, Any] = {"dtype": dtype, "store_dtype": dtype}
        for name in buffers:
            self._wide[name] = [torch.zeros_like(layer, dtype=dtype) for layer in self._narrow[name]]

    @contextmanager
    def wide_cache(self) -> Iterator[None]:
        """Inside, keys and values are not rounded. No graph is replayed: that of decodes has the other cache in it."""
        runner = self._runner
        graph, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
        vars(runner.token_to_kv_pool).update(self._wide)
        try:
            yield
        finally:
            vars(runner.token_to_kv_pool).update(self._narrow)
            runner.decode_cuda_graph_runner = graph

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights, and forget the keys and values of the last ones.

        The comparison of what the engine then holds with what was given runs on the device; the next call reads it.

        Args:
            weights: One tensor of the configuration's shape per transformers name, on any device.

        Raises:
            ValueError: A name or a shape is missing, unknown or different.
            RuntimeError: After the last ``load`` the engine did not hold what was given, which may not be finite.
        """
        self._check_held()
        if differing := sorted(weights.keys() ^ self._rows.keys()):
            side = "missing" if differing[0] in self._rows else "unknown to the model"
            raise ValueError(f"weights: {differing[0]} is {side} ({len(differing)} such names)")
        for name, weight in weights.items():
            if weight.shape != self._rows[name].shape:
                raise ValueError(f"weights: {name} has shape {list(weight.shape)}, not {list(self._rows[name].shape)}")
        given = {name: weight.detach().to(self._device, non_blocking=True) for name, weight in weights.items()}
        if self._writes_rows:
            for name, rows in self._rows.items():
                rows.copy_(given[name])
        else:
            self._runner.model.load_weights(given.items())
        unequal = [(_bits(rows) != _bits(given[name].to(rows.dtype))).any() for name, rows in self._rows.items()]
        self._differs = torch.stack(unequal)
        self._clear_pools()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor],
        *,
        num_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        end_token: int | None = None,
    ) -> Generated:
        """Sample ``num_tokens`` tokens after each prompt.

        Args:
            prompts: Token ids, int64, ``batch_size`` rows.
            num_tokens: Length L of the responses.
            temperature: Divides the logits, above 0.
            top_p: Share of the mass to sample from, above 0 and at most 1.
            end_token: Once every row has it, sampling stops, and L is less. What a row has behind its own means
                nothing: a dense model soon leaves it out of the batch.

        Raises:
            ValueError: The batch has another size, is too long, or the temperature or top-p is out of range.
            RuntimeError: The engine does not hold the loaded weights.
        """
        batch_size, longest = len(prompts), max(map(len, prompts))
        if batch_size != self._batch_size or longest + num_tokens > self._max_length:
            raise ValueError(
                f"{batch_size} prompts of up to {longest} tokens and {num_tokens} new ones, the runner takes "
                f"{self._batch_size} with {self._max_length} tokens in all"
            )
        from sglang.srt.sampling.sampling_params import SamplingParams

        if not (temperature > 0 and num_tokens > 0):
            raise ValueError(f"temperature {temperature} and num_tokens {num_tokens} must be above 0")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, it must be above 0 and at most 1")
        self._check_held()
        asked = {"temperature": temperature, "top_p": top_p, "max_new_tokens": num_tokens, "ignore_eos": True}
        params = [SamplingParams(**asked, **self._draw_seed(row)) for row in range(batch_size)]
        self._num_calls += 1
        ids: list[Tensor] = []
        log_probs: list[Tensor] = []
        kept: list[Tensor] = []
        log_mass: list[Tensor] = []
        rows: list[Tensor] = []
        # Those that are still sampled, which of them have ended, and their last tokens.
        row_R = torch.arange(batch_size, device=self._device)
        has_ended_R = torch.zeros(batch_size, dtype=torch.bool, device=self._device)
        token_R = row_R
        # Sets of tokens and experts are kept of all rows.
        drops = end_token is not None and top_p == 1 and not self._num_routers
        self._chosen.clear()
        try:
            batch = self._prefill_batch(prompts, params)
            with _kept_random_state(self._device), self._own_arithmetic():
                _set_random_state(self._device, self._random_state)
                for step in range(num_tokens):
                    if step > 0:
                        batch.input_ids = token_R
                        batch.prepare_for_decode()
                    logits, forward_batch = self._forward(batch)
                    # Sampling puts probabilities in the place of logits.
                    if top_p < 1:
                        scaled = logits.next_token_logits[:, : self._vocab_size].float() / temperature
                    token_R = self._runner.sample(logits, forward_batch).long()
                    if top_p < 1:
                        # At the edge the engine rounds its sum otherwise; what it sampled is in its set.
                        kept.append(kept_tokens(scaled, top_p).scatter_(1, token_R[:, None], True))
                        log_mass.append(scaled.log_softmax(-1).masked_fill(~kept[-1], -torch.inf).logsumexp(-1))
                    ids.append(token_R)
                    log_probs.append(logits.next_token_logprobs.float())
                    rows.append(row_R)
                    if end_token is None:
                        continue
                    has_ended_R = has_ended_R | (token_R == end_token)
                    if step % STEPS_BETWEEN_LOOKS == STEPS_BETWEEN_LOOKS - 1:
                        # The host waits for the device now and then only.
                        open_R = (~has_ended_R).nonzero().flatten()
                        if not len(open_R):
                            break
                        if drops and len(open_R) < len(row_R):
                            _keep_rows(batch, open_R.tolist())
                            row_R, has_ended_R, token_R = row_R[open_R], has_ended_R[open_R], token_R[open_R]
                self._random_state = _random_state(self._device)
        finally:
            self._clear_pools()
        return Generated(
            _whole(ids, rows, batch_size),
            _whole(log_probs, rows, batch_size),
            self._experts([*map(len, prompts)], len(ids)),
            torch.stack(kept, dim=1) if kept else None,
            torch.stack(log_mass, dim=1) if kept else None,
        )

    def reseed(self, seed: int) -> None:
        """Begin the sampler's random numbers again."""
        self._random_state = _seeded_state(self._device, seed)

    def close(self) -> None:
        """Free the engine and leave its process groups."""
        if self._runner is None:
            return
        self._alignment.close()
        self._runner = None
        self._rows = {}
        _leave_groups()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def free_slots(self) -> tuple[int, int]:
        """Free tokens of the key-value pool and free rows of the request pool."""
        return (
            self._runner.token_to_kv_pool_allocator.available_size(),
            self._runner.req_to_token_pool.available_size(),
        )

    def _capture(self) -> None:
        """Capture the graph of a decode again: it repeats what was computed then."""
        with _kept_random_state(self._device), self._own_arithmetic():
            self._runner.init_decode_cuda_graph()
        # A graph calls no hooks. Each time it writes to the places of the last forward, which it has captured.
        self._chosen_in_graph = self._chosen[-self._num_routers :] if self._num_routers else []

    def _prefill_batch(self, prompts: Sequence[Tensor], params: list[Any]) -> Any:
        """Return a ``ScheduleBatch`` that is ready for the prompts' forward."""
        from sglang.benchmark.one_batch import TreeCacheNamespace
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        requests = []
        for row, length in enumerate(map(len, prompts)):
            # Requests hold Python integers. Only their number matters: the ids go to the batch, on the device.
            placeholder = array("q", bytes(8 * length))
            request = Req(rid=str(row), origin_input_text="", origin_input_ids=placeholder, sampling_params=params[row])
            request.full_untruncated_fill_ids = placeholder
            request.logprob_start_len = -1
            if hasattr(request, "set_extend_range"):
                request.set_extend_range(0, length)
            else:
                request.extend_end = length
            requests.append(request)
        allocator = self._runner.token_to_kv_pool_allocator
        batch = ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=self._runner.req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=TreeCacheNamespace(
                page_size=allocator.page_size, device=self._runner.device, token_to_kv_pool_allocator=allocator
            ),
            model_config=self._runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        batch.input_ids = torch.cat([*prompts]).to(self._device)
        batch.prefill_input_ids_cpu = None
        batch.top_logprobs_nums = [0] * len(prompts)
        batch.token_ids_logprobs = [None] * len(prompts)
        return batch

    def _draw_seed(self, row: int) -> dict[str, int]:
        """Return what makes a request draw its own tokens: deterministic requests without a seed all draw alike."""
        return {"sampling_seed": self._num_calls * self._batch_size + row} if self._deterministic else {}

    @contextmanager
    def _own_arithmetic(self) -> Iterator[None]:
        """Keep to the engine what deterministic inference changes for the whole process: torch's products and sums."""
        if not self._deterministic:
            yield
            return
        from sglang.srt import batch_invariant_ops

        batch_invariant_ops.enable_batch_invariant_mode()
        try:
            yield
        finally:
            batch_invariant_ops.disable_batch_invariant_mode()

    def _forward(self, batch: Any) -> tuple[Any, Any]:
        """Run one forward; return the output, of which can be sampled, and the batch to do so."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        forward_batch = ForwardBatch.init_new(batch, self._runner, return_hidden_states_before_norm=False)
        result = self._runner.forward(forward_batch)
        if forward_batch.forward_mode.is_decode():
            self.used_cuda_graphs = result.can_run_graph
            if result.can_run_graph:
                self._chosen += [experts.clone() for experts in self._chosen_in_graph]
        # Only now: in the forward it would ask for log-probs of the prompt.
        forward_batch.return_logprob = True
        return result.logits_output, forward_batch

    def _experts(self, prompt_lengths: list[int], num_forwards: int) -> list[Tensor] | None:
        """Return what ``Generated.experts`` says of the last call."""
        if not self._chosen:
            return None
        num_layers = len(self._chosen) // num_forwards
        # First all prompts, one behind the other, then a token of each row at a time.
        prompts, *tokens = (
            torch.stack(self._chosen[start : start + num_layers], dim=1).long()
            for start in range(0, len(self._chosen), num_layers)
        )
        rows = prompts.split(prompt_lengths)
        if not tokens:
            return [*rows]
        return [torch.cat(parts) for parts in zip(rows, torch.stack(tokens, dim=1), strict=True)]

    def _check_held(self) -> None:
        """Raise a RuntimeError if the last ``load`` left other values in the engine than were given."""
        if self._runner is None:
            raise RuntimeError("the runner is closed")
        differs, self._differs = self._differs, None
        if differs is not None and differs.any():
            wrong = [name for name, unequal in zip(self._rows, differs.tolist(), strict=True) if unequal]
            raise RuntimeError(f"SGLang does not hold the weights that were loaded: {', '.join(wrong)}")

    def _clear_pools(self) -> None:
        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()


def _keep_rows(batch: Any, indices: list[int]) -> None:
    """Go on with some requests of a batch; its graphs are those of the next larger size."""
    batch.filter_batch(keep_indices=indices)
    # Requests ask for no log-probs, the sampler is asked.
    batch.top_logprobs_nums, batch.token_ids_logprobs = [0] * len(indices), [None] * len(indices)


def _whole(parts: list[Tensor], rows: list[Tensor], batch_size: int) -> Tensor:
    """Of what each forward gave for its rows, ``[B, L]``: zeros where a row was omitted."""
    place_N = torch.cat([row_R + step * batch_size for step, row_R in enumerate(rows)])
    whole = parts[0].new_zeros(len(parts) * batch_size)
    return whole.index_copy_(0, place_N, torch.cat(parts)).view(len(parts), batch_size).T.contiguous()


def _prepare_cpu() -> None:
    """Let SGLang start without its compiled kernels, see ``grpo/sglang_cpu``."""
    import grpo

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    shim = str(Path(grpo.__file__).parent / "sglang_cpu")
    if shim not in sys.path:
        sys.path.insert(0, shim)


def _scale_cache(model: torch.nn.Module, scale: float, device: torch.device) -> None:
    """Set what SGLang reads from checkpoints with scales of keys and values."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            module.k_scale = module.v_scale = torch.tensor(scale, device=device)
            module.k_scale_float = module.v_scale_float = scale


def _is_mixture(hf_config: Any) -> bool:
    return any(getattr(hf_config, name, 0) for name in ("num_experts", "num_local_experts"))


def _write_cache_apart() -> None:
    """Keep SGLang's mixture from a kernel that rotates and writes the cache at once, which its small heads lack."""
    from sglang.srt.models import qwen3_moe

    qwen3_moe.enable_fused_set_kv_buffer = lambda _: False


def _write_checkpoint(
    hf_config: Any, folder: Path, quantizer: BlockQuantizer | None, *, seed: int, is_empty: bool
) -> dict[str, torch.Size]:
    """Write random weights; return the name and shape of each in the file. In memory transformers joins experts.

    Empty: nothing is drawn. SGLang makes its own weights, or reads zeros where they are quantized.
    """
    from transformers import AutoModelForCausalLM

    if is_empty:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        weights = model.state_dict()
        if hf_config.tie_word_embeddings:
            del weights["lm_head.weight"]
        if quantizer is not None:
            zeros = {name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in weights.items()}
            weights = quantizer.quantize(zeros)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            quantizer.write_config(folder)
        return {name: weight.shape for name, weight in weights.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.save_pretrained(folder)
    # Its sampling defaults are for users who set none.
    (folder / "generation_config.json").unlink(missing_ok=True)
    return {name: weight.shape for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def _start(arguments: dict[str, Any], *, gpu_id: int) -> Any:
    """Return a ``ModelRunner`` with weights, pools and CUDA graphs."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.network import get_free_port

    server_args = ServerArgs(**arguments)
    # 0.5.17 has the first two steps in its constructor and ``load_model``.
    if hasattr(one_batch, "publish"):
        server_args.resolve_once()
        world_rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
        ranks = one_batch.SpawnRanks(world_rank=world_rank, gpu_id=gpu_id)
        one_batch.publish(server_args, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
    else:
        one_batch.initialize_moe_config(server_args)
        one_batch.initialize_fp8_gemm_config(server_args)
        one_batch.initialize_fp4_gemm_config(server_args)
    ports = SimpleNamespace(nccl_port=get_free_port())
    with patch.object(one_batch, "get_tokenizer", return_value=None), redirect_stdout(sys.stderr):
        bench_runner, _ = one_batch.load_model(server_args, ports, gpu_id, 0)
    return bench_runner.torch_runner


def _leave_groups() -> None:
    from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def _engine_rows(parameters: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Return, per transformers name, the rows of SGLang's tensor that hold it.

    SGLang joins some projections, and pads the vocabulary with more rows. A layer's experts are one tensor.
    """
    rows: dict[str, Tensor] = {}
    unused = set(parameters)
    for name, shape in shapes.items():
        expert = EXPERT.fullmatch(name)
        held, start = _place_of_expert(expert, shape) if expert else _place(name, shapes)
        if held not in parameters:
            raise RuntimeError(f"SGLang's model has no {held}")
        tensor = parameters[held].data[int(expert[2])] if expert else parameters[held].data
        rows[name] = tensor[start : start + shape[0]]
        if rows[name].shape != shape:
            raise RuntimeError(f"SGLang's {held} has shape {list(parameters[held].shape)}, {name} has {list(shape)}")
        unused.discard(held)
    unused = {name for name in unused if not name.endswith(CACHE_SCALES)}
    if unused:
        raise RuntimeError(f"SGLang's model has tensors that load() would not write: {sorted(unused)}")
    return rows


def _place(name: str, shapes: dict[str, torch.Size]) -> tuple[str, int]:
    """Return the name of SGLang's tensor and the first row in it."""
    whole_of = {part: whole for whole, parts in FUSED.items() for part in parts}
    part = next((component for component in name.split(".") if component in whole_of), None)
    if part is None:
        return name, 0
    parts = FUSED[whole_of[part]]
    start = sum(shapes[name.replace(part, before)][0] for before in parts[: parts.index(part)])
    return name.replace(part, whole_of[part]), start


def _place_of_expert(expert: re.Match[str], shape: torch.Size) -> tuple[str, int]:
    """Return the same in the matrices of one expert: gate above up, and down."""
    if expert[3] in DOWN:
        return f"{expert[1]}.w2_weight", 0
    return f"{expert[1]}.w13_weight", shape[0] if expert[3] in UP else 0


def _record_experts(model: torch.nn.Module) -> tuple[list[Tensor], int]:
    """Return a list to which every router adds the experts [tokens, K] that it chose, layer by layer; and how many."""
    chosen: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith(CHOOSING)]
    for router in routers:
        router.register_forward_hook(lambda module, inputs, output: chosen.append(output.topk_ids.clone()))
    return chosen, len(routers)


def _bits(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits as integers, since not every comparison takes them."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _kept_random_state(device: torch.device) -> Any:
    """Return a context that leaves torch's generators as they were."""
    return torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else [])


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seeded_state(device: torch.device, seed: int) -> Tensor:
    with _kept_random_state(device):
        torch.manual_seed(seed)
        return _random_state(device)
