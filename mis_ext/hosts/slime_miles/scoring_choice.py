"""Who turns logits into log-probs: the fused pass of mis_ext, or the function of the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mis_ext.checks import check_bool, check_choice

Scoring = Literal["fused", "host"]

DEFAULT_SCORING: Scoring = "fused"
"""Where neither a key nor a flag of the host says who scores."""

SCORING_FACTS = (
    "allgather_cp",
    "context_parallel_size",
    "observe_training_entropy",
    "rollout_top_p",
    "true_on_policy_mode",
)
"""Flags of the hosts that say how they score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringChoice:
    """How logits become log-probs and entropy. It does not change what the loss is.

    Attributes:
        by: Who scores, in slime and Miles.
        said: What ``mis_loss_scoring`` says, or None.
        inplace: The gradient takes the place of the logits.
        observes_entropy: Miles reports the entropy also where it is no part of the loss (``observe_training_entropy``).
        replays_top_p: slime normalises over the tokens that top-p kept (``rollout_top_p`` is not 1).
    """

    by: Scoring
    said: Scoring | None
    inplace: bool
    observes_entropy: bool
    replays_top_p: bool


def scoring_choice(given: Mapping[str, Any], *, compares_with_stored: bool) -> ScoringChoice:
    """What keys and flags say about the scoring.

    Args:
        given: Arguments by name; None is unset.
        compares_with_stored: Whether the loss compares with log-probs that the host has scored before.

    Raises:
        ValueError: A key is out of range, has no effect, or asks for what only the host's function can do.
        TypeError: One has the wrong type.
    """
    said = given.get("mis_loss_scoring")
    if said is not None:
        said = check_choice("mis_loss_scoring", said, get_args(Scoring))
    inplace = given.get("mis_loss_inplace")
    inplace = inplace is not None and check_bool("mis_loss_inplace", inplace)
    only_host = _what_only_the_host_does(given)
    if said == "fused" and only_host is not None:
        raise ValueError(f"mis_loss_scoring: fused with {only_host}; write mis_loss_scoring: host, or remove the key")
    keeps_host = only_host
    if keeps_host is None and compares_with_stored and _rounds_quotients(given):
        keeps_host = "--train-backend fsdp with a --rollout-temperature: Miles rounds their quotient"
    by: Scoring = said or (DEFAULT_SCORING if keeps_host is None else "host")
    if inplace and by == "host":
        raise ValueError(
            "mis_loss_inplace: true: no effect, because the host's own function scores "
            f"({keeps_host or 'mis_loss_scoring: host'}); remove it"
        )
    return ScoringChoice(
        by=by,
        said=said,
        inplace=inplace,
        observes_entropy=bool(given.get("observe_training_entropy")),
        replays_top_p=given.get("rollout_top_p") not in (None, 1.0),
    )


def _what_only_the_host_does(given: Mapping[str, Any]) -> str | None:
    """The flag with which fused scoring gives other numbers, or none, and why."""
    if given.get("true_on_policy_mode"):
        return "--true-on-policy-mode: Miles' own function has the bits of SGLang's"
    # Of one rank the parts are the whole. Whoever does not say how many there are is taken to have several.
    if given.get("allgather_cp") and given.get("context_parallel_size") != 1:
        return "--allgather-cp: the host's own function knows the contiguous parts of the ranks, and exchanges them"
    return None


def _rounds_quotients(given: Mapping[str, Any]) -> bool:
    """Whether Miles divides bfloat16 logits and rounds again: its log-probs are then 0.02 nats off on average."""
    return given.get("train_backend") == "fsdp" and given.get("rollout_temperature") not in (None, 0, 1)
