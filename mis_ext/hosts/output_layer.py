# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's output layer without logits: it says what would make them, and the loss takes hidden states.

:func:`hand_over_hidden_states` changes one layer of a model. What it gives are logits of no columns, which the
schedule, the wrappers of the model and the host pass on like any others. With them goes a :class:`Head`, from which the
loss, and the pass that scores the rollout, take what they need (:func:`~mis_ext.hosts.megatron.fused_scores`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PASSES_ON = frozenset({"transpose", "contiguous", "float", "to"})
"""What stands between a model's output layer and its loss, by the names of PyTorch's functions.

Not ``detach``: the head would still lead to the graph that was left.
"""
_CHANGES_NOTHING = frozenset({"requires_grad_", "__get__"})
"""What gives the same tensor, and is neither of these nor in place."""


class Head(NamedTuple):
    """What makes logits of one micro-batch: the input of the output layer, ``[S / TP, B, H]`` or ``[S, B, H]``.

    ``weight``: ``[V / TP, H]``. ``sequence_parallel``: each rank has its part of the first dimension.
    ``gradient_accumulation_fusion``: the weight's gradient is added to its ``main_grad``.
    """

    hidden_SBH: Tensor
    weight: Tensor
    bias: Tensor | None
    sequence_parallel: bool
    gradient_accumulation_fusion: bool


class NoLogits(Tensor):
    """Logits of no columns, and their head. An operation on them gives an ordinary tensor, which the loss refuses."""

    head: Head

    @classmethod
    def with_head(cls, logits: Tensor, head: Head) -> NoLogits:
        """A tensor without columns that has this head."""
        found = logits.as_subclass(cls)
        found.head = head
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass the head on where the tensor itself is passed on.

        Raises:
            RuntimeError: An operation in place, of which the head would know nothing.
        """
        name, kwargs = getattr(func, "__name__", None), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if name in _PASSES_ON:
            # Where it has nothing to do it gives the same tensor.
            given = args[0] if args else kwargs["input"]
            return found if type(found) is cls else cls.with_head(found, given.head)
        if name == "__setitem__" or (type(found) is cls and name not in _CHANGES_NOTHING):
            raise RuntimeError(f"{name} in place has no effect on a loss without logits: mis_ext leaves none to change")
        return found


def _is_plain(forward: Any, plain: Any) -> bool:
    """Whether it makes logits as a plain output layer does, like that of the newer Megatron-Core of slime and Miles."""
    name = f"{forward.__module__}.{forward.__qualname__}"
    return forward is plain or name == "megatron.core.transformer.linear_cross_entropy.LinearCrossEntropyModule.forward"


def hand_over_hidden_states(model: Any) -> None:
    """Let the last stage of a model of Megatron-Core give hidden states to the loss, and no logits.

    Its output layer keeps its weight and its name in checkpoints. It makes logits as before for whoever calls it with
    another argument (``runtime_gather_output`` in inference), and where the model itself computes a loss, as that of
    multi-token prediction. A layer that is put in its place, as that of a critic, is left alone.

    Args:
        model: On the last pipeline stage, without wrappers.

    Raises:
        ValueError: Its logits are not those of a plain output layer.
    """
    # Where such a model is, it is installed.
    plain = import_module("megatron.core.tensor_parallel").ColumnParallelLinear
    layer, why = model.output_layer, None
    if not isinstance(layer, plain):
        why = f"the output layer is a {type(layer).__name__}"
    elif not _is_plain(type(layer).forward, plain.forward):
        why = f"the output layer is a {type(layer).__name__} with a forward of its own, as one with a soft cap has"
    elif layer.skip_bias_add and layer.bias is not None:
        why = "the output layer leaves its bias to its caller (skip_bias_add=True)"
    elif layer.gather_output:
        why = "the output layer gathers the vocabulary (parallel_output=False)"
    elif model.config.defer_embedding_wgrad_compute:
        why = "--defer-embedding-wgrad-compute keeps the input of the output layer for later"
    elif getattr(model.config, "use_mup", False):
        why = "--use-mup scales the logits behind the output layer"
    if why is not None:
        raise ValueError(f"hidden states cannot take the place of logits: {why}")
    make_logits, compute_loss = layer.forward, model.compute_language_model_loss

    def forward(input_: Tensor, weight: Tensor | None = None, *others: Any, **more: Any) -> Any:
        if any(value is not None for value in (*others, *more.values())):
            return make_logits(input_, weight, *others, **more)
        ranks = layer.tp_group.size() if layer.sequence_parallel else 1
        head = Head(
            input_,
            layer.weight if weight is None else weight,
            layer.bias,
            layer.sequence_parallel,
            layer.gradient_accumulation_fusion,
        )
        # A part of the graph, for a rank whose loss has no token.
        return NoLogits.with_head(input_[..., :0].repeat(ranks, 1, 1), head), None

    def compute_language_model_loss(labels: Tensor, logits: Tensor) -> Any:
        if isinstance(logits, NoLogits):
            logits, _ = make_logits(logits.head.hidden_SBH, logits.head.weight)
        return compute_loss(labels, logits)

    layer.forward, model.compute_language_model_loss = forward, compute_language_model_loss
