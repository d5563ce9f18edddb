# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant execution: the mode, the attention both engines can share, and the kernels under them.

``mode`` puts ``overrides`` in the place of torch's operators, which also says what passes and what is refused:
``attention``, ``mixtures`` and ``cpu_rows`` compute. ``devices`` chooses the arithmetic, of ``cpu`` or of the Triton
files; ``packed_sequences`` says how sequences lie, on both.
"""

from mis_ext.onpolicy.batch_invariant.attention import attention
from mis_ext.onpolicy.batch_invariant.devices import rms_norm
from mis_ext.onpolicy.batch_invariant.mode import (
    batch_invariant_forward,
    batch_invariant_mode,
    is_batch_invariant,
)

__all__ = ["attention", "batch_invariant_forward", "batch_invariant_mode", "is_batch_invariant", "rms_norm"]
