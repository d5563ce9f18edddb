"""What runs inside SGLang's scheduler process: its model aligned from outside, and the recorder.

SGLang itself is imported by functions only: the trainer's process, which hands :func:`run_scheduler` over, has no use
for it.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mis_ext.onpolicy.batch_invariant import batch_invariant_forward, rms_norm
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


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, as its ``run_scheduler_process`` does, with more commands.

    Args:
        *args: Of SGLang.
        **kwargs: Of SGLang.
    """
    from sglang.srt.managers import scheduler

    class AlignableScheduler(scheduler.Scheduler):
        """Has the methods below for ``sglang.Engine.collective_rpc``."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._model = self.tp_worker.model_runner.model
            self._alignment, self._recording = ExitStack(), ExitStack()

        def align(self, *, norms: bool, attention: bool, products: bool) -> None:
            """Align what is True, and nothing else."""
            self._alignment.close()
            align(self._model, self._alignment, norms=norms, attention=attention, products=products)

        def start_recording(self) -> None:
            """Record every forward from now on; one request at a time."""
            call_with_hooks(self._model, self._recording)
            self._recorder = self._recording.enter_context(record(self._model, modules=MODULES, rows_of=rows_of))

        def save_recording(self, *, path: str) -> None:
            """Write what was recorded, and stop."""
            self._recording.close()
            self._recorder.recording().save(path)

    scheduler.Scheduler = AlignableScheduler
    scheduler.run_scheduler_process(*args, **kwargs)


def align(model: nn.Module, stack: ExitStack, *, norms: bool, attention: bool, products: bool) -> None:
    """Align a model of SGLang with the trainer, until the stack closes.

    Args:
        model: SGLang's.
        stack: Undoes it.
        norms: The rounding of RMSNorm and of the addition of the residual before it.
        attention: Its attention backend in fixed blocks.
        products: Projections and logits in fixed tiles.
    """
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.radix_attention import RadixAttention

    def modules_of(*types: type[nn.Module]) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, types)]

    if products:
        # The logits are a product inside of LogitsProcessor.
        stack.enter_context(batch_invariant_forward(*modules_of(LinearBase, LogitsProcessor)))
    if attention:
        # It calls torch's attention once per sequence, with all keys from the first on.
        stack.enter_context(batch_invariant_forward(*modules_of(RadixAttention)))
    for norm in modules_of(RMSNorm) if norms else ():
        norm.forward = partial(_norm_forward, norm)
        stack.callback(delattr, norm, "forward")


def _norm_forward(
    norm: nn.Module, x: Tensor, residual: Tensor | None = None, added: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Round the sum with the residual, and the row before the weight; SGLang rounds once, after the weight."""
    assert added is None
    stream = x if residual is None else residual + x
    normed = rms_norm(stream, norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, stream)


def call_with_hooks(model: nn.Module, stack: ExitStack) -> None:
    """Let hooks see the calls of the model until the stack closes: SGLang calls ``model.forward``, which runs none."""
    own_forward = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Calling the model runs its forward, which must be the own one then.
        model.forward = own_forward
        try:
            return model(*args, **kwargs)
        finally:
            model.forward = forward

    model.forward = forward
    stack.callback(delattr, model, "forward")


def rows_of(_: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> Rows:
    """Tokens of a forward of SGLang's model with a single request, sequence 0; it has the logits of the last."""
    position = args[1]
    return Rows(sequence=torch.zeros_like(position), position=position, kept=torch.tensor([position.numel() - 1]))
