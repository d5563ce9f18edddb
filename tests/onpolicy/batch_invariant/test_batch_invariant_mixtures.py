# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in the mode, bit for bit: transformers' models, each way to run experts, and Megatron-Core's."""

import importlib.util
import itertools
import random
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from batch_invariant_support import assert_same_bits, each_device, on_cuda

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.bits import same_bits

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

# The two that transformers' generation mixes on CUDA add a token's experts in one order, the loop in another.
EXPERTS = ("eager", "batched_mm", "grouped_mm")
DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def cases(*on_cpu):
    everything = itertools.product(EXPERTS, DTYPES)
    on_gpu = [pytest.param(*case, "cuda", marks=on_cuda) for case in everything]
    return pytest.mark.parametrize(("experts", "dtype", "device"), [*((*case, "cpu") for case in on_cpu), *on_gpu])


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
MODELS = {
    "Qwen3Moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "GptOss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
each_model = pytest.mark.parametrize("name", MODELS)


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build(name, experts, *, dtype, device, ties=True):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if ties and parameter_name.endswith(("mlp.gate.weight", "router.weight", "router.bias")):
            # Experts in pairs with equal scores: every choice of an odd number cuts through a tie.
            parameter.data[1::2] = parameter.data[::2]
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2) if "router" not in parameter_name else None
    model.set_experts_implementation(experts)
    return model.to(device, dtype)


def cuts(length, generator):
    """The ends of pieces of a drawn length: a prompt, some chunks, and tokens one at a time."""
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + generator.choice([1, 1, 1, 2, 5])))
    return list(itertools.pairwise(ends))


# Single tokens after grouped experts are batched. On a CPU products of bfloat16 are invariant anyway.
@pytest.mark.whole_run
@cases(("eager", torch.float32), ("grouped_mm", torch.float32))
@each_model
@torch.no_grad()
def test_logits_are_those_of_any_batch_and_of_decoding(name, experts, dtype, device):
    generator = random.Random(f"{name} {experts} {dtype}")
    model = build(name, experts, dtype=dtype, device=device)
    batch, length = generator.randint(3, 5), generator.randint(8, 11)
    tokens = torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    with batch_invariant_mode():
        whole = model(tokens).logits
        assert whole.isfinite().all()
        size = generator.randint(1, batch - 1)
        assert_same_bits(torch.cat([model(part).logits for part in tokens.split(size)]), whole)
        with threads(generator.choice([2, 3])):
            assert_same_bits(model(tokens[:1]).logits, whole[:1])
        pieces, cache = [], transformers.DynamicCache(config=model.config)
        for start, stop in cuts(length, generator):
            if experts == "grouped_mm" and stop - start == 1:
                # So does transformers' generation on CUDA.
                model.set_experts_implementation("batched_mm")
            pieces.append(model(tokens[:, start:stop], None, None, cache, use_cache=True).logits)
        assert_same_bits(torch.cat(pieces, dim=1), whole)


def mixture_of(model):
    """The last layer's block, whose output is the first of a tuple in some versions."""
    mixture = model.model.layers[-1].mlp

    def forward(hidden):
        output = mixture(hidden)
        return output[0] if isinstance(output, tuple) else output

    return mixture, forward


# On a CPU a model in one way: what runs the experts is the same code in all of them.
@pytest.mark.parametrize(
    ("name", "experts", "dtype", "device"),
    [
        ("Qwen3Moe", "batched_mm", torch.float32, "cpu"),
        ("Mixtral", "grouped_mm", torch.bfloat16, "cpu"),
        ("DeepseekV3", "grouped_mm", torch.bfloat16, "cpu"),
        ("GptOss", "batched_mm", torch.float32, "cpu"),
        *(pytest.param(*case, "cuda", marks=on_cuda) for case in itertools.product(MODELS, EXPERTS, DTYPES)),
    ],
)
def test_a_token_and_its_gradient_have_their_bits_in_any_batch(name, experts, dtype, device):
    if experts == "grouped_mm" and not hasattr(torch, "_grouped_mm"):
        pytest.skip("without it transformers multiplies into tensors of its own, which the mode refuses by name")
    generator = random.Random(f"{name} {experts} {dtype} mixture")
    mixture, forward = mixture_of(build(name, experts, dtype=dtype, device=device))
    tokens = generator.randint(14, 24)
    hidden, slope = (
        torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype) for seed in (0, 1)
    )

    def output_and_gradient(span):
        leaf = hidden[:, span].clone().requires_grad_()
        output = forward(leaf)
        output.backward(slope[:, span])
        return output.detach(), leaf.grad

    with batch_invariant_mode():
        whole = output_and_gradient(slice(None))
        weights = [parameter.grad.clone() for parameter in mixture.parameters()]
        begin = 0
        while begin < tokens:
            span = slice(begin, begin := begin + generator.choice([1, 3, 9]))
            for part, expected in zip(output_and_gradient(span), whole, strict=True):
                assert_same_bits(part, expected[:, span])
        mixture.zero_grad()
        with threads(generator.choice([2, 3])):
            for again, expected in zip(output_and_gradient(slice(None)), whole, strict=True):
                assert_same_bits(again, expected)
    for parameter, expected in zip(mixture.parameters(), weights, strict=True):
        assert same_bits(parameter.grad, expected).all()


