# SPDX-License-Identifier: Apache-2.0
"""Weights in 8-bit blocks: the numbers against a loop over blocks, the names, the configuration, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.block_quantization import FORMATS, BlockQuantizer, dequantize, quantize, round_inputs

PROJ = "model.layers.0.self_attn.q_proj.weight"
SHAPES = {
    "model.embed_tokens.weight": (32, 64),
    PROJ: (128, 64),
    "model.layers.0.mlp.gate.weight": (8, 64),
    "model.layers.0.self_attn.q_norm.weight": (32,),
    "lm_head.weight": (32, 64),
}


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, int, str]:
    size = draw(st.sampled_from([32, 64]))
    rows, columns = (size * draw(st.integers(1, 3)) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(draw(st.integers(1, 2)), rows, columns, generator=generator)
    # Magnitudes that differ from row to row, and a block of zeros.
    weight *= 10.0 ** torch.randint(-6, 4, (rows, 1), generator=generator)
    weight[..., :size, :size] *= draw(st.sampled_from([0.0, 1.0]))
    return weight, size, draw(st.sampled_from(sorted(FORMATS)))


@given(matrices())
@settings(max_examples=10, deadline=None)
def test_every_block_is_quantized_by_its_own_largest_number(case: tuple[torch.Tensor, int, str]) -> None:
    weight, size, method = case
    form = FORMATS[method]
    numbers, scale = quantize(weight, form, size)
    restored = dequantize(numbers, scale, size)
    assert numbers.dtype == form.dtype
    assert scale.shape == (*weight.shape[:-2], weight.shape[-2] // size, weight.shape[-1] // size)
    for model in range(len(weight)):
        for i in range(scale.shape[-2]):
            for j in range(scale.shape[-1]):
                rows, columns = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                block, own = weight[model, rows, columns].double(), float(scale[model, i, j])
                peak = float(block.abs().max())
                assert own == pytest.approx(max(peak, 1e-12) / form.largest, rel=1e-6)
                expected = numbers[model, rows, columns].double() * own
                torch.testing.assert_close(restored[model, rows, columns].double(), expected, rtol=1e-6, atol=0)
                # e4m3 has 3 bits behind the point, and steps of 2^-9 near 0; integers have steps of 1.
                relative, step = (2**-4, 2**-10) if form.dtype.is_floating_point else (0.0, 0.5)
                bound = torch.maximum(block.abs() * relative, torch.tensor(step * own)) * (1 + 1e-5)
                assert ((expected - block).abs() <= bound).all()


def test_inputs_have_a_scale_per_row_and_block_and_integers_are_cut_off() -> None:
    inputs = torch.tensor([[1.0, -0.3, 127.0, 64.9], [0.0, 0.0, -1270.0, 649.0]])
    assert round_inputs(inputs, torch.int8, 4).tolist() == [[1.0, 0.0, 127.0, 64.0], [0.0, 0.0, -1270.0, 640.0]]
    assert round_inputs(inputs, torch.int8, 2)[0, :2].tolist() == pytest.approx([1.0, -38 / 127])
    # 15 steps of 32 between 256 and 448: 260 lies nearer to 256 than to 288.
    assert round_inputs(torch.tensor([[448.0, 260.0, 0.0, -1.0]]), torch.float8_e4m3fn, 4).tolist() == [
        [448.0, 256.0, 0.0, -1.0]
    ]


@pytest.mark.parametrize(
    ("method", "ignored"), [("fp8", "modules_to_not_convert"), ("blockwise_int8", "ignored_layers")]
)
def test_the_checkpoint_says_what_it_holds(method: str, ignored: str, tmp_path: Path) -> None:
    quantizer = BlockQuantizer.create(method, SHAPES)
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    quantized = quantizer.quantize(weights)
    assert quantized.keys() == weights.keys() | {f"{PROJ}_scale_inv"}
    assert all(quantized[name] is weights[name] for name in weights if name != PROJ)
    assert quantizer.dequantize(quantized).keys() == weights.keys()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    quantizer.write_config(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "qwen3"
    config = written["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == (method, [64, 64])
    assert config[ignored] == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
