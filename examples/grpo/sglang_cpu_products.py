# SPDX-License-Identifier: Apache-2.0
"""Matmuls with 8-bit weights on a CPU. SGLang has kernels for them only on a GPU, or on a CPU with AMX.

Both factors are rounded as on a GPU. Products of 8-bit numbers are exact in float32, so only the order of summation
differs from a GPU. Only functions import SGLang.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .block_quantization import dequantize, round_inputs


def use_float32_products() -> None:
    """Make SGLang's linear layers in this process use these matmuls."""
    from sglang.srt.layers.quantization import blockwise_int8, fp8

    blockwise_int8.apply_w8a8_block_int8_linear = _product
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: _product
    # Otherwise it requires AMX, which has a different weight layout.
    fp8.Fp8LinearMethod.process_weights_after_loading_block_quant = lambda method, layer: None


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, like its ``run_scheduler_process``, with these matmuls."""
    from sglang.srt.managers import scheduler

    use_float32_products()
    scheduler.run_scheduler_process(*args, **kwargs)


def _product(
    input: Tensor,
    weight: Tensor,
    block_size: list[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``[..., rows of the weight]`` in the input's dtype; the arguments are SGLang's."""
    product = round_inputs(input, weight.dtype, block_size[0]) @ dequantize(weight, weight_scale, block_size[0]).T
    return (product if bias is None else product + bias).to(input.dtype)
