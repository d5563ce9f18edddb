"""The audit of dumped samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.dumps import DumpedSample
from mis_ext.onpolicy.audit.log_probs import Version, audit_logprobs
from mis_ext.onpolicy.audit.report import AuditReport, Provenance


def audit_samples(
    samples: Sequence[DumpedSample],
    *,
    provenance: Provenance = "unknown",
    train_weight_version: Version | None = None,
) -> AuditReport:
    """The audit of samples from files; a version given here stands for samples whose file names none."""
    own_versions = [sample.proximal_weight_version for sample in samples]
    return audit_logprobs(
        _as_one_dtype([sample.proximal_log_probs for sample in samples]),
        _as_one_dtype([sample.behavior_log_probs for sample in samples]),
        masks=[sample.response_mask for sample in samples],
        train_token_ids=[sample.response_ids for sample in samples],
        rollout_token_ids=[sample.sampled_ids for sample in samples],
        provenance=provenance,
        train_weight_version=[train_weight_version if version is None else version for version in own_versions],
        rollout_weight_versions=[sample.behavior_weight_versions for sample in samples],
        names=[sample.name for sample in samples],
    )


def _as_one_dtype(log_probs: list[Tensor | None]) -> list[Tensor | None]:
    """Float64 where some are: of two files of Python floats one may hold float32 numbers only."""
    dtypes = {x.dtype for x in log_probs if x is not None}
    return [x if x is None else x.double() for x in log_probs] if torch.float64 in dtypes else log_probs
