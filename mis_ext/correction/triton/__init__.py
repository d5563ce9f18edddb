# SPDX-License-Identifier: Apache-2.0
"""The passes as Triton kernels: few launches, the same bits on every run, the numbers of the eager backend.

Start reading at :mod:`mis_ext.correction.triton.fused`. Tokens are cut into tiles of one sequence each, so that a
long sequence is shared by many programs; nothing is added up by atomic operations, so that no order of programs changes
a sum. What is computed comes from the same formulas as in the eager backend.
"""
