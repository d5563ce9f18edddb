# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, with the names of the functions in ``cpu``."""

from mis_ext.onpolicy.batch_invariant.triton_attention import attention_forward as attention_forward
from mis_ext.onpolicy.batch_invariant.triton_products import add_rows_ as add_rows_
from mis_ext.onpolicy.batch_invariant.triton_products import bmm as bmm
from mis_ext.onpolicy.batch_invariant.triton_products import grouped_rows as grouped_rows
from mis_ext.onpolicy.batch_invariant.triton_products import mm as mm
from mis_ext.onpolicy.batch_invariant.triton_reductions import rms_norm as rms_norm
from mis_ext.onpolicy.batch_invariant.triton_reductions import softmax as softmax
from mis_ext.onpolicy.batch_invariant.triton_reductions import sum as sum
