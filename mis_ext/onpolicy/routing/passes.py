"""The forward passes of a Megatron-Core model, and the one that a recomputation in the backward pass belongs to.

Autograd numbers its nodes in the order in which they are made, and recomputes a checkpoint while it runs a node of the
forward pass that made the checkpoint: the checkpoint itself, or one of its operations with ``use_reentrant=False``.
Hence the number of that node tells the pass, in whichever order the backward passes run, without a look at any tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Module
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class ForwardPass:
    """One forward pass of a model chunk.

    Attributes:
        has_grad: Whether it was called with gradients enabled.
        nodes: The numbers of the autograd nodes that it made with gradients.
        has_backward: Whether its output requires gradients.
        ran_backward: Whether gradients of its output were computed.
    """

    has_grad: bool = False
    nodes: range = range(0)
    has_backward: bool = False
    ran_backward: bool = False


class ForwardPasses:
    """Knows the running, or else the last, forward pass of the chunks that it watches."""

    def __init__(self) -> None:
        self.current = ForwardPass()

    @contextmanager
    def watch(self, chunks: Sequence[Module]) -> Iterator[None]:
        """Watch the chunks' forward passes."""
        with ExitStack() as stack:
            for chunk in chunks:
                stack.callback(chunk.register_forward_pre_hook(self._before).remove)
                stack.callback(chunk.register_forward_hook(self._after).remove)
            yield

    def _before(self, *_: object) -> None:
        start = _next_node()
        self.current = ForwardPass(has_grad=torch.is_grad_enabled(), nodes=range(start, start))

    def _after(self, _: Module, __: object, output: object) -> None:
        ended = self.current
        if ended.has_grad:
            ended.nodes = range(ended.nodes.start, _next_node())
        outputs = [x for x in tree_leaves(output) if torch.is_tensor(x) and x.requires_grad]
        ended.has_backward = bool(outputs)

        def note_backward(_: object) -> None:
            ended.ran_backward = True

        register_multi_grad_hook(outputs, note_backward, mode="any")


def running_node() -> int:
    """The number of the node that autograd's engine is running."""
    return int(torch._C._current_autograd_node()._sequence_nr())


def _next_node() -> int:
    return torch._C._autograd._get_sequence_nr()
