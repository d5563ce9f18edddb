# SPDX-License-Identifier: Apache-2.0
"""Code for SGLang's scheduler process: the alignment of its model, and the recorder.

Only functions import SGLang, because the trainer's process, which passes :func:`run_scheduler`, does not need it.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mis_ext.onpolicy.batch_invariant import attention, batch_invariant_forward, rms_norm
from mis_ext.onpolicy.kv_cache import DTYPES
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.rows import Rows

MODULES = (
    "model.embed_tokens",
    "model.layers.*_layernorm",
    "model.layers.*.self_attn",
    "model.layers.*_proj",
    "model.layers.*.mlp",
    "model.norm",
    "logits_processor",
)


GRAPH = "decode_cuda_graph_runner"
"""The attribute of SGLang's ``ModelRunner`` with the CUDA graphs for decode, or None."""


class Alignment(NamedTuple):
    """The aligned pieces in SGLang.

    Attributes:
        norms: The rounding of RMSNorm and of the addition of the residual before it.
        attention: Attention in fixed blocks over the paged cache.
        products: Projections and logits with fixed tiles.
        rotary: Frequencies computed on the CPU, as transformers and Megatron-Core do; rotation by torch.
        activation: SwiGLU rounds after SiLU.
        formula: Log-probs are logarithms of the probabilities, also in SGLang's deterministic mode.
        rounded_cache: ``fp8_e4m3`` or ``fp8_e5m2``: keys and values are rounded to it and back when written. For a CPU,
            where SGLang has no such cache, or one with scales.
    """

    norms: bool = False
    attention: bool = False
    products: bool = False
    rotary: bool = False
    activation: bool = False
    formula: bool = False
    rounded_cache: str | None = None


EVERYTHING = Alignment(norms=True, attention=True, products=True, rotary=True, activation=True, formula=True)
"""Without a rounded cache."""


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, like its ``run_scheduler_process``, with more commands.

    Args:
        *args: Of SGLang.
        **kwargs: Of SGLang.
    """
    from sglang.srt.managers import scheduler

    class AlignableScheduler(scheduler.Scheduler):
        """Adds the methods below for ``sglang.Engine.collective_rpc``."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._runner = self.tp_worker.model_runner
            self._model = self._runner.model
            self._alignment, self._recording = ExitStack(), ExitStack()

        def init_all_cuda_graphs(self) -> None:
            """Leave decode graphs to :meth:`align`: in float32 SGLang's own model has none."""
            if torch.cuda.is_available():
                self.tp_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
            else:
                super().init_all_cuda_graphs()

        def align(self, **what: Any) -> None:
            """Align exactly the pieces of :class:`Alignment`."""
            self._alignment.close()
            align(self._runner, self._alignment, Alignment(**what))
            if torch.cuda.is_available():
                # A graph replays the captured model, so capture again.
                self._runner.init_decode_cuda_graph()

        def start_recording(self) -> None:
            """Start to record every forward. Run one request at a time."""
            if torch.cuda.is_available():
                # A graph calls no Python.
                self._recording.callback(setattr, self._runner, GRAPH, getattr(self._runner, GRAPH))
                setattr(self._runner, GRAPH, None)
            call_with_hooks(self._model, self._recording)
            self._recorder = self._recording.enter_context(record(self._model, modules=MODULES, rows_of=rows_of))

        def save_recording(self, *, path: str) -> None:
            """Write the recording, and stop."""
            self._recording.close()
            self._recorder.recording().save(path)

    scheduler.Scheduler = AlignableScheduler
    scheduler.run_scheduler_process(*args, **kwargs)


