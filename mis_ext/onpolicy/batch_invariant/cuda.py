"""Batch-invariant products, sums of rows, attention and row reductions on CUDA, in Triton."""

from mis_ext.onpolicy.batch_invariant.triton_accumulation import add_rows_
from mis_ext.onpolicy.batch_invariant.triton_grouped import grouped_rows, grouped_sums
from mis_ext.onpolicy.batch_invariant.triton_latent_attention import attention_backward, attention_forward
from mis_ext.onpolicy.batch_invariant.triton_matmul import addmm, bmm, mm
from mis_ext.onpolicy.batch_invariant.triton_reductions import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    mean,
    rms_norm,
    softmax,
    softmax_backward,
    sum,
)

__all__ = [
    "add_rows_",
    "addmm",
    "attention_backward",
    "attention_forward",
    "bmm",
    "grouped_rows",
    "grouped_sums",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "mean",
    "mm",
    "rms_norm",
    "softmax",
    "softmax_backward",
    "sum",
]
