# SPDX-License-Identifier: Apache-2.0
"""Types shared by this package: a call of an inference server in, training samples out.

What happened between two calls of a conversation, by class and action, and why no training sample may be built from a
response: one named error per reason, each naming the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

LARGEST_ID = 2**31 - 1
"""No vocabulary is larger."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write this character for bytes that are no whole character."""
MINUS_INFINITY = -9999.0
"""JSON has no infinity: vLLM writes this instead of the log-prob of what cannot be drawn."""
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Input and sampled output of the server; the readers guarantee every statement below.

    Attributes:
        request_id: The request, as the server or the caller names it.
        prompt_ids: Token ids the server was given. The builder checks them.
        sampled_ids: Token ids that were sampled, in order, a sampled end token included; may be empty.
        log_probs: Natural log-prob of each sampled id, as long as ``sampled_ids``; finite, at most 0.
        finish_reason: ``"stop"`` (an end token or a stop string), ``"length"`` (the token limit, or vLLM, where the
            model repeated itself) or ``"tool_calls"``.
        stop_match: The token id or the string that ended the generation, where the server says.
        text: The text that the server returned, None where it returned none.
        weight_version: The version of the weights that sampled, None where the server does not say.
        weight_versions: The version that sampled each id, where the weights changed in between; ``weight_version`` is
            then the last. None where one version sampled all.
        kept_ids: The ids that each sampled one was drawn from, where the server says: what top-k and top-p kept.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampled_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    stop_match: int | str | None = None
    text: str | None = None
    weight_version: str | None = None
    weight_versions: list[str] | None = None
    kept_ids: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """A prompt and a response in which every sampled token is marked.

    The response begins with the first sampled token. The lists about the response have ``response_length`` entries.

    Attributes:
        tokens: Token ids of prompt and response.
        response_length: Tokens of the response: sampled ones and, between turns, those of tools and of the template.
        loss_mask: 1 where the token was sampled and is trained, else 0.
        rollout_log_probs: The server's natural log-prob, of exactly this context, where ``loss_mask`` is 1, else 0.0.
        weight_versions: Version of the weights that sampled the token; None where nothing was sampled or the server did
            not say.
        request_ids: The calls whose tokens are trained in this sample, in order.
    """

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    weight_versions: list[str | None]
    request_ids: list[str]


class BoundaryKind(str, Enum):
    """Relation of a call's prompt to the calls before it."""

    CONTIGUOUS = "contiguous"
    """It begins with exactly the ids that are known of an earlier call, from which none went on before."""
    FORK = "fork"
    """It begins with exactly the ids that are known of an earlier call, and differs from the calls that continue that
    one before any token that these sampled: another branch of the conversation."""
    TRUNCATED_GENERATION = "truncated_generation"
    """The token limit ended the call before, and its exact ids are followed by something else: the template closed the
    turn."""
    RETRY = "retry"
    """The same prompt as any earlier call, and another sample."""
    DUPLICATE = "duplicate"
    """The same prompt, the same sampled ids and log-probs as any earlier call."""
    EMPTY_GENERATION = "empty_generation"
    """The call before it sampled nothing; the prompt begins with exactly the ids that are known."""
    DIFFERENT = "different"
    """Anything else; the boundary has the position of the first mismatch, both ids and, with a tokenizer, the texts."""


class BoundaryAction(str, Enum):
    """Action of the builder at a boundary."""

    CONTINUED = "continued"
    """The call goes on from the earlier one, in the same sample."""
    SPLIT = "split"
    """Another sample, behind exactly the call's own prompt. Of the calls that several samples have before them, that
    which ends last has the tokens."""
    DROPPED = "dropped"
    """The call is omitted: a duplicate, or one that sampled nothing and does not continue the conversation."""
    RAISED = "raised"
    """The boundary is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """Point at which a call joins the earlier calls of its conversation, and the comparison of its prompt with them.

    Attributes:
        kind: The class.
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

    kind: BoundaryKind
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
"""Action if the token IDs of a call do not continue those of the one before."""


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
        kinds = Counter(each.kind.value for each in self.boundaries)
        actions = Counter(each.action.value for each in self.boundaries)
        return {
            "generations": self.generations,
            "generations/empty": self.empty_generations,
            "samples": len(self.samples),
            "sampled_tokens": self.sampled_tokens,
            "sampled_tokens/trained": trained,
            "sampled_tokens/dropped": self.sampled_tokens - trained,
            "boundaries": len(self.boundaries),
            **{f"boundaries/{kind.value}": kinds[kind.value] for kind in BoundaryKind},
            **{f"boundaries/{action.value}": actions[action.value] for action in BoundaryAction},
        }


class Tokenizer(Protocol):
    """A Hugging Face tokenizer, or anything with its ``encode`` and ``decode``."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...  # noqa: D102

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...  # noqa: D102


def find_illegal_id(ids: list[Any]) -> int | None:
    """The index of the first value that is no token id; None if all are."""
    # Types before values, each in one pass in C: the loop runs only to name the position. True and 5.0 equal ids and
    # are none.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= LARGEST_ID):
        return None
    return next(index for index, each in enumerate(ids) if type(each) is not int or not 0 <= each <= LARGEST_ID)


class RolloutError(ValueError):
    """A server's response, or a conversation, from which no training sample may be built.

    Attributes:
        request_id: The request, as the server or the caller names it.
        message: What is wrong, without the request.
    """

    def __init__(self, request_id: str, message: str) -> None:
        # Both are arguments of the exception, so that it survives the way through a pool of processes.
        super().__init__(request_id, message)
        self.request_id, self.message = request_id, message

    def __str__(self) -> str:
        return f"request {self.request_id!r}: {self.message}"


class MalformedResponse(RolloutError):
    """A field is missing, has another type, or a value outside its range."""


class CountMismatch(RolloutError):
    """Two fields that count the same tokens disagree."""


class LogProbError(RolloutError):
    """A sampled token's log-prob is missing, not finite, or above 0."""


class Contradiction(RolloutError):
    """The response holds the same thing twice, and the two differ."""


class AbortedRequest(RolloutError):
    """The server gave the request up before it was finished."""


class NotASample(RolloutError):
    """The server searched or chose among samples, so its response was not drawn from the policy."""


class UnprovenTokenIds(RolloutError):
    """The response has no token ids of what was sampled, or none of the prompt."""


class BoundaryError(RolloutError):
    """A turn does not continue the conversation that was sampled before it.

    Attributes:
        boundary: What was found; its action is ``"raised"``.
    """

    def __init__(self, request_id: str, message: str, boundary: Boundary | None = None) -> None:
        super().__init__(request_id, message)
        self.args = (request_id, message, boundary)
        self.boundary = boundary
