"""What became of a conversation, and its counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mis_ext.rollout.conversations.boundary import Boundary, BoundaryAction, BoundaryKind
from mis_ext.rollout.generation import TrainingSample


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
