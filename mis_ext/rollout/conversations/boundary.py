# SPDX-License-Identifier: Apache-2.0
"""What happened between two calls of one conversation, and what became of it: classes, actions and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from mis_ext.rollout.generation import TrainingSample


class BoundaryKind(str, Enum):
    """How a call's prompt relates to the calls before it."""

    CONTIGUOUS = "contiguous"
    """It begins with exactly the ids that are known of an earlier call, from which none went on before."""
    FORK = "fork"
    """It begins with exactly the ids that are known of an earlier call, and goes on in another way than the calls that
    went on from there: another branch of the conversation, or what stands behind that call was edited."""
    RETOKENIZED = "retokenized"
    """It begins with the same text in other tokens."""
    RETEMPLATED = "retemplated"
    """A sampled turn is written another way (white space at its ends and beside tags, JSON), all else is unchanged."""
    REASONING_STRIPPED = "reasoning_stripped"
    """A turn lost its reasoning block, all else is unchanged or re-templated."""
    TRUNCATED_GENERATION = "truncated_generation"
    """The token limit ended the call before, and what was sampled is followed by something else: the template closed
    the turn. The ids may continue exactly, or be re-tokenized or re-templated within that turn."""
    RETRY = "retry"
    """The same prompt as any earlier call, and another sample."""
    DUPLICATE = "duplicate"
    """The same prompt, the same sampled ids and log-probs as any earlier call."""
    EMPTY_GENERATION = "empty_generation"
    """The call before it sampled nothing; the prompt begins with exactly the ids that are known."""
    HISTORY_EDITED = "history_edited"
    """Anything else: a text that was not sampled, a whole turn, or the words of a sampled turn changed; or it is
    another conversation."""


class BoundaryAction(str, Enum):
    """What the builder did at a boundary."""

    CONTINUED = "continued"
    """The call goes on from the earlier one, in the same sample."""
    SPLIT = "split"
    """Another sample, behind exactly the call's own prompt. Of the calls that several samples have before them, that
    which ends last has the tokens."""
    DROPPED = "dropped"
    """The call is left out: a duplicate, or one that sampled nothing and does not continue the conversation."""
    RAISED = "raised"
    """The boundary is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """Where a call joins the earlier calls of its conversation: how its prompt compares with what is known.

    Attributes:
        kind: The class; None where only a tokenizer could tell and none was given.
        action: What was done.
        earlier: Request id of the call that the prompt was compared with: of those with the most ids in common the
            last, or the last of all.
        later: Request id of the call whose prompt was compared.
        continues: Request id of the call that stands before this one in a sample, with all ids that were sampled; None
            where a sample begins with this one, or it is in none.
        position: Index of the first prompt id that differs from what is known; None if all known ids are there.
        expected_id: The known id at that position; None where nothing more is known.
        found_id: The prompt's id at that position; None where the prompt ends.
        expected_text: The known conversation around that position, decoded; None without a tokenizer.
        found_text: The prompt around that position, decoded; None without a tokenizer.
    """

    kind: BoundaryKind | None
    action: BoundaryAction
    earlier: str
    later: str
    continues: str | None = None
    position: int | None = None
    expected_id: int | None = None
    found_id: int | None = None
    expected_text: str | None = None
    found_text: str | None = None


Policy = Literal["strict", "split"]
"""What to do where the ids do not continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The samples of one conversation, and what became of each of its calls.

    Attributes:
        samples: In the order of their last calls. Every sampled token is trained in at most one of them.
        boundaries: One per call after the first, in order; none after a truncation.
        generations: Calls that were given.
        empty_generations: Those that sampled nothing, and are in no sample.
        sampled_tokens: Tokens that the calls sampled.
    """

    samples: tuple[TrainingSample, ...]
    boundaries: tuple[Boundary, ...]
    generations: int
    empty_generations: int
    sampled_tokens: int

    def metrics(self) -> dict[str, int]:
        """Counts, which add up over conversations; each share's denominator is the count its name begins with."""
        trained = sum(sum(sample.loss_mask) for sample in self.samples)
        kinds = Counter("unclassified" if each.kind is None else each.kind.value for each in self.boundaries)
        actions = Counter(each.action.value for each in self.boundaries)
        names = [kind.value for kind in BoundaryKind] + ["unclassified"]
        return {
            "generations": self.generations,
            "generations/empty": self.empty_generations,
            "samples": len(self.samples),
            "sampled_tokens": self.sampled_tokens,
            "sampled_tokens/trained": trained,
            "sampled_tokens/dropped": self.sampled_tokens - trained,
            "boundaries": len(self.boundaries),
            **{f"boundaries/{name}": kinds[name] for name in names},
            **{f"boundaries/{action.value}": actions[action.value] for action in BoundaryAction},
        }
