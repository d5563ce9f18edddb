"""What the comparison of one sample measures.

Everything here is a function of one sample, so that no number depends on how samples are spread over ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import TokenRatios
from mis_ext.diagnosis.measuring import Measuring, versions_behind
from mis_ext.onpolicy.audit.checks import Sample, active_tokens, find_problem, first_true
from mis_ext.onpolicy.audit.findings import Divergence, Problem
from mis_ext.onpolicy.bits import same_bits, ulp_distance

NUM_DECILES = 10


class Decile(NamedTuple):
    """Active tokens of one decile of the rollout probability."""

    num_tokens: int
    num_nonzero: int
    sum_abs_diff: float
    max_abs_diff: float


class Facts(NamedTuple):
    """What the comparison of one sample measures; counts are of active tokens, of which there is at least one."""

    train_dtype: str
    rollout_dtype: str
    train_versions: tuple[str, ...]
    rollout_versions: tuple[str, ...]
    num_active: int
    num_nonzero: int
    num_signed_zero: int
    num_nonzero_in_bf16: int
    max_ulp: int
    deciles: tuple[Decile, ...]
    first_divergence: Divergence | None
    shown: Measuring
    """What causes show in."""

    @property
    def is_stale(self) -> bool:
        """Some of the sample was drawn with other weights than the trainer's, as far as the versions are known."""
        return bool(self.train_versions) and not set(self.rollout_versions) <= set(self.train_versions)


def examine(sample: Sample, index: int) -> Problem | Facts | None:
    """The first problem of a sample, else what the comparison measures, or None without an active token."""
    problem = find_problem(sample)
    if problem is not None:
        return problem._replace(sample=index, name=sample.name)
    active_T = active_tokens(sample)
    return _measure(sample, active_T, index) if active_T.any() else None


def _measure(sample: Sample, active_T: Tensor, index: int) -> Facts:
    # Widening is exact, so this compares the numbers that were given.
    dtype = torch.promote_types(sample.train.dtype, sample.rollout.dtype)
    train_T, rollout_T = (x.detach().cpu().to(dtype) for x in (sample.train, sample.rollout))
    train, rollout = train_T[active_T], rollout_T[active_T]
    # Of integers: floating-point units can be set to take the smallest numbers for 0.
    ulps = ulp_distance(train, rollout)
    nonzero = ulps != 0
    abs_diff = (train.double() - rollout.double()).abs()
    if not math.isfinite(float(abs_diff.sum())):
        raise OverflowError("the sum of the differences is no finite number")
    return Facts(
        train_dtype=_dtype_name(sample.train),
        rollout_dtype=_dtype_name(sample.rollout),
        train_versions=_version_names(sample.train_version),
        rollout_versions=_version_names(sample.rollout_versions),
        num_active=train.numel(),
        num_nonzero=int(nonzero.sum()),
        num_signed_zero=int((~same_bits(train, rollout) & ~nonzero).sum()),
        num_nonzero_in_bf16=int((train.bfloat16() != rollout.bfloat16()).sum()),
        max_ulp=int(ulps.max()),
        deciles=_deciles(rollout, nonzero, abs_diff),
        first_divergence=_first_divergence(sample, train_T, rollout_T, active_T, index),
        shown=_shown(sample, train_T, rollout_T, active_T),
    )


def _deciles(rollout: Tensor, nonzero: Tensor, abs_diff: Tensor) -> tuple[Decile, ...]:
    # A log-prob above 0 is a mistake that must not leave the table.
    decile = (rollout.double().clamp_max(0.0).exp() * NUM_DECILES).long().clamp_max(NUM_DECILES - 1)
    num_tokens = decile.bincount(minlength=NUM_DECILES).tolist()
    num_nonzero = decile[nonzero].bincount(minlength=NUM_DECILES).tolist()
    rows = []
    for number in range(NUM_DECILES):
        differences = abs_diff[nonzero & (decile == number)].tolist() if num_nonzero[number] else []
        rows.append(
            Decile(
                num_tokens=num_tokens[number],
                num_nonzero=num_nonzero[number],
                sum_abs_diff=math.fsum(differences),
                max_abs_diff=max(differences, default=0.0),
            )
        )
    return tuple(rows)


def _first_divergence(
    sample: Sample, train_T: Tensor, rollout_T: Tensor, active_T: Tensor, index: int
) -> Divergence | None:
    position = first_true(active_T & (ulp_distance(train_T, rollout_T) != 0))
    if position is None:
        return None
    ids = sample.rollout_token_ids if sample.rollout_token_ids is not None else sample.train_token_ids
    return Divergence(
        sample=index,
        position=position,
        token_id=None if ids is None else int(ids[position]),
        train=train_T[position].item(),
        rollout=rollout_T[position].item(),
        ulps=int(ulp_distance(train_T[position], rollout_T[position])),
        name=sample.name,
    )


def _shown(sample: Sample, train_T: Tensor, rollout_T: Tensor, active_T: Tensor) -> Measuring:
    """Differences in float64, because of two float64 numbers float32 may be equal."""
    rollout_T, train_T = (torch.where(active_T, each, 0.0).double() for each in (rollout_T, train_T))
    tokens = TokenRatios(
        log_ratio_T=train_T - rollout_T,
        proximal_T=train_T,
        behavior_T=rollout_T,
        response_mask_T=active_T,
        valid_mask_T=active_T,
    )
    trainer, engine = (_version_names(each) for each in (sample.train_version, sample.rollout_versions))
    has_ids = sample.train_token_ids is not None and sample.rollout_token_ids is not None
    return Measuring().add(
        tokens,
        PackedLayout.whole([len(active_T)]),
        response_mask_R=active_T,
        versions_behind=[versions_behind(next(iter(trainer), None), engine)],
        # Those that differ are a problem.
        has_other_ids=[False if has_ids else None],
        token_ids=[sample.train_token_ids],
    )


def _version_names(versions: Any) -> tuple[str, ...]:
    if versions is None:
        return ()
    return tuple(str(v) for v in versions) if isinstance(versions, (list, tuple)) else (str(versions),)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
