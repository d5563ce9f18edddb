"""What to do at a boundary where the ids do not continue."""

from __future__ import annotations

from typing import Literal

from mis_ext.rollout.conversations.boundary import BoundaryAction, BoundaryKind
from mis_ext.rollout.conversations.comparison import Finding
from mis_ext.rollout.generation import Generation

Policy = Literal["strict", "split"]
"""What to do where the ids do not continue."""


def choose_action(policy: Policy, call: Generation, finding: Finding) -> BoundaryAction:
    """The action that a policy takes at a boundary of this class."""
    if finding.position is None:
        return BoundaryAction.CONTINUED
    if policy == "strict":
        return BoundaryAction.RAISED
    if finding.kind is BoundaryKind.DUPLICATE or not call.sampled_ids:
        return BoundaryAction.DROPPED
    return BoundaryAction.SPLIT
