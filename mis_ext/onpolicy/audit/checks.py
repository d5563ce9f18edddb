"""What makes the log-probs of a sample incomparable."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.onpolicy.audit.findings import Problem
from mis_ext.onpolicy.bits import FLOAT_DTYPES, same_bits


class Sample(NamedTuple):
    """One sample as the caller gave it: log-probs ``[T]``, and what belongs to them (None where not given)."""

    train: Any
    rollout: Any
    mask: Any
    train_token_ids: Any
    rollout_token_ids: Any
    train_version: Any
    rollout_versions: Any
    name: str | None
    problem: str | None = None
    """Known before: the sample cannot be compared."""
    recorded: Tensor | None = None
    """The rollout log-probs as the engine's side recorded them."""
    recorded_in: str | None = None


def find_problem(sample: Sample) -> Problem | None:
    """The first reason why the log-probs of a sample cannot be compared, and the position if it is one token's."""
    if sample.problem is not None:
        return Problem(sample.problem)
    for side, log_probs in (("train", sample.train), ("rollout", sample.rollout)):
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
    return _find_problem_of_tokens(sample)


def _find_problem_of_tokens(sample: Sample) -> Problem | None:
    ids = {"train": sample.train_token_ids, "rollout": sample.rollout_token_ids}
    known = {side: torch.as_tensor(values).cpu() for side, values in ids.items() if values is not None}
    for side, values in known.items():
        position = first_true((values != values.round()) | values.isinf()) if values.is_floating_point() else None
        if position is not None:
            return Problem(f"the {side} token id is {values[position].item()}, no whole number", position=position)
    if len(known) == 2:
        train_ids, rollout_ids = (values.long() for values in known.values())
        # Masked tokens too: they are the context of the tokens behind them.
        position = first_true(train_ids != rollout_ids)
        if position is not None:
            pair = f"{train_ids[position].item()} in training and {rollout_ids[position].item()} in the rollout"
            return Problem(f"the token id is {pair}", position=position, has_other_ids=True)
    if sample.mask is not None:
        mask = torch.as_tensor(sample.mask).cpu()
        position = first_true(~(mask >= 0) | mask.isinf())
        if position is not None:
            return Problem(
                f"the mask is {mask[position].item()}, which says neither active nor masked", position=position
            )
    active_T = active_tokens(sample)
    for side, log_probs in (("train", sample.train), ("rollout", sample.rollout)):
        position = first_true(active_T & ~log_probs.detach().cpu().isfinite())
        if position is not None:
            return Problem(f"the {side} log-prob is {log_probs[position].item()}", position=position)
    record_problem = _find_problem_of_record(sample, active_T)
    if record_problem is not None:
        return record_problem
    same_memory = (sample.train.device, sample.train.data_ptr()) == (sample.rollout.device, sample.rollout.data_ptr())
    if same_memory and active_T.any():
        return Problem(
            "train and rollout log-probs are the same memory: one was filled in from the other, and to compare a "
            "tensor with itself proves nothing"
        )
    return None


def _find_problem_of_record(sample: Sample, active_T: Tensor) -> Problem | None:
    if sample.recorded is None:
        return None
    if sample.recorded.shape != sample.rollout.shape:
        lengths = f"{len(sample.rollout)} rollout log-probs, but {len(sample.recorded)}"
        return Problem(f"{lengths} in the engine's record ({sample.recorded_in})")
    # A host may round what the engine returned to the trainer's dtype.
    recorded, rollout = sample.recorded.to(sample.rollout.dtype), sample.rollout.detach().cpu()
    position = first_true(active_T & ~same_bits(rollout, recorded))
    if position is None:
        return None
    pair = f"{rollout[position].item()!r}, and {recorded[position].item()!r} in the engine's record"
    return Problem(
        f"the rollout log-prob is {pair} ({sample.recorded_in}): it was changed or filled in on the way",
        position=position,
    )


def active_tokens(sample: Sample) -> Tensor:
    """``[T]``, bool: where the mask is not zero."""
    if sample.mask is None:
        return torch.ones(len(sample.train), dtype=torch.bool)
    return torch.as_tensor(sample.mask).cpu() != 0


def first_true(chosen_T: Tensor) -> int | None:
    """The lowest position where ``chosen_T`` is true."""
    return int(chosen_T.nonzero()[0]) if chosen_T.any() else None
