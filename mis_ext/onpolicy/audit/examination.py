# SPDX-License-Identifier: Apache-2.0
"""Examination of single samples: problems of the comparison, or its measurements."""

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
from mis_ext.tools.dumps.formats import DumpedSample


def find_problem(sample: DumpedSample, record: DumpedSample | None = None) -> Problem | None:
    """The first reason why the log-probs of a sample cannot be compared, with a position if it concerns one token.

    Args:
        sample: The sample.
        record: The engine's record of the sample; None if there is none.
    """
    problem = sample.problem or (None if record is None else _record_problem(sample, record))
    if problem is not None:
        return Problem(problem)
    train, rollout = sample.proximal_log_probs, sample.behavior_log_probs
    if train is None or rollout is None:
        return Problem(f"{'train' if train is None else 'rollout'} log-probs are missing")
    streams = ("train", train), ("rollout", rollout)
    for side, log_probs in streams:
        if not isinstance(log_probs, Tensor):
            return Problem(f"{side} log-probs are a {type(log_probs).__name__}, not a tensor")
        if log_probs.ndim != 1:
            return Problem(f"{side} log-probs have shape {[*log_probs.shape]}, not [T]")
        if log_probs.dtype not in FLOAT_DTYPES:
            return Problem(f"{side} log-probs are {log_probs.dtype}, which is not a supported floating-point dtype")
    length = len(train)
    if len(rollout) != length:
        return Problem(f"{length} train and {len(rollout)} rollout log-probs")
    for what, values in (
        ("mask values", sample.response_mask),
        ("train token ids", sample.response_ids),
        ("rollout token ids", sample.sampled_ids),
    ):
        shape = [length] if values is None else [*torch.as_tensor(values).shape]
        if shape != [length]:
            part = " (a part of a response needs its own part of them)" if len(shape) == 1 and length < shape[0] else ""
            return Problem(f"{length} log-probs, but {what} of shape {shape}{part}")
    if sample.response_ids is not None and sample.sampled_ids is not None:
        ids = [torch.as_tensor(values).cpu().double() for values in (sample.response_ids, sample.sampled_ids)]
        # Masked tokens too: they are the context of later tokens.
        position = first_true(ids[0] != ids[1])
        if position is not None:
            pair = " in training and ".join(f"{each[position].item():g}" for each in ids)
            return Problem(f"the token id is {pair} in the rollout", position=position)
    active_T = active_tokens(sample.response_mask, length)
    for side, log_probs in streams:
        position = first_true(active_T & ~log_probs.detach().cpu().isfinite())
        if position is not None:
            return Problem(f"the {side} log-prob is {log_probs[position].item()}", position=position)
    if record is not None and (found := _find_record_difference(rollout, record, active_T)) is not None:
        return found
    if sample.is_one_memory and active_T.any():
        return Problem("train and rollout log-probs are the same memory: one was filled in from the other")
    return None


def _record_problem(sample: DumpedSample, record: DumpedSample) -> str | None:
    """Why the record of a sample cannot be compared with its log-probs."""
    if record.behavior_log_probs is None:
        return f"the engine's record has no log-probs ({record.name})"
    ids, recorded = ids_of(sample), ids_of(record)
    if ids is not None and recorded is not None and ids != recorded:
        return f"the token ids differ from those of the engine's record ({record.name})"
    return None


def ids_of(sample: DumpedSample) -> tuple[str, ...] | None:
    """The ids of prompt and response as text, because a file may contain any values."""
    ids = sample.token_ids
    return None if ids is None else tuple(map(str, ids.tolist() if isinstance(ids, Tensor) else ids))


def _find_record_difference(rollout: Tensor, record: DumpedSample, active_T: Tensor) -> Problem | None:
    where, recorded = f" ({record.name})" if record.path else "", torch.as_tensor(record.behavior_log_probs)
    if recorded.shape != rollout.shape:
        return Problem(f"{len(rollout)} rollout log-probs, but {len(recorded)} in the engine's record{where}")
    # A framework may round the engine's log-probs to the trainer's dtype.
    recorded, rollout = recorded.detach().cpu().to(rollout.dtype), rollout.detach().cpu()
    position = first_true(active_T & ~same_bits(rollout, recorded))
    if position is None:
        return None
    pair = f"{rollout[position].item()!r}, and {recorded[position].item()!r} in the engine's record{where}"
    changed = f"the rollout log-prob is {pair}: it was changed or filled in between the engine and the trainer"
    return Problem(changed, position=position)


def active_tokens(mask: Any, length: int) -> Tensor:
    """``[length]``, bool: where the mask is not zero; without a mask everywhere."""
    return torch.ones(length, dtype=torch.bool) if mask is None else torch.as_tensor(mask).cpu() != 0


