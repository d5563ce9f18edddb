# SPDX-License-Identifier: Apache-2.0
"""The experts that a transformers model chooses, as `examples/hf_routing.py` records them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from hf_routing import record_hf_routing


def tiny_qwen3_moe() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "head_dim": 8, "moe_intermediate_size": 8, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    layers = {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1], "intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes, **heads, **layers, initializer_range=0.25)
    return Qwen3MoeForCausalLM(config).eval()


@contextmanager
def dispatched_experts(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """The experts that each mixture of a transformers model is really called with."""
    seen: list[Tensor] = []
    mixtures = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    hooks = [mixture.register_forward_pre_hook(lambda _, args: seen.append(args[1])) for mixture in mixtures]
    yield seen
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def test_prefill_and_decode_record_the_rows_of_one_forward_pass() -> None:
    model = tiny_qwen3_moe()
    lengths = [9, 6]
    tokens = torch.randint(50, (2, 9))
    # The second sequence is padded by three tokens at the left, and one token more than its length is fed.
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with record_hf_routing(model) as record:
        # By position: the name of the cache differs between versions.
        cache = DynamicCache(config=model.config)
        for start, end in [(0, 4), (4, 6), (6, 7), (7, 8)]:
            model(tokens[:, start:end], mask[:, :end], positions[:, start:end], cache, use_cache=True)
    samples = record.samples(lengths)
    for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        alone = tokens[index : index + 1, 9 - length :]
        with record_hf_routing(model) as whole, dispatched_experts(model) as dispatched:
            recorded = model(alone).logits
        (expected,) = whole.samples([length])
        assert torch.equal(expected.experts_TLK.long(), torch.stack(dispatched, dim=1))
        assert sample.recorded_T.tolist() == [True] * (length - 1) + [False]
        assert torch.equal(sample.experts_TLK[:-1], expected.experts_TLK[:-1])
        assert sample.experts_TLK.shape == (length, 2, 2)
        assert torch.equal(recorded, model(alone).logits)
    cut = record.samples([8, 4])
    assert cut[1].recorded_T.all()
    assert torch.equal(cut[1].experts_TLK, samples[1].experts_TLK[:4])


def test_a_generation_that_does_not_continue_the_recorded_one_is_refused() -> None:
    model, tokens = tiny_qwen3_moe(), torch.randint(1, 50, (2, 4))
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with record_hf_routing(model) as record:
        model.generate(tokens, **settings)
        with pytest.raises(ValueError, match="a forward pass from position 0 on follows 6 recorded positions"):
            model.generate(tokens, **settings)
    assert [sample.recorded_T.sum() for sample in record.samples([7, 7])] == [6, 6]
    with (
        record_hf_routing(model),
        pytest.raises(ValueError, match=r"position 0 on follows 4 recorded .* with use_cache=True"),
    ):
        model.generate(tokens, use_cache=False, **settings)
    cache = DynamicCache(config=model.config)
    model(tokens, None, None, cache)
    with record_hf_routing(model), pytest.raises(ValueError, match="from position 4 on follows 0 recorded positions"):
        model(tokens, None, None, cache)


@torch.no_grad()
def test_a_recording_of_an_engine_leaves_no_hook_and_refuses_what_it_cannot_place() -> None:

    model = tiny_qwen3_moe()
    with (
        pytest.raises(ValueError, match="Linear has no module whose class name ends in TopKRouter"),
        record_hf_routing(torch.nn.Linear(2, 2)),
    ):
        pass
    with record_hf_routing(model) as record:
        model(torch.randint(50, (2, 3)))
        with pytest.raises(ValueError, match="a batch of 1 follows one of 2"):
            model(torch.randint(50, (1, 3)))
        with pytest.raises(ValueError, match="batches \\[B, t\\]"):
            model(torch.randint(50, (2, 3)), cu_seq_lens_q=torch.tensor([0, 3]))
        with pytest.raises(ValueError, match="batches \\[B, t\\]"):
            model(torch.randint(50, (2, 3)), torch.ones(2, 1, 3, 3))
        with pytest.raises(ValueError, match="recorded for input_ids"):
            model(inputs_embeds=torch.zeros(2, 3, 16))
    with pytest.raises(ValueError, match="got 1 lengths for a batch of 2"):
        record.samples([3])
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for name, module in model.named_modules() if "gate" in name
    )
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
