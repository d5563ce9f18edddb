"""A call of what the host will call, before there is a model: on drawn log-probs, with the run's own configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.config import GUARD_NAMES
from mis_ext.correction.normalization import WeightScale
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.packing import batch_layout
from mis_ext.hosts.runs import Run, read_argument
from mis_ext.hosts.session import Session
from mis_ext.hosts.slime_miles.hook import weigh_batch
from mis_ext.hosts.slime_miles.policy_loss import IDS, OFFSETS, host_without_ranks, on_host
from mis_ext.keys.run_config import RunConfig
from mis_ext.loss.policy import refuse_graph_of_ranks

_VOCABULARY = 16


class _Echo:
    """A group of ranks that all say what this one says; with the methods of Miles' fault-tolerant groups."""

    _replica_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any) -> _Echo:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self

    def wait(self) -> bool:
        return True


def call_once(args: Any, config: RunConfig) -> None:
    """The hook, or the whole loss where ``config`` has one, of two responses: whatever that raises is raised here.

    On a CPU and without other ranks: an echo stands for each group. No session, no random number and no graph of the
    run is touched.
    """
    correction, loss = config.correction, config.whole_loss
    session = Session(correction.replace(warn_only=GUARD_NAMES))
    # As the function at --rollout-data-postprocess-path leaves them.
    session.rollout_scale = WeightScale(torch.ones(()), torch.ones(()))
    session.acceptance.move(torch.ones(len(correction.adapted_gates)))
    cp_size, dp_size = (read_argument(args, f"{each}_parallel_size") or 1 for each in ("context", "data"))
    groups = Groups.of_places(0, cp_size, _Echo(cp_size), 0, dp_size, _Echo(dp_size))
    # Two chunks of four tokens, and of eight, for each rank.
    total_lengths, response_lengths = [8 * cp_size, 16 * cp_size], [5, 7]
    padded = [max(total_lengths)] * 2 if config.is_padded else None
    layout = batch_layout(
        is_padded=config.is_padded,
        groups=groups,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        max_seq_lens=padded,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(0)

    def drawn(*, mean: float) -> list[Tensor]:
        values_T = mean + 0.1 * torch.randn(layout.num_local_tokens, generator=generator, dtype=torch.float32)
        return [*torch.split(values_T, [*layout.local_lengths])]

    masks = [torch.ones(length, dtype=torch.int32) for length in response_lengths]
    rollout, trained = drawn(mean=-2.0), drawn(mean=-2.0)
    if loss is None:
        weigh_batch(
            Run(config, session),
            groups,
            pg_loss=torch.zeros(layout.num_local_tokens, dtype=torch.float32),
            train_log_probs=trained,
            rollout_log_probs=rollout,
            loss_masks=masks,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            max_seq_lens=padded,
        )
        return
    refuse_graph_of_ranks(loss.settings, cp_group=groups.cp_group, dp_group=groups.dp_group)
    settings = replace(loss.settings, compiled=False)
    run = Run(replace(config, whole_loss=replace(loss, settings=settings, reducer_path=None)), session)
    tokens = [torch.randint(_VOCABULARY, (length,), generator=generator) for length in total_lengths]
    batch = {
        "total_lengths": total_lengths,
        "response_lengths": response_lengths,
        "max_seq_lens": padded,
        "unconcat_tokens": tokens,
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor(response_lengths),
        "advantages": drawn(mean=0.0),
        "log_probs": None if loss.is_told_to_skip else trained,
        "rollout_log_probs": rollout,
        IDS: [each[-length:] for each, length in zip(tokens, response_lengths, strict=True)],
        OFFSETS: [torch.arange(length + 1) for length in response_lengths],
    }
    # Both hosts score the reference policy for these flags. With a critic, whose ranks have kl_coef 0, nobody can tell.
    has_critic = read_argument(args, "advantage_estimator") == "ppo"
    if has_critic or read_argument(args, "use_kl_loss") or read_argument(args, "kl_coef"):
        batch["ref_log_probs"] = drawn(mean=-2.0)
    num_rows = [length // cp_size for length in padded or total_lengths]
    shape = (len(num_rows), num_rows[0]) if config.is_padded else (1, sum(num_rows))
    logits = torch.randn((*shape, _VOCABULARY), generator=generator, dtype=torch.float32).requires_grad_()
    on_host(batch_loss(run, host_without_ranks(run.config, groups), batch, logits).metrics)
