"""What to do at a boundary where the ids do not continue."""

from __future__ import annotations

from typing import Literal

from mis_ext.rollout.conversations.boundary import BoundaryAction, BoundaryKind
from mis_ext.rollout.conversations.comparison import Finding
from mis_ext.rollout.generation import Generation

Policy = Literal["strict", "correct", "split"]
"""What to do where the ids do not continue."""

BehindSplice = Literal["mask", "flag"]
"""What to do with sampled tokens behind a splice, whose log-probs are of another context."""

_SAME_CONVERSATION = (BoundaryKind.RETOKENIZED, BoundaryKind.RETEMPLATED, BoundaryKind.TRUNCATED_GENERATION)


def choose_action(policy: Policy, call: Generation, finding: Finding) -> BoundaryAction:
    """The action that a policy takes at a boundary of this class.

    Raises:
        ValueError: ``"correct"`` needs a tokenizer here.
    """
    if finding.position is None:
        return BoundaryAction.CONTINUED
    if policy == "strict":
        return BoundaryAction.RAISED
    if finding.kind is BoundaryKind.DUPLICATE:
        return BoundaryAction.DROPPED
    if not call.sampled_ids:
        return BoundaryAction.DROPPED
    if policy == "split":
        return BoundaryAction.SPLIT
    if finding.kind is None:
        raise ValueError(
            f"policy 'correct' needs a tokenizer: the prompt of request {call.request_id!r} differs from the known "
            f"ids at position {finding.position}, and tokenizer is None"
        )
    spliced = finding.kind in _SAME_CONVERSATION and finding.rest is not None
    return BoundaryAction.SPLICED if spliced else BoundaryAction.SPLIT
