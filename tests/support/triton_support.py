# SPDX-License-Identifier: Apache-2.0
"""The device of Triton kernels in the tests: a GPU if there is one, else Triton's interpreter."""

import pytest
import torch
from interpreted import dot_row_by_row
from torch import Tensor

from mis_ext.scoring.backend import triton_obstacle

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OBSTACLE = triton_obstacle(DEVICE.type)
"""Why the kernels cannot run, or None."""
MARKS = [
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
    # NumPy, in which the interpreter computes, warns of every NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([pytest.mark.gpu] if HAS_GPU else []),
]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the relative distance between neighboring numbers: the error of one rounding."""
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
# Bitwise equal: the interpreter computes each dtype with the same code.
each_dtype_of_a_gpu = pytest.mark.parametrize("dtype", DTYPES if HAS_GPU else DTYPES[:1], ids=lambda x: str(x)[6:])


@pytest.fixture(autouse=True)
def rows_of_a_dot_do_not_meet(monkeypatch) -> None:
    """As on a GPU, whose instruction for a tile rounds all of its rows alike. For a test module to import."""
    if not HAS_GPU:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_row_by_row)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
