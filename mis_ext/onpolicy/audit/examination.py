# SPDX-License-Identifier: Apache-2.0
"""One sample after the other: what makes its log-probs incomparable, and else what their comparison measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.tokens import Tokens
from mis_ext.onpolicy.audit.audit_report import Divergence, Problem
from mis_ext.onpolicy.bits import FLOAT_DTYPES, same_bits, ulp_distance
from mis_ext.tools.diagnosis.evidence import Evidence, Origin, versions_behind


class Sample(NamedTuple):
    """One sample as the caller gave it: log-probs ``[T]``, and what belongs to them (None where not given)."""

    train: Any
    rollout: Any
    mask: Any
    train_token_ids: Any
    rollout_token_ids: Any
    train_version: Any
    rollout_versions: Any
    recorded: Tensor | None = None
    """The rollout log-probs as the engine's side recorded them."""
    name: str | None = None
    recorded_in: str | None = None
    problem: str | None = None
    """Known before: the sample cannot be compared."""


def find_problem(sample: Sample) -> Problem | None:
    """The first reason why the log-probs of a sample cannot be compared, and the position if it is one token's."""
    if sample.problem is not None:
        return Problem(sample.problem)
    streams = ("train", sample.train), ("rollout", sample.rollout)
    for side, log_probs in streams:
        if log_probs is None:
            return Problem(f"{side} log-probs are missing")
        if not isinstance(log_probs, Tensor):
            return Problem(f"{side} log-probs are a {type(log_probs).__name__}, not a tensor")
        if log_probs.ndim != 1:
            return Problem(f"{side} log-probs have shape {[*log_probs.shape]}, not [T]")
        if log_probs.dtype not in FLOAT_DTYPES:
            return Problem(f"{side} log-probs are {log_probs.dtype}, which is none of the floating-point dtypes here")
    length = len(sample.train)
    if len(sample.rollout) != length:
        return Problem(f"{length} train and {len(sample.rollout)} rollout log-probs")
    for what, values in (
        ("mask values", sample.mask),
        ("train token ids", sample.train_token_ids),
        ("rollout token ids", sample.rollout_token_ids),
    ):
        shape = [length] if values is None else [*torch.as_tensor(values).shape]
        if shape != [length]:
            part = " (a part of a response needs its own part of them)" if len(shape) == 1 and length < shape[0] else ""
            return Problem(f"{length} log-probs, but {what} of shape {shape}{part}")
    if sample.train_token_ids is not None and sample.rollout_token_ids is not None:
        ids = [torch.as_tensor(values).cpu().double() for values in (sample.train_token_ids, sample.rollout_token_ids)]
        # Masked tokens too: they are the context of the tokens behind them.
        position = first_true(ids[0] != ids[1])
        if position is not None:
            pair = " in training and ".join(f"{each[position].item():g}" for each in ids)
            return Problem(f"the token id is {pair} in the rollout", position=position, has_other_ids=True)
    if sample.mask is not None:
        mask = torch.as_tensor(sample.mask).cpu()
        position = first_true(~(mask >= 0) | mask.isinf())
        if position is not None:
            return Problem(f"the mask is {mask[position].item()}, not a finite number >= 0", position=position)
    active_T = active_tokens(sample)
    for side, log_probs in streams:
        position = first_true(active_T & ~log_probs.detach().cpu().isfinite())
        if position is not None:
            return Problem(f"the {side} log-prob is {log_probs[position].item()}", position=position)
    if sample.recorded is not None and (problem := _find_record_problem(sample, sample.recorded, active_T)) is not None:
        return problem
    same_memory = (sample.train.device, sample.train.data_ptr()) == (sample.rollout.device, sample.rollout.data_ptr())
    if same_memory and active_T.any():
        return Problem("train and rollout log-probs are the same memory: one was filled in from the other")
    return None


def _find_record_problem(sample: Sample, recorded: Tensor, active_T: Tensor) -> Problem | None:
    where = "" if sample.recorded_in is None else f" ({sample.recorded_in})"
    if recorded.shape != sample.rollout.shape:
        lengths = f"{len(sample.rollout)} rollout log-probs, but {len(recorded)}"
        return Problem(f"{lengths} in the engine's record{where}")
    # A framework may round what the engine returned to the trainer's dtype.
    recorded, rollout = recorded.detach().cpu().to(sample.rollout.dtype), sample.rollout.detach().cpu()
    position = first_true(active_T & ~same_bits(rollout, recorded))
    if position is None:
        return None
    pair = f"{rollout[position].item()!r}, and {recorded[position].item()!r} in the engine's record"
    return Problem(f"the rollout log-prob is {pair}{where}: it was changed or filled in on the way", position=position)


def active_tokens(sample: Sample) -> Tensor:
    """``[T]``, bool: where the mask is not zero."""
    if sample.mask is None:
        return torch.ones(len(sample.train), dtype=torch.bool)
    return torch.as_tensor(sample.mask).cpu() != 0


