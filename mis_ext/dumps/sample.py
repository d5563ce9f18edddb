"""One sample of a dump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpedSample:
    """One sample; None for what the file does not hold. ``T`` counts the tokens of the response.

    Lists of numbers may be tensors, NumPy arrays or lists, as they were dumped.

    Attributes:
        proximal_log_probs: The trainer's, ``[T]``, in nats; under context parallelism a file per rank has only a part.
        behavior_log_probs: The inference engine's, likewise.
        response_mask: ``[T]``, nonzero where a token is trained. Ones where the file has only a length.
        response_length: ``T``, if the file says it.
        token_ids: Prompt and response, as the trainer scored them.
        response_ids: The last of them, ``[T]``; all where they are fewer than the response has.
        sampled_ids: The response, ``[T]``, as the engine sampled it.
        proximal_weight_version: With which the trainer scored.
        behavior_weight_versions: All with which the engine sampled.
        rollout_id: The host's number of the rollout.
        path: The file.
        index: The sample's place in it.
    """

    proximal_log_probs: Tensor | None
    behavior_log_probs: Tensor | None
    response_mask: Any
    response_length: int | None
    token_ids: Any
    response_ids: Any
    sampled_ids: Any
    proximal_weight_version: str | int | None
    behavior_weight_versions: list[str] | None
    rollout_id: int | None
    path: str
    index: int

    @property
    def name(self) -> str:
        """Where the sample is."""
        return f"{self.path}, its sample {self.index}"
