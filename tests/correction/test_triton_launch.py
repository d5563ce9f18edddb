# SPDX-License-Identifier: Apache-2.0
"""Which compiled kernel the launcher takes: the one that Triton would, or a new one."""

import pytest
import torch

launch = pytest.importorskip("mis_ext.correction.triton.launch")


class Kernel:
    """Stands for a ``triton.jit`` function: what it is launched with the first time, and what later."""

    arg_names = ("x", "n", "stride", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.compilations: list[tuple] = []
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        def compile(*arguments, **constants):
            self.compilations.append((grid, *arguments[1:], constants))
            return Compiled(self)

        return compile


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self._kernel.launches.append((grid, *arguments[1:]))


BYTES = torch.zeros(64, dtype=torch.uint8)
X = BYTES[-BYTES.data_ptr() % 16 :][:32].view(torch.float32)
CONSTANTS, OPTIONS = {"SECOND": 2, "FIRST": 1}, {"num_warps": 4}


def run(*calls) -> Kernel:
    kernel = Kernel()
    launcher = launch.Launcher(kernel)
    for x, numbers, constants, options in calls:
        launcher(7, (x,), numbers, constants, options)
    return kernel


def test_the_second_launch_is_of_the_compiled_kernel_with_constants_in_its_order() -> None:
    kernel = run((X, (3, 8), CONSTANTS, OPTIONS), (X, (5, 8), CONSTANTS, OPTIONS))
    assert kernel.compilations == [((7,), 3, 8, CONSTANTS | OPTIONS)]
    assert kernel.launches == [((7, 1, 1), 5, 8, 1, 2)]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((X, (1, 8), CONSTANTS, OPTIONS), id="one"),
        pytest.param((X, (16, 8), CONSTANTS, OPTIONS), id="a multiple of 16"),
        pytest.param((X, (2**31 + 1, 8), CONSTANTS, OPTIONS), id="beyond int32"),
        pytest.param((X[1:], (3, 8), CONSTANTS, OPTIONS), id="not aligned"),
        pytest.param((X.half(), (3, 8), CONSTANTS, OPTIONS), id="dtype"),
        pytest.param((X, (3, 8), CONSTANTS | {"FIRST": 9}, OPTIONS), id="constant"),
        pytest.param((X, (3, 8), CONSTANTS, {"num_warps": 8}), id="option"),
    ],
)
def test_what_triton_assumes_of_arguments_tells_kernels_apart(other) -> None:
    first = (X, (3, 8), CONSTANTS, OPTIONS)
    kernel = run(first, other, first, other)
    assert len(kernel.compilations) == len(kernel.launches) == 2


def test_on_amd_triton_looks_anew_as_it_assumes_that_tensors_below_2_gb_stay_so(monkeypatch) -> None:
    monkeypatch.setattr(launch, "IS_HIP", True)
    kernel = run((X, (3, 8), CONSTANTS, OPTIONS), (X, (3, 8), CONSTANTS, OPTIONS))
    assert len(kernel.compilations) == 2


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows_get_other_tiles_on_hopper_only(monkeypatch, capability, dtype) -> None:
    matmul = pytest.importorskip("mis_ext.onpolicy.batch_invariant.triton_products")
    monkeypatch.setattr(matmul, "_is_hopper", lambda _: capability == (9, 0))
    for rows, columns in ((1, 5), (64, 1000), (65, 1000), (16, 8192), (3, 10**6)):
        tile, usual = matmul.choose_tile(torch.empty(rows, 4, dtype=dtype), columns), matmul.TILES[dtype]
        assert tile.BLOCK_K == usual.BLOCK_K, "the order of a sum"
        assert (tile == usual) == (rows > 64 or capability != (9, 0))
        assert tile.BLOCK_N in (16, 32, 64) or tile == usual


def test_a_kernel_with_the_names_of_a_plan_keeps_its_compile_time_arguments() -> None:
    """The interpreter, which runs the other tests without a GPU, takes any argument for a number."""
    from triton.runtime.jit import JITFunction

    from mis_ext.correction.triton import kernels
    from mis_ext.correction.triton.generate import specialised

    def compile_time(function) -> list[str]:
        return [parameter.name for parameter in JITFunction(function).params if parameter.is_constexpr]

    found = [value for name, value in vars(kernels).items() if name.endswith("_kernel")]
    assert len(found) >= 6
    for function in found:
        assert compile_time(function)
        assert compile_time(specialised(function, vars(kernels))) == compile_time(function)
