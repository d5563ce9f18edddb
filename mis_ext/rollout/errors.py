"""Why no training sample may be built from a response: one named error per reason, each naming the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mis_ext.rollout.conversations.boundary import Boundary


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
    """The server searched or chose among samples, so its answer was not drawn from the policy."""


class UnprovenTokenIds(RolloutError):
    """The response has text but no token ids, and the text does not prove them."""


class BoundaryError(RolloutError):
    """A turn does not continue the conversation that was sampled before it.

    Attributes:
        boundary: What was found; its action is ``"raised"``.
    """

    def __init__(self, request_id: str, message: str, boundary: Boundary | None = None) -> None:
        super().__init__(request_id, message)
        self.args = (request_id, message, boundary)
        self.boundary = boundary