def first_true(chosen_T: Tensor) -> int | None:
    """The lowest position where ``chosen_T`` is true."""
    return int(chosen_T.nonzero()[0]) if chosen_T.any() else None


class Facts(NamedTuple):
    """Measurements of one sample; counts are of active tokens, of which there is at least one."""

    train_dtype: str
    rollout_dtype: str
    is_recorded: bool
    is_stale: bool
    """Some of it was drawn with other weights than the trainer's, as far as the versions are known."""
    num_active: int
    num_nonzero: int
    sum_abs_diff: float
    max_abs_diff: float
    max_ulp: int
    first_divergence: Divergence | None
    shown: Evidence
    """Evidence for causes."""


def examine(sample: Sample, index: int) -> Problem | Facts | None:
    """The first problem of a sample, else what the comparison measures, or None without an active token."""
    problem = find_problem(sample)
    if problem is not None:
        return problem._replace(sample=index, name=sample.name)
    active_T = active_tokens(sample)
    if not active_T.any():
        return None
    # Widening is exact, so this compares the numbers that were given.
    dtype = torch.promote_types(sample.train.dtype, sample.rollout.dtype)
    train_T, rollout_T = (x.detach().cpu().to(dtype) for x in (sample.train, sample.rollout))
    train, rollout = train_T[active_T], rollout_T[active_T]
    # Of integers: floating-point units can be set to take the smallest numbers for 0.
    ulps = ulp_distance(train, rollout)
    nonzero = ulps != 0
    abs_diff = (train.double() - rollout.double()).abs()
    divergence = None
    if (first := first_true(nonzero)) is not None:
        position = int(active_T.nonzero()[first])
        ids = sample.rollout_token_ids if sample.rollout_token_ids is not None else sample.train_token_ids
        divergence = Divergence(
            sample=index,
            position=position,
            token_id=None if ids is None else int(ids[position]),
            train=train[first].item(),
            rollout=rollout[first].item(),
            ulps=int(ulps[first]),
            name=sample.name,
        )
    trained = _version_names(sample.train_version)
    return Facts(
        train_dtype=str(sample.train.dtype).removeprefix("torch."),
        rollout_dtype=str(sample.rollout.dtype).removeprefix("torch."),
        is_recorded=sample.recorded is not None,
        is_stale=bool(trained) and not {*_version_names(sample.rollout_versions)} <= {*trained},
        num_active=train.numel(),
        num_nonzero=int(nonzero.sum()),
        sum_abs_diff=float(abs_diff.sum()),
        max_abs_diff=float(abs_diff.max()),
        max_ulp=int(ulps.max()),
        first_divergence=divergence,
        shown=_shown(sample, train_T, rollout_T, active_T),
    )


def _shown(sample: Sample, train_T: Tensor, rollout_T: Tensor, active_T: Tensor) -> Evidence:
    """Differences in float64, because of two float64 numbers float32 may be equal."""
    rollout_T, train_T = (torch.where(active_T, each, 0.0).double() for each in (rollout_T, train_T))
    tokens = Tokens(train_T - rollout_T, train_T, rollout_T, generated=active_T, valid=active_T)
    trainer, engine = (_version_names(each) for each in (sample.train_version, sample.rollout_versions))
    ids = sample.train_token_ids
    has_ids = ids is not None and sample.rollout_token_ids is not None
    origin = Origin(
        versions_behind=versions_behind(next(iter(trainer), None), engine),
        token_ids=ids.cpu() if isinstance(ids, Tensor) else ids,
        # Those that differ are a problem.
        has_other_ids=False if has_ids else None,
    )
    return Evidence.of(tokens, PackedLayout.whole([len(active_T)]), [origin])


def _version_names(versions: Any) -> tuple[str, ...]:
    if versions is None:
        return ()
    return tuple(str(v) for v in versions) if isinstance(versions, (list, tuple)) else (str(versions),)


class Found(NamedTuple):
    """Findings of all samples."""

    num_samples: int
    problems: list[Problem]
    facts: list[Facts]


def examine_rows(rows: Iterable[Sample]) -> Found:
    """Every sample alone; what cannot even be read is a problem of the sample, and no exception."""
    num_samples = 0
    problems: list[Problem] = []
    facts: list[Facts] = []
    for index, row in enumerate(rows):
        num_samples += 1
        try:
            found = examine(row, index)
        except Exception as error:
            found = Problem(f"not comparable: {type(error).__name__}: {error}", sample=index, name=row.name)
        if isinstance(found, Problem):
            problems.append(found)
        elif found is not None:
            facts.append(found)
    if not problems and not facts:
        problems.append(Problem("no active token: nothing was compared"))
    return Found(num_samples, problems, facts)
