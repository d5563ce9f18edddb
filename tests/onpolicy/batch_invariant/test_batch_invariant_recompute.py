# SPDX-License-Identifier: Apache-2.0
"""What a backward pass computes again is what the forward pass computed."""

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import each_device, equal_bits, randn
from torch.utils.checkpoint import checkpoint

from mis_ext.onpolicy.batch_invariant import (
    batch_invariant_forward,
    batch_invariant_mode,
    is_batch_invariant,
)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(torch.nn.Module):
    """Layers that a backward pass calls again, unless ``use_reentrant`` is None."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Attention() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self.layers:
            again = self.use_reentrant
            x = layer(x) if again is None else checkpoint(layer, x, use_reentrant=again)
        return x


def wrapped_gradients(model, x, *, in_mode):
    leaf = x.clone().requires_grad_()
    with batch_invariant_forward(model):
        loss = model(leaf).square().sum()
        if in_mode:
            with batch_invariant_mode():
                loss.backward()
        else:
            loss.backward()
    return [leaf.grad, *(parameter.grad for parameter in model.parameters())]


# On CUDA a thread of autograd computes it again.
@each_device
@pytest.mark.parametrize("in_mode", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_backward_pass_of_a_wrapped_model_computes_again_is_what_the_forward_computed(
    use_reentrant, in_mode, device
):
    x = randn(2, 70, 64, device=device)
    ours = wrapped_gradients(Checkpointed(use_reentrant).to(device), x, in_mode=in_mode)
    expected = wrapped_gradients(Checkpointed(None).to(device), x, in_mode=in_mode)
    for mine, theirs in zip(ours, expected, strict=True):
        assert equal_bits(mine, theirs)


def test_attention_that_torch_hides_from_the_mode_is_an_error_that_says_what_to_do():
    model, x = Checkpointed(True), randn(2, 70, 64).requires_grad_()
    with batch_invariant_mode():
        loss = model(x).sum()
        with pytest.raises(NotImplementedError, match=r"around checkpoints use batch_invariant_forward\(model\)"):
            loss.backward()
        assert is_batch_invariant()
