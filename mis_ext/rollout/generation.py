"""One call of an inference server, in one form whatever server answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LARGEST_ID = 2**31 - 1
"""No vocabulary is larger."""

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What the server was given and what it sampled; the readers guarantee every statement below.

    Attributes:
        request_id: The request, as the server or the caller names it.
        prompt_ids: Token ids the server was given. The builder checks those it has not seen in an earlier turn.
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
