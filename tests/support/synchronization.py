# SPDX-License-Identifier: Apache-2.0
"""A recorder of device synchronizations, and a batch after which the guards stop.

On a CPU nothing stalls, so a dispatch mode tracks the inputs and all results from them, and forbids operations that
would stall a GPU: those whose result or shape the CPU must read. Index tensors from Python lengths stay on the CPU and
may be read.
"""

from contextlib import contextmanager

import torch
from cases import random_samples
from reference import Samples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mis_ext

FORBIDDEN = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "argwhere",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "histc",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
READERS = ["cpu", "tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__"]
# On a CPU there is no wait, so the guards check every call until they have seen this much.
ENOUGH = random_samples([5, 1, 200, 3], seed=81)


class Recorder(TorchDispatchMode):
    """Counts the operations on the inputs and results from them; raises an error for those that synchronize."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.names: list[str] = []
        # Kept alive, so that no later tensor gets the id of one of them.
        self.followed: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in inputs}

    def follows(self, tree) -> bool:
        return any(id(leaf) in self.followed for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.follows((args, kwargs)):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.names.append(name)
        indices = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
        by_mask = name in INDEXING and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in indices)
        unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in FORBIDDEN or by_mask or unknown_size:
            raise AssertionError(f"aten::{name} makes the host wait for the device")
        out = func(*args, **kwargs)
        self.followed |= {id(leaf): leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out


@contextmanager
def recorded(monkeypatch, *inputs: torch.Tensor):
    """A recorder that also guards the Python-level ways to read a value."""
    recorder = Recorder(*inputs)

    def guard(read):
        def guarded(tensor, *args, **kwargs):
            if recorder.follows(tensor):
                raise AssertionError(f"{read.__name__} reads a tensor's value on the host")
            return read(tensor, *args, **kwargs)

        return guarded

    with monkeypatch.context() as patch:
        for name in READERS:
            patch.setattr(torch.Tensor, name, guard(getattr(torch.Tensor, name)))
        with recorder:
            yield recorder


def call(args, samples: Samples):
    lengths = [m.numel() for m in samples.masks]
    return mis_ext.compute_mis_weights_with_cp(
        args=args,
        pg_loss=torch.ones(sum(lengths), device=samples.train[0].device).requires_grad_(),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
        total_lengths=[length + 3 for length in lengths],
        response_lengths=lengths,
    )
