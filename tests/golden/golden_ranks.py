"""The hook on every rank of a layout, in one process: a rank is a thread, and only one of them runs at a time."""

import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from golden_data import Batch, draw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zigzag import take

import mis_ext

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = (1, 2, 30, 5, 3, 64, 7)
PATIENCE = 120.0
"""Seconds that a rank waits for the others."""


class Layout(NamedTuple):
    """Response lengths per data-parallel rank, and what context parallelism does with them."""

    lengths: tuple[tuple[int, ...], ...]
    cp_size: int = 1
    is_padded: bool = False


class RankOutput(NamedTuple):
    """What one rank was given and got back; the loss and its gradient are ``[T]``, the masks ``[R]``."""

    pg_loss: torch.Tensor
    loss: torch.Tensor
    gradient: torch.Tensor
    masks: torch.Tensor
    metrics: dict[str, float]


class Meeting:
    """Where the threads of one group exchange tensors; a thread that waits lets another one run."""

    def __init__(self, size: int, baton: threading.Lock) -> None:
        self.size, self.baton = size, baton
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.given: dict[tuple[int, int], torch.Tensor] = {}

    def exchange(self, rank: int, turn: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order."""
        self.given[turn, rank] = tensor.clone()
        self.baton.release()
        try:
            self.barrier.wait()
        finally:
            self.baton.acquire()
        return [self.given[turn, other] for other in range(self.size)]


class ThreadGroup:
    """One rank's end of a meeting, with the methods of Miles' fault-tolerant groups."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self._turn, self._replica_id = meeting, rank, 0, 0

    def size(self) -> int:
        """Ranks in the group."""
        return self._meeting.size

    def rank(self) -> int:
        """This rank within the group."""
        return self._rank

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Namespace:
        """Copy every rank's input to the output of that rank."""
        for output, tensor in zip(outputs[0], self._exchange(inputs[0]), strict=True):
            output.copy_(tensor)
        return Namespace(wait=lambda: True)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Namespace:
        """Reduce in place, in rank order."""
        rows = torch.stack(self._exchange(tensors[0]))
        choices = ((dist.ReduceOp.SUM, rows.sum), (dist.ReduceOp.MAX, rows.amax), (dist.ReduceOp.MIN, rows.amin))
        wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        tensors[0].copy_(next(reduce for operation, reduce in choices if wanted == operation)(0))
        return Namespace(wait=lambda: True)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._turn += 1
        return self._meeting.exchange(self._rank, self._turn, tensor)


def run_layout(
    keys: Mapping, layout: Layout, kind: str, *, per_token_loss: bool, device: str = "cpu"
) -> list[list[RankOutput]]:
    """Outputs per data-parallel and context-parallel rank."""
    batches = [draw(kind, lengths, seed=7 + index) for index, lengths in enumerate(layout.lengths)]
    states = _parallel_states(layout)

    def run(place: tuple[int, int]) -> RankOutput:
        state = states[place] if len(states) > 1 else None
        args = Namespace(
            calculate_per_token_loss=per_token_loss,
            qkv_format="bshd" if layout.is_padded else "thd",
            use_rollout_logprobs=False,
            **keys,
        )
        return _call(args, batches[place[0]], layout, place, state, device=device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = _take_turns(run, states)
    return [[outputs[dp, cp] for cp in range(layout.cp_size)] for dp in range(len(layout.lengths))]


def _take_turns(run: Callable, states: dict[tuple[int, int], Namespace]) -> dict[tuple[int, int], RankOutput]:
    """Run all ranks, one at a time, until each has its output; the first error ends them all."""
    baton = next(iter(states.values())).baton

    def run_one(place: tuple[int, int]) -> RankOutput:
        with baton:
            try:
                return run(place)
            except BaseException:
                for state in states.values():
                    state.abort()
                raise

    if len(states) == 1:
        return {place: run_one(place) for place in states}
    with ThreadPoolExecutor(len(states)) as pool:
        futures = {place: pool.submit(run_one, place) for place in states}
    errors = [future.exception() for future in futures.values() if future.exception() is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return {place: future.result() for place, future in futures.items()}


def _parallel_states(layout: Layout) -> dict[tuple[int, int], Namespace]:
    """What Miles passes to each rank ``(dp_rank, cp_rank)``."""
    dp_size, cp_size, baton = len(layout.lengths), layout.cp_size, threading.Lock()
    of_dp_rank = [Meeting(cp_size, baton) for _ in range(dp_size)]
    of_cp_rank = [Meeting(dp_size, baton) for _ in range(cp_size)]
    everyone = Meeting(dp_size * cp_size, baton)

    def axis(rank: int, meeting: Meeting) -> Namespace:
        return Namespace(rank=rank, size=meeting.size, group=ThreadGroup(meeting, rank))

    def abort() -> None:
        for meeting in (*of_dp_rank, *of_cp_rank, everyone):
            meeting.barrier.abort()

    def state(dp: int, cp: int) -> Namespace:
        of_dp, of_all = axis(dp, of_cp_rank[cp]), axis(dp * cp_size + cp, everyone)
        groups = {"intra_dp": of_dp, "effective_dp": of_dp, "intra_dp_cp": of_all, "effective_dp_cp": of_all}
        return Namespace(cp=axis(cp, of_dp_rank[dp]), **groups, baton=baton, abort=abort)

    return {(dp, cp): state(dp, cp) for dp in range(dp_size) for cp in range(cp_size)}


def _call(
    args: Namespace, batch: Batch, layout: Layout, place: tuple[int, int], state: Namespace | None, *, device: str
) -> RankOutput:
    lengths = [mask.numel() for mask in batch.masks]
    totals = [length + PROMPTS[index % len(PROMPTS)] for index, length in enumerate(lengths)]
    padded = [max(totals) + 5] * len(totals) if layout.is_padded else None

    def local(column: list[torch.Tensor]) -> list[torch.Tensor]:
        if layout.cp_size == 1:
            return [tensor.to(device) for tensor in column]
        parts = take(column, total_lengths=totals, cp_rank=place[1], cp_size=layout.cp_size, padded_lengths=padded)
        return [part.to(device) for part in parts]

    pg_loss = torch.cat(local(batch.losses)).requires_grad_()
    loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=local(batch.train),
        rollout_log_probs=local(batch.rollout),
        loss_masks=[mask.to(device) for mask in batch.masks],
        total_lengths=totals,
        response_lengths=lengths,
        **({} if state is None else {"parallel_state": state, "max_seq_lens": padded}),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), pg_loss)
    reduced = _reduce(metrics, local(batch.masks), batch.masks, per_token_loss=args.calculate_per_token_loss)
    outputs = (pg_loss.detach(), loss.detach(), gradient, torch.cat(masks))
    return RankOutput(*(tensor.cpu() for tensor in outputs), reduced)


def _reduce(
    metrics: Mapping[str, torch.Tensor],
    local_masks: list[torch.Tensor],
    masks: list[torch.Tensor],
    *,
    per_token_loss: bool,
) -> dict[str, float]:
    """This rank's share of what the hosts plot: their sum with the original masks over what they divide it by."""
    mask_T = torch.cat(local_masks).double()
    if per_token_loss:
        factors_T = torch.full_like(mask_T, 1.0 / max(sum(int(mask.sum()) for mask in masks), 1))
    else:
        of_sample = torch.tensor([1.0 / max(int(mask.sum()), 1) / len(masks) for mask in masks], dtype=torch.float64)
        repeats = torch.tensor([mask.numel() for mask in local_masks])
        factors_T = of_sample.repeat_interleave(repeats).to(mask_T.device)
    table = torch.stack([values.double() for values in metrics.values()])
    return dict(zip(metrics, (table * mask_T * factors_T).sum(1).tolist(), strict=True))
