# SPDX-License-Identifier: Apache-2.0
"""Types of this package: calls of an inference server, and training samples.

Also the classes and actions of boundaries between two calls of a conversation, and the errors that explain why a
response gives no training sample: one per reason, each with the request.
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
"""Decoders write this character for bytes of an incomplete character."""
MINUS_INFINITY = -9999.0
"""JSON has no infinity: vLLM writes this for the log-prob of a token that cannot be sampled."""
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Input and sampled output of the server. The readers guarantee these properties.

    Attributes:
        request_id: The request id of the server or the caller.
        prompt_ids: Token ids of the prompt. The builder checks them.
        sampled_ids: Sampled token ids in order, including a sampled end token; may be empty.
        log_probs: Log-prob of each sampled id in nats; finite, at most 0, as many as ``sampled_ids``.
        finish_reason: ``"stop"`` (an end token or a stop string), ``"length"`` (the token limit, or repetition in vLLM)
            or ``"tool_calls"``.
        stop_match: The token id or the string that ended the generation, if the server reports it.
        text: The returned text, or None.
        weight_version: The version of the weights that sampled; None if the server does not report it.
        weight_versions: The version that sampled each id, if the weights changed in between; ``weight_version`` is then
            the last. None if one version sampled all ids.
        kept_ids: The sampling support of each sampled id (ids that top-k and top-p kept), if the server returns it.
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

    The response begins with the first sampled token. The lists for the response have ``response_length`` entries.

    Attributes:
        tokens: Token ids of prompt and response.
        response_length: Tokens of the response: sampled tokens and, between turns, tokens of tools and of the template.
        loss_mask: 1 for a sampled token that is trained, else 0.
        rollout_log_probs: The server's log-prob in nats for exactly this context where ``loss_mask`` is 1, else 0.0.
        weight_versions: Version of the weights that sampled the token; None if the token was not sampled or the version
            is unknown.
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
    """It begins with exactly the known ids of an earlier call that no other call continues."""
    FORK = "fork"
    """It begins with exactly the known ids of an earlier call, and differs from the calls that continue that
    earlier call before any token that they sampled: another branch of the conversation.
    """
    TRUNCATED_GENERATION = "truncated_generation"
    """The token limit ended the previous call, and other ids follow its exact ids: the template closed the turn."""
    RETRY = "retry"
    """The same prompt as an earlier call, with another sample."""
    DUPLICATE = "duplicate"
    """The same prompt, sampled ids and log-probs as an earlier call."""
    EMPTY_GENERATION = "empty_generation"
    """The previous call sampled nothing; the prompt begins with exactly the known ids."""
    DIFFERENT = "different"
    """Anything else; the boundary has the position of the first mismatch, both ids and, with a tokenizer, the texts."""


class BoundaryAction(str, Enum):
    """Action of the builder at a boundary."""

    CONTINUED = "continued"
    """The call continues the earlier call, in the same sample."""
    SPLIT = "split"
    """Another sample, after exactly the call's own prompt. If several samples share earlier calls, the sample that ends
    last trains their tokens.
    """
    DROPPED = "dropped"
    """The call is omitted: it is a duplicate, or it sampled nothing and does not continue the conversation."""
    RAISED = "raised"
    """The boundary is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """The relation of a call to the earlier calls of its conversation, from the comparison of its prompt with them.

    Attributes:
        kind: The class.
        action: The action of the builder.
        earlier: Request id of the call that the prompt was compared with: the last of the calls with the most ids in
            common, or the last call of all.
        later: Request id of the call whose prompt was compared.
        continues: Request id of the previous call in the sample, with all its sampled ids; None if a sample begins with
            this call, or if it is in no sample.
        position: Index of the first prompt id that differs from the known ids; None if the prompt has all known ids.
        expected_id: The known id at that position; None after the known ids.
        found_id: The prompt's id at that position; None after the prompt.
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
"""Action if the token IDs of a call do not continue those of the previous call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The samples of one conversation, and the result for each of its calls.

    Attributes:
        samples: The samples, in the order of their last calls. Every sampled token is trained in at most one of them.
        boundaries: One per call after the first, in order; none after a truncation.
        generations: Number of given calls.
        empty_generations: Number of calls that sampled nothing, and are in no sample.
        sampled_tokens: Number of tokens that the calls sampled.
    """

    samples: tuple[TrainingSample, ...]
    boundaries: tuple[Boundary, ...]
    generations: int
    empty_generations: int
    sampled_tokens: int

    def metrics(self) -> dict[str, int]:
        """Counts, summable over conversations. The denominator of a share is the count before the slash in its name."""
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
    """The index of the first value that is not a token id; None if all are."""
    # Check types before values, each in one pass in C. The loop runs only to find the position. True and 5.0 equal ids,
    # but are not ids.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= LARGEST_ID):
        return None
    return next(index for index, each in enumerate(ids) if type(each) is not int or not 0 <= each <= LARGEST_ID)


class RolloutError(ValueError):
    """A response or conversation that gives no training sample.

    Attributes:
        request_id: The request id of the server or the caller.
        message: The error, without the request.
    """

    def __init__(self, request_id: str, message: str) -> None:
        # Both are arguments of the exception, so that it can be pickled through a pool of processes.
        super().__init__(request_id, message)
        self.request_id, self.message = request_id, message

    def __str__(self) -> str:
        return f"request {self.request_id!r}: {self.message}"


class MalformedResponse(RolloutError):
    """A field is missing, has a wrong type, or a value outside its range."""


class CountMismatch(RolloutError):
    """Two fields that count the same tokens differ."""


class LogProbError(RolloutError):
    """A sampled token's log-prob is missing, not finite, or above 0."""


class Contradiction(RolloutError):
    """Two fields of the response for the same value differ."""


class AbortedRequest(RolloutError):
    """The server aborted the request before it was finished."""


class NotASample(RolloutError):
    """The server searched or chose among samples, so its response was not drawn from the policy."""


class UnprovenTokenIds(RolloutError):
    """The response has no ids of the sampled tokens, or no ids of the prompt."""


class BoundaryError(RolloutError):
    """A turn does not continue the earlier turns of the conversation.

    Attributes:
        boundary: The boundary; its action is ``"raised"``.
    """

    def __init__(self, request_id: str, message: str, boundary: Boundary | None = None) -> None:
        super().__init__(request_id, message)
        self.args = (request_id, message, boundary)
        self.boundary = boundary
