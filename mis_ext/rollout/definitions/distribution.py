"""A distribution over the vocabulary, as what was done to the model's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Which tokens can be drawn; the kept ones are always the most probable.

    Attributes:
        top_k: So many tokens; None: all.
        top_p: The fewest tokens that have this share of the mass.
        min_p: Tokens of at least this share of the largest probability.
        mass_of: The mass that ``top_p`` is a share of: of ``"all"`` tokens, of those within ``"top_k"``, or of those
            within both ``"top_k_and_min_p"``.
        keeps_next: Whether a token is kept before which exactly ``top_p`` of the mass lies.
        keeps_ties: Whether more tokens are kept that are as probable as the last kept one: ``"none"`` of them,
            ``"top_k"``: those as probable as the k-th, ``"all"``: also those as probable as the last within ``top_p``.
            Where only some are kept, it is those with the lowest ids.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    mass_of: Literal["all", "top_k", "top_k_and_min_p"] = "all"
    keeps_next: bool = False
    keeps_ties: Literal["none", "top_k", "all"] = "none"

    def __str__(self) -> str:
        parts = [f"top_k={self.top_k}"] if self.top_k is not None else []
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1.0 else []
        parts += [f"min_p={self.min_p:g}"] if self.min_p > 0.0 else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """The softmax of (logits + ``logit_bias``) / ``temperature``, renormalised over what ``truncation`` keeps.

    Attributes:
        temperature: Above 0.
        logit_bias: What is added to the logits, by token id.
        truncation: None keeps every token.
        unrepeatable: What else changed the logits, and why a trainer that has only logits and token ids cannot do it
            again.
    """

    temperature: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    truncation: Truncation | None = None
    unrepeatable: tuple[str, ...] = ()

    def __str__(self) -> str:
        logits = "changed logits" if self.unrepeatable else "logits"
        logits = f"{logits} + logit_bias" if self.logit_bias else logits
        if self.temperature != 1.0:
            logits = f"({logits}) / {self.temperature:g}" if self.logit_bias else f"{logits} / {self.temperature:g}"
        return f"softmax({logits}), renormalised over {self.truncation}" if self.truncation else f"softmax({logits})"
