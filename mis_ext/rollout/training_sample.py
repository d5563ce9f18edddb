"""A training sample, in the fields that slime's and Miles' ``Sample`` have."""

from __future__ import annotations

from dataclasses import dataclass


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
