"""One sample of a dump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class ContextPart(NamedTuple):
    """Which part of the response's log-probs a context-parallel rank has, of a sequence cut by zigzag.

    ``laid_out_length`` is that of the whole sequence, with its padding where sequences are padded.
    """

    rank: int
    size: int
    total_length: int
    laid_out_length: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpedSample:
    """One sample; None for what the file does not hold. ``T`` counts the tokens of the response.

    Lists of numbers may be tensors, NumPy arrays or lists, as they were dumped.

    Attributes:
        proximal_log_probs: The trainer's, ``[T]``, in nats.
        behavior_log_probs: The inference engine's, likewise.
        response_mask: ``[T]``, nonzero where a token is trained. Ones where the file has only a length.
        response_length: ``T``, if the file says it.
        token_ids: Prompt and response, as the trainer scored them.
        response_ids: The last of them, ``[T]``; all where they are fewer than the response has.
        sampled_ids: The response, ``[T]``, as the engine sampled it.
        proximal_weight_version: With which the trainer scored.
        behavior_weight_versions: All with which the engine sampled.
        rollout_id: The host's number of the rollout.
        sample_index: The host's number of the sample.
        part: Set where the log-probs are a part of the response only, because the others were not found.
        problem: Why the sample cannot be used, where its file says so.
        path: The file; of a response that was joined from several, the first.
        index: The sample's place in it.
        advantages: Of each token ``[T]``, or one number for all, 0-dim.
        reward: As the host dumped it.
        group_index: Of the samples with one prompt, as the host dumped it.
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
    sample_index: int | None
    part: ContextPart | None
    problem: str | None
    path: str
    index: int
    advantages: Tensor | None = None
    reward: float | None = None
    group_index: Any = None

    @property
    def name(self) -> str:
        """File and index of the sample, for messages."""
        return f"{self.path}, its sample {self.index}"

    @property
    def is_one_memory(self) -> bool:
        """Whether the log-probs of both sides are the same tensor in the file: one was filled in from the other."""
        proximal, behavior = self.proximal_log_probs, self.behavior_log_probs
        if proximal is None or behavior is None or not proximal.numel():
            return False
        return proximal.data_ptr() == behavior.data_ptr()


class Skipped(NamedTuple):
    """What was not read, and why; ``num_samples`` is None for a whole file."""

    path: str
    num_samples: int | None
    reason: str

    def __str__(self) -> str:
        plural = "" if self.num_samples == 1 else "s"
        what = "the file" if self.num_samples is None else f"{self.num_samples} sample{plural}"
        return f"{self.path}: {what}: {self.reason}"
