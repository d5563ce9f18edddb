# SPDX-License-Identifier: Apache-2.0
"""What an engine gets: weights that are rounded as its settings say."""

import pytest
import torch
from evidence.engines import EngineSpec, to_int4, to_mantissa


def test_weights_are_rounded_to_bits_of_mantissa_and_to_integers_in_blocks() -> None:
    assert to_mantissa(torch.tensor([1.0, 1.25, 1.26, 1.5, -1.9, 0.0, 3e-5]), bits=1).tolist() == pytest.approx(
        [1.0, 1.5, 1.5, 1.5, -2.0, 0.0, 2**-15 * 1.0], rel=1e-6
    )
    weight = torch.randn(1, 64, 128).bfloat16()
    assert torch.equal(to_mantissa(weight, bits=7), weight)
    coarse = to_int4(weight.float())
    assert (coarse - weight.float()).abs().max() <= weight.float().abs().max() / 14 * 1.001
    assert max(len(block.unique()) for block in coarse[0].unflatten(-1, (-1, 32)).flatten(0, 1)) <= 15
    weights = {"model.embed_tokens.weight": weight, "up_proj.weight": weight, "norm.weight": weight[0, :1]}
    for kind, changed in (("mantissa_3", 2), ("int4", 1), ("fp8_e4m3", 2)):
        rounded = EngineSpec(kind="sglang", weights=kind).rounded(weights)
        assert sum(not torch.equal(rounded[name], weights[name]) for name in weights) == changed, kind
    with pytest.raises(ValueError, match="expected auto, fp8_e4m3, mantissa_N, int4 or fp8_blocks"):
        EngineSpec(weights="int3").rounded(weights)
