# SPDX-License-Identifier: Apache-2.0
"""Correct packed sequences under context and data parallelism, in a trainer without Megatron-Core's groups.

    torchrun --nproc-per-node 2 examples/context_parallel.py

``Batch`` stands for the micro-batch of your trainer and ``model`` for your model. Positions are distributed as in the
packed batches (THD) of Megatron-Core: each sequence is padded to a multiple of ``2 * cp_size`` and cut into that many
chunks, of which rank ``r`` holds ``r`` and ``2 * cp_size - 1 - r``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mis_ext
from mis_ext import Groups, PackedLayout, PackedStreams, Session

VOCABULARY = 16


class Batch(NamedTuple):
    """Whole sequences, the same on all context-parallel ranks. Values of tokens are those of prompt and response."""

    cu_seqlens: Tensor  # ends of the sequences, prompts included
    cu_seqlens_padded: Tensor  # the same of the padded sequences
    token_ids: Tensor
    response_mask: Tensor  # 1 on tokens that the policy generated, 0 on prompts and tool output
    behavior_logprobs: Tensor  # from the engine; any value on prompts
    advantages: Tensor


def own_positions(padded_length: int, groups: Groups) -> Tensor:
    """The positions of a sequence on this rank, in the order of the rank."""
    chunks = torch.arange(padded_length).chunk(2 * groups.cp_size)
    return torch.cat([chunks[groups.cp_rank], chunks[2 * groups.cp_size - 1 - groups.cp_rank]])


def loss_of(
    model: Callable[[Tensor], Tensor], batch: Batch, session: Session, groups: Groups, num_tokens: Tensor
) -> tuple[Tensor, mis_ext.Correction]:
    """This rank's part of the mean over the ``num_tokens`` response tokens of all micro-batches and ranks."""
    lengths, padded_lengths = batch.cu_seqlens.diff().tolist(), batch.cu_seqlens_padded.diff().tolist()

    # 1. The rank's model gives a row of logits for each of its positions. Row p scores token p + 1, which may be on
    #    another rank, so take the next tokens from whole sequences. The last position and padding score no token.
    inputs, targets, scores_token = [], [], []
    for ids, padded_length in zip(batch.token_ids.split(lengths), padded_lengths, strict=True):
        position = own_positions(padded_length, groups)
        ids = torch.nn.functional.pad(ids, (0, padded_length + 1 - len(ids)))
        inputs.append(ids[position])
        targets.append(ids[position + 1])
        scores_token.append(position + 1 < lengths[len(scores_token)])
    logprobs = model(torch.cat(inputs)).log_softmax(-1)
    logprobs = logprobs.gather(-1, torch.cat(targets)[:, None]).squeeze(-1)

    # 2. The log-probs [T] of this rank, in the order of the layout. All tokens of a sequence except the first count as
    #    its response here; the mask excludes the prompts.
    current_T = logprobs[torch.cat(scores_token)]
    layout = PackedLayout.context_parallel(
        [length - 1 for length in lengths],
        total_lengths=lengths,
        padded_lengths=padded_lengths,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        partition="zigzag",
        device=current_T.device,
    )
    assert len(current_T) == layout.num_local_tokens

    # 3. Values of whole sequences [R], and this rank's part [T] of them. The first token of a sequence has no log-prob.
    def without_first(values: Tensor) -> Tensor:
        return torch.cat([each[1:] for each in values.split(lengths)])

    proximal_T = current_T.detach()  # in the first update of a rollout; later those from before the first update
    streams = PackedStreams(
        proximal_logprobs_T=proximal_T,
        behavior_logprobs_T=layout.local_part(without_first(batch.behavior_logprobs)),
        response_mask_R=without_first(batch.response_mask),
        layout=layout,
    )
    out = session.correct(streams, groups=groups)

    # 4. The loss. Kept tokens have the original mask value, so a fraction scales the loss.
    loss_mask_T = layout.local_part(out.loss_mask_R)
    advantages_T = layout.local_part(without_first(batch.advantages))
    policy_loss_T = -advantages_T * (current_T - proximal_T).exp()
    loss_T = torch.where(loss_mask_T != 0, out.weigh(policy_loss_T) * loss_mask_T, 0.0)
    return loss_T.sum() / num_tokens, out


def number_of_tokens(batches: list[Batch], groups: Groups) -> Tensor:
    """The denominator: the sum of the original masks of the step over data-parallel ranks.

    It is equal on context-parallel ranks. The first token of a sequence is never scored, so its mask must be 0, as in
    every prompt.
    """
    total = torch.stack([batch.response_mask.sum() for batch in batches] or [torch.zeros(())]).sum().float()
    if groups.dp_group is not None:
        dist.all_reduce(total, group=groups.dp_group)
    return total


def step(
    model: torch.nn.Module, batches: list[Batch], session: Session, groups: Groups, num_calls: int
) -> dict[str, float]:
    """Compute the gradients and metrics of a step. All data-parallel ranks make ``num_calls`` calls."""
    num_tokens, calls = number_of_tokens(batches, groups), []
    for index in range(num_calls):
        if index >= len(batches):
            # A rank with fewer micro-batches joins the collectives of the other ranks.
            session.join_without_data((), groups=groups, device=num_tokens.device)
            continue
        loss, out = loss_of(model, batches[index], session, groups, num_tokens)
        # DistributedDataParallel and FSDP average over all data- and context-parallel ranks: multiply the loss by their
        # number, groups.dp_size * groups.cp_size. Here gradients are summed, so the factor is 1.
        loss.backward()
        calls.append(out.metrics)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
    return mis_ext.scalars(*calls, group=groups.dp_group)


def example_batch(cp_size: int, seed: int = 0) -> Batch:
    """Two sequences of 7 and 4 tokens, with prompts of 3 and 1, as a trainer with ``cp_size`` ranks pads them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 4])
    multiple = 2 * cp_size * 2  # as with two tensor-parallel ranks and sequence parallelism
    padded = (lengths + multiple - 1) // multiple * multiple
    ends, padded_ends = (torch.cat([torch.zeros(1, dtype=torch.long), x.cumsum(0)]) for x in (lengths, padded))
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1])
    ids = torch.randint(VOCABULARY, (11,), generator=generator)
    behavior = torch.rand(11, generator=generator).log() - 2.0
    return Batch(ends, padded_ends, ids, mask, behavior, torch.randn(11, generator=generator))


def example_model() -> torch.nn.Module:
    """Stands for a model that returns a row of logits per position."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))


def main() -> None:
    """Run on context-parallel ranks, which share each sequence."""
    dist.init_process_group("gloo")
    groups = Groups.of_process_groups(cp_group=dist.group.WORLD)  # with data parallelism also dp_group
    session = Session(mis_ext.preset("mis"))  # once per run
    model = example_model()
    metrics = step(model, [example_batch(groups.cp_size)], session, groups, num_calls=1)
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
    if dist.get_rank() == 0:
        print({"gradient norm": norm} | metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