@each_device
@each_dtype
@each_model
@torch.no_grad()
def test_grouped_and_batched_experts_have_the_same_bits_and_are_right(name, dtype, device):
    hidden = torch.randn(1, 33, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    forwards = {
        experts: mixture_of(build(name, experts, dtype=dtype, device=device, ties=False))[1] for experts in EXPERTS
    }
    with batch_invariant_mode():
        ours = {experts: forward(hidden) for experts, forward in forwards.items()}
    assert_same_bits(ours["grouped_mm"], ours["batched_mm"])
    for experts, forward in forwards.items():
        plain = forward(hidden).float()
        error = (ours[experts].float() - plain).abs().max() / plain.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2), experts


if importlib.util.find_spec("megatron"):
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    with warnings.catch_warnings():
        # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
        warnings.simplefilter("ignore")
        import toy_moe
        from megatron.core.inference.contexts import StaticInferenceContext
        from onpolicy.pieces import FixedBlockAttention


@pytest.fixture
def megatron(monkeypatch):
    """A tiny ``GPTModel`` of every dtype, whose local experts are Megatron-Core's ``SequentialMLP``."""
    pytest.importorskip("megatron.core")
    # The attention of the tests of routing takes no cache.
    monkeypatch.setattr(toy_moe, "GatheredAttention", FixedBlockAttention)
    shape = toy_moe.MoEShape(num_layers=2, hidden_size=64, expert_size=64, num_experts=8, topk=3, vocab_size=64)

    def build_model(dtype):
        settings = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
        model = toy_moe.build_trainer(shape, seed=0, **settings).to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter.data[1::2] = parameter.data[::2]
        return model

    with toy_moe.single_process():
        yield build_model


@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")
@each_dtype
def test_megatron_has_the_logits_of_any_batch_and_of_decoding(megatron, dtype):
    generator = random.Random(str(dtype))
    model = megatron(dtype).eval()
    batch, length, prompt = generator.randint(3, 5), generator.randint(8, 11), generator.randint(1, 6)
    tokens = torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(batch, -1)
    with torch.no_grad(), batch_invariant_mode():
        whole = model(tokens, positions, None)
        size = generator.randint(1, batch - 1)
        parts = zip(tokens.split(size), positions.split(size), strict=True)
        assert_same_bits(torch.cat([model(*part, None) for part in parts]), whole)
        context = StaticInferenceContext(batch, length)
        for start, stop in [(0, prompt), *((p, p + 1) for p in range(prompt, length))]:
            logits = model(
                tokens[:, start:stop],
                positions[:, start:stop],
                None,
                inference_context=context,
                runtime_gather_output=True,
            )
            context.sequence_len_offset += stop - start
            context.enable_decode_mode()
            assert_same_bits(logits[:, -1], whole[:, stop - 1])


@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")
@each_dtype
def test_a_token_of_megatron_has_its_gradient_in_any_batch_and_a_batch_on_any_threads(megatron, dtype):
    mixture = megatron(dtype).decoder.layers[0].mlp
    hidden, slope = (torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))

    def output_and_gradients(span):
        mixture.zero_grad()
        leaf = hidden[span].clone().requires_grad_()
        output, _ = mixture(leaf)
        output.backward(slope[span])
        return [output.detach(), leaf.grad, *(p.grad for p in mixture.parameters() if p.grad is not None)]

    with batch_invariant_mode():
        whole = output_and_gradients(slice(None))
        for span in (slice(0, 1), slice(1, 3), slice(3, 20), slice(20, 40)):
            for part, expected in zip(output_and_gradients(span)[:2], whole, strict=False):
                assert_same_bits(part, expected[span])
        with threads(3):
            for again, expected in zip(output_and_gradients(slice(None)), whole, strict=True):
                assert same_bits(again, expected).all()
