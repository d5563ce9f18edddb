"""Which host this process is, and what the whole loss takes from it: its groups, and its log-probs of the logits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.packing import pack
from mis_ext.hosts.scoring import score_logits
from mis_ext.hosts.slime_miles.groups import find_groups
from mis_ext.hosts.slime_miles.run_config import RunConfig
from mis_ext.loss.policy import MILES_METRICS
from mis_ext.scoring import Scores

SLIME = "slime.backends.megatron_utils.loss"
MILES = "miles.backends.training_utils.loss_hub.logit_processors"
MILES_PARALLEL = "miles.backends.training_utils.parallel"


Batch = Mapping[str, Any]


class Host(NamedTuple):
    """``score(config, batch, logits, layout, groups)`` scores the tokens; ``metrics`` are names beyond slime's."""

    groups: Groups
    score: Callable[[RunConfig, Batch, Tensor, PackedLayout, Groups], Scores]
    metrics: frozenset[str] = frozenset()


def find_host(args: Any) -> Host:
    """Miles or slime, whose training modules this process has imported; else Megatron-Core, or nothing, by itself.

    The hosts' own functions for log-probs take their ``args``; nobody else sees them.
    """
    if MILES in sys.modules:
        groups = find_groups(sys.modules[MILES_PARALLEL].get_parallel_state())
        return Host(groups, partial(_miles_scores, args), MILES_METRICS)
    return Host(find_groups(), partial(_slime_scores, args) if SLIME in sys.modules else plain_scores)


def plain_scores(config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups) -> Scores:
    """Log-probs and entropy from logits as the hosts compute them, for a batch outside of a host."""
    assert config.whole_loss is not None
    return score_logits(
        logits,
        batch,
        layout,
        groups=groups,
        is_padded=config.is_padded,
        temperature=config.whole_loss.temperature,
    )


def _slime_scores(
    args: Any, _config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, _groups: Groups
) -> Scores:
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


def _miles_scores(
    args: Any, config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, _groups: Groups
) -> Scores:
    assert config.whole_loss is not None
    has_coefficient = config.whole_loss.settings.entropy_coef != 0.0
    found = sys.modules[MILES].get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=has_coefficient or bool(getattr(args, "observe_training_entropy", False)),
        entropy_requires_grad=has_coefficient,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    return _packed(found, logits, layout)


def _packed(found: dict[str, list[Tensor]], logits: Tensor, layout: PackedLayout) -> Scores:
    def packed(name: str) -> Tensor:
        return pack(name, found[name], layout.local_lengths, device=logits.device)

    return Scores(packed("log_probs"), packed("entropy") if found.get("entropy") else None)
