"""Batch-invariant products, attention and row reductions on CUDA, in Triton."""

from mis_ext.onpolicy.batch_invariant.triton_attention import attention_backward, attention_forward
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
    "addmm",
    "attention_backward",
    "attention_forward",
    "bmm",
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
