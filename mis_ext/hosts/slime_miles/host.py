"""Which host this process is, and what the whole loss takes from it: its groups, and its log-probs of the logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.packing import pack
from mis_ext.hosts.scoring import Scores, score_logits
from mis_ext.hosts.slime_miles.arguments import read_argument
from mis_ext.hosts.slime_miles.groups import find_groups
from mis_ext.loss.policy import MILES_METRICS

SLIME = "slime.backends.megatron_utils.loss"
MILES = "miles.backends.training_utils.loss_hub.logit_processors"
MILES_PARALLEL = "miles.backends.training_utils.parallel"


class Host(NamedTuple):
    """``score(args, batch, logits, layout, groups)`` scores the tokens; ``metrics`` are names beyond those of slime."""

    groups: Groups
    score: Callable[[Any, Any, Tensor, PackedLayout, Groups], Scores]
    metrics: frozenset[str] = frozenset()


def find_host() -> Host:
    """Miles or slime, whose training modules this process has imported; else Megatron-Core, or nothing, by itself."""
    if MILES in sys.modules:
        return Host(find_groups(sys.modules[MILES_PARALLEL].get_parallel_state()), _miles_scores, MILES_METRICS)
    return Host(find_groups(), _slime_scores if SLIME in sys.modules else plain_scores)


def plain_scores(args: Any, batch: Any, logits: Tensor, layout: PackedLayout, groups: Groups) -> Scores:
    """Log-probs and entropy from logits as the hosts compute them, for a batch outside of a host."""
    temperature = read_argument(args, "rollout_temperature")
    return score_logits(
        logits,
        batch,
        layout,
        groups=groups,
        is_padded=read_argument(args, "qkv_format") == "bshd",
        temperature=1.0 if temperature is None else temperature,
    )


def _slime_scores(args: Any, batch: Any, logits: Tensor, layout: PackedLayout, _groups: Groups) -> Scores:
    slime = sys.modules[SLIME]
    _, found = slime.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **slime.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    # Its debug dump takes the log-probs from inside the loss where it has skipped their own pass.
    capture = getattr(slime, "_maybe_capture_log_probs", None)
    if capture is not None:
        capture(batch, found["log_probs"])
    return _packed(found, logits, layout)


def _miles_scores(args: Any, batch: Any, logits: Tensor, layout: PackedLayout, _groups: Groups) -> Scores:
    has_coefficient = args.entropy_coef != 0
    found = sys.modules[MILES].get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=has_coefficient or bool(read_argument(args, "observe_training_entropy")),
        entropy_requires_grad=has_coefficient,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    return _packed(found, logits, layout)


def _packed(found: dict[str, list[Tensor]], logits: Tensor, layout: PackedLayout) -> Scores:
    def packed(name: str) -> Tensor:
        return pack(name, found[name], layout.local_lengths, device=logits.device)

    return Scores(packed("log_probs"), packed("entropy") if found.get("entropy") else None)
