"""The passes as Triton kernels: few launches, the same bits on every run, the numbers of the eager backend.

Start reading at :mod:`mis_ext.kernels.backend`. Tokens are cut into tiles of one sequence each, so that a long sequence
is shared by many programs; nothing is added up by atomic operations, so that no order of programs changes a sum.
Ratios and sums are float64 within a kernel: what arrives in float32 is rounded once.
"""

from mis_ext.kernels.backend import TritonBackend

__all__ = ["TritonBackend"]