def first_true(chosen_T: Tensor) -> int | None:
    """The lowest position where ``chosen_T`` is true."""
    return int(chosen_T.nonzero()[0]) if chosen_T.any() else None


class Facts(NamedTuple):
    """Measurements of one sample. Counts are over active tokens; there is at least one."""

    train_dtype: str
    rollout_dtype: str
    is_recorded: bool
    num_active: int
    num_nonzero: int
    sum_abs_diff: float
    max_abs_diff: float
    max_ulp: int
    first_divergence: Divergence | None
    shown: Evidence
    """Evidence for causes."""


def measure(sample: DumpedSample, record: DumpedSample | None, index: int, name: str | None) -> Facts | None:
    """The comparison of a sample without a problem; None without an active token."""
    given = [torch.as_tensor(x).detach().cpu() for x in (sample.proximal_log_probs, sample.behavior_log_probs)]
    active_T = active_tokens(sample.response_mask, len(given[0]))
    if not active_T.any():
        return None
    # Widening is exact, so this compares the given values.
    dtype = torch.promote_types(given[0].dtype, given[1].dtype)
    train_T, rollout_T = (x.to(dtype) for x in given)
    train, rollout = train_T[active_T], rollout_T[active_T]
    # Compare integers, because floating-point units can be set to flush the smallest numbers to 0.
    ulps = ulp_distance(train, rollout)
    nonzero = ulps != 0
    abs_diff = (train.double() - rollout.double()).abs()
    divergence = None
    if (first := first_true(nonzero)) is not None:
        position = int(active_T.nonzero()[first])
        ids = sample.sampled_ids if sample.sampled_ids is not None else sample.response_ids
        divergence = Divergence(
            sample=index,
            position=position,
            token_id=None if ids is None else int(ids[position]),
            train=train[first].item(),
            rollout=rollout[first].item(),
            ulps=int(ulps[first]),
            name=name,
        )
    trained, drawn = sample.proximal_weight_version, sample.behavior_weight_versions
    if drawn is None and record is not None:
        drawn = record.behavior_weight_versions
    return Facts(
        train_dtype=str(given[0].dtype).removeprefix("torch."),
        rollout_dtype=str(given[1].dtype).removeprefix("torch."),
        is_recorded=record is not None,
        num_active=train.numel(),
        num_nonzero=int(nonzero.sum()),
        sum_abs_diff=float(abs_diff.sum()),
        max_abs_diff=float(abs_diff.max()),
        max_ulp=int(ulps.max()),
        first_divergence=divergence,
        shown=_shown(sample, versions_behind(trained, _names(drawn)), train_T, rollout_T, active_T),
    )


def _shown(sample: DumpedSample, behind: float, train_T: Tensor, rollout_T: Tensor, active_T: Tensor) -> Evidence:
    """Differences in float64, because two different float64 values may be equal in float32."""
    rollout_T, train_T = (torch.where(active_T, each, 0.0).double() for each in (rollout_T, train_T))
    tokens = Tokens(train_T - rollout_T, train_T, rollout_T, generated=active_T, valid=active_T)
    ids, has_ids = sample.response_ids, sample.response_ids is not None and sample.sampled_ids is not None
    origin = Origin(
        versions_behind=behind,
        token_ids=ids.cpu() if isinstance(ids, Tensor) else ids,
        # Different ids are a problem.
        has_other_ids=False if has_ids else None,
        source=sample.path,
    )
    return Evidence.of(tokens, PackedLayout.whole([len(active_T)]), [origin], step=sample.step)


def _names(versions: Any) -> list[str] | None:
    if versions is None:
        return None
    return [*map(str, versions if isinstance(versions, (list, tuple)) else [versions])]


class Found(NamedTuple):
    """Findings of all samples."""

    num_samples: int
    problems: list[Problem]
    facts: list[Facts]


def examine_rows(rows: Iterable[tuple[DumpedSample, DumpedSample | None]]) -> Found:
    """Examine every sample separately. An unreadable sample is a problem, not an exception."""
    num_samples = 0
    problems: list[Problem] = []
    facts: list[Facts] = []
    for index, (sample, record) in enumerate(rows):
        num_samples += 1
        name, measured = sample.name if sample.path else None, None
        try:
            problem = find_problem(sample, record)
            if problem is None:
                measured = measure(sample, record, index, name)
        except Exception as error:
            problem = Problem(f"not comparable: {type(error).__name__}: {error}")
        if problem is not None:
            problems.append(problem._replace(sample=index, name=name))
        elif measured is not None:
            facts.append(measured)
    if not problems and not facts:
        problems.append(Problem("no active token: nothing was compared"))
    return Found(num_samples, problems, facts)
