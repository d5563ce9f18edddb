"""One training sample in the making: the conversation as it goes on from call to call."""

from __future__ import annotations

from typing import NamedTuple

from mis_ext.rollout.generation import Generation
from mis_ext.rollout.training_sample import TrainingSample


class SampledTurn(NamedTuple):
    """One call whose tokens are trained, and where they begin in the sample."""

    start: int
    generation: Generation


class Conversation:
    """Calls that continue each other; none yet.

    Attributes:
        known: What the server was last given, and what it sampled then: the ids that the next prompt should begin with.
        spans: ``[start, end)`` of what was sampled in ``known``, by call.
    """

    def __init__(self) -> None:
        self.known: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self._tokens: list[int] = []
        self._turns: list[SampledTurn] = []

    @property
    def last(self) -> Generation | None:
        """The last call."""
        return self._turns[-1].generation if self._turns else None

    @property
    def size(self) -> int:
        """Tokens of the sample so far."""
        return len(self._tokens)

    def append(self, prompt: list[int], rest: int, generation: Generation) -> None:
        """Go on with a call whose prompt is new from ``prompt[rest]`` on."""
        self._tokens += prompt[rest:]
        self._turns.append(SampledTurn(len(self._tokens), generation))
        self._tokens += generation.sampled_ids
        self.known += prompt[len(self.known) :]
        self.spans.append((len(self.known), len(self.known) + len(generation.sampled_ids)))
        self.known += generation.sampled_ids

    def rewrite(self, prompt: list[int], spans: list[tuple[int, int]]) -> None:
        """Take a prompt for what the server knows; the ids of the sample stay as they were sampled."""
        self.known = [*prompt]
        self.spans = [*spans]

    def take_last(self) -> Conversation:
        """The last call as a conversation of its own; this one goes back to that call's prompt."""
        start, generation = self._turns.pop()
        del self._tokens[start:]
        begin, _ = self.spans.pop()
        del self.known[begin:]
        alone = Conversation()
        alone.append(self.known, 0, generation)
        return alone

    def build(self) -> TrainingSample:
        """The sample of at least one call, every sampled token of it trained."""
        response = self._turns[0].start
        length = len(self._tokens) - response
        loss_mask, log_probs, versions = [0] * length, [0.0] * length, list[str | None]([None]) * length
        for start, generation in self._turns:
            count = len(generation.sampled_ids)
            turn = slice(start - response, start - response + count)
            loss_mask[turn] = [1] * count
            log_probs[turn] = generation.log_probs
            versions[turn] = generation.weight_versions or list[str | None]([generation.weight_version]) * count
        return TrainingSample(
            tokens=self._tokens,
            response_length=length,
            loss_mask=loss_mask,
            rollout_log_probs=log_probs,
            weight_versions=versions,
            request_ids=[turn.generation.request_id for turn in self._turns],
        )
