# SPDX-License-Identifier: Apache-2.0
"""Log-probs that the audit compares, and the audit with records of the engine."""

import math

import torch

from mis_ext.onpolicy.audit import log_probs as module
from mis_ext.onpolicy.audit.audit_report import AuditReport

NAN, INF = math.nan, math.inf
INTEGER = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def audit_logprobs(train: object, rollout: object, **keywords: object) -> AuditReport:
    """By default, the rollout is the engine's record."""
    return module.audit_logprobs(train, rollout, **{"engine_records": rollout} | keywords)


def log_probs(*lengths: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(-0.01 - 3.0 * torch.rand(length, generator=generator)).to(dtype) for length in lengths]


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def next_number(x: torch.Tensor) -> torch.Tensor:
    """One ULP away from zero."""
    return (x.view(INTEGER[x.dtype]) + 1).view(x.dtype)


def tensors(*lists: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(values) for values in lists]


GOOD = [-0.5, -1.0, -2.0]


def tied_to(train: list[torch.Tensor], *, noise: float, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [x + noise * torch.randn(x.shape, generator=generator) for x in train]