def align(runner: Any, stack: ExitStack, what: Alignment) -> None:
    """Align a model of SGLang with the trainer, until the stack closes.

    Args:
        runner: SGLang's ``ModelRunner``.
        stack: Stack that reverts the alignment.
        what: Pieces.
    """
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.models import utils

    def modules_of(*types: type[nn.Module]) -> list[nn.Module]:
        return [module for module in runner.model.modules() if isinstance(module, types)]

    def set_forward(module: nn.Module, forward: Any) -> None:
        module.forward = forward
        stack.callback(delattr, module, "forward")

    def replace(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    if what.products:
        # LogitsProcessor computes the logits with a matmul.
        stack.enter_context(batch_invariant_forward(*modules_of(LinearBase, LogitsProcessor)))
    for place, layer in enumerate(modules_of(RadixAttention) if what.attention else ()):
        set_forward(layer, partial(_attention_forward, layer, place == 0))
    for norm in modules_of(RMSNorm) if what.norms else ():
        set_forward(norm, partial(_norm_forward, norm))
    if what.norms and torch.cuda.is_available():
        # A separate kernel normalizes queries and keys, without a module call.
        replace(utils, "can_use_fused_inplace_qknorm", lambda *_: False)
    for rotary in modules_of(RotaryEmbedding) if what.rotary else ():
        set_forward(rotary, rotary.forward_native)
        replace(rotary, "cos_sin_cache", _cos_sin(rotary))
    for activation in modules_of(SiluAndMul) if what.activation else ():
        set_forward(activation, activation.forward_native)
    if what.formula:
        replace(runner.sampler, "enable_deterministic", False)
    if what.rounded_cache is not None:
        pool, dtype = runner.token_to_kv_pool, DTYPES[what.rounded_cache]
        replace(pool, "set_kv_buffer", partial(_set_rounded, pool.set_kv_buffer, dtype))


class _Keys(NamedTuple):
    """Locations of a batch's keys in the paged cache, and their sequences; equal for all layers."""

    slots: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int


def _keys_of(batch: Any) -> _Keys:
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    # Use all columns: a graph reads these tensors at every step, and has one shape.
    slots = get_req_to_token_pool().req_to_token[batch.req_pool_indices]
    if batch.forward_mode.is_decode():
        lengths_q, longest_q = torch.ones_like(batch.seq_lens), 1
    else:
        lengths_q, longest_q = batch.extend_seq_lens, max(batch.extend_seq_lens_cpu)
    return _Keys(slots, _offsets(lengths_q), _offsets(batch.seq_lens), longest_q)


def _offsets(lengths: Tensor) -> Tensor:
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _attention_forward(
    layer: Any, is_first: bool, query: Tensor, key: Tensor, value: Tensor, batch: Any, save_kv_cache: bool = True
) -> Tensor:
    """Attend to the paged cache in the trainer's blocks, with any attention backend of the engine."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    assert save_kv_cache
    heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
    pool = get_token_to_kv_pool()
    pool.set_kv_buffer(layer, batch.out_cache_loc, key.view(-1, kv_heads, dim), value.view(-1, kv_heads, dim))
    if is_first:
        # Once per forward, also during graph capture, where forwards share a batch with earlier ones.
        batch.keys_in_cache = _keys_of(batch)
    keys = batch.keys_in_cache
    held, slots = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)), keys.slots
    if held[0].dtype != query.dtype:
        # 8-bit cache: the kernel needs one dtype, so convert the rows of the batch to the dtype of the model.
        held = tuple(_read(rows, slots).to(query.dtype) for rows in held)
        slots = torch.arange(slots.numel(), device=slots.device).view_as(slots)
    return attention(
        query.view(-1, heads, dim),
        *held,
        cu_seqlens_q=keys.cu_seqlens_q,
        cu_seqlens_k=keys.cu_seqlens_k,
        max_seqlen_q=keys.max_seqlen_q,
        max_seqlen_k=slots.shape[1],
        scale=layer.scaling,
        key_slots=slots,
    ).flatten(1)


def _set_rounded(
    set_kv_buffer: Any, dtype: torch.dtype, layer: Any, slots: Tensor, key: Tensor, value: Tensor, *scales: Any
) -> None:
    """Write the values of a cache of that dtype."""
    set_kv_buffer(layer, slots, *(states.to(dtype).to(states.dtype) for states in (key, value)), *scales)


def _read(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows of an 8-bit cache, whose dtype does not support indexing."""
    return rows.view(torch.uint8)[slots.flatten()].view(rows.dtype)


def _cos_sin(rotary: Any) -> Tensor:
    """SGLang's table ``[positions, dim]``, cosines before sines, from frequencies computed on the CPU."""
    exponents = torch.arange(0, rotary.rotary_dim, 2, dtype=torch.float, device="cpu") / rotary.rotary_dim
    table = rotary.cos_sin_cache
    frequencies = (1.0 / rotary.base**exponents).to(table.device)
    angles = torch.arange(len(table), dtype=torch.float, device=table.device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(table.dtype)


def _norm_forward(
    norm: nn.Module, x: Tensor, residual: Tensor | None = None, added: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Round the sum with the residual, and the row before the weight; SGLang rounds once, after the weight."""
    assert added is None
    stream = x if residual is None else residual + x
    normed = rms_norm(stream, norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, stream)


def call_with_hooks(model: nn.Module, stack: ExitStack) -> None:
    """Run hooks of the model until the stack closes. SGLang calls ``model.forward``, which runs no hooks."""
    own_forward = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Calling the model runs its forward, which must be the original one then.
        model.forward = own_forward
        try:
            return model(*args, **kwargs)
        finally:
            model.forward = forward

    model.forward = forward
    stack.callback(delattr, model, "forward")


def rows_of(_: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> Rows:
    """Tokens of a forward of SGLang's model with one request, sequence 0. It has only the logits of the last token."""
    position = args[1]
    return Rows(sequence=torch.zeros_like(position), position=position, kept=torch.tensor([position.numel() - 1]))
