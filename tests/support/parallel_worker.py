# SPDX-License-Identifier: Apache-2.0
"""One rank of a topology: its part of the data, the hook on it, and differences from the whole-data reference."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import (
    GATES,
    WEIGHTS,
    args_of,
    assert_close,
    assert_hook_output,
    assert_values,
    correction_keys,
    flat,
    pick,
    random_samples,
    sprinkle,
)
from reference import Samples, correct
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zigzag import local_tokens, take

import mis_ext
from mis_ext.hosts.session import session_for
from mis_ext.hosts.slime_miles.rollout import TokenLags

TOPOLOGIES = {"CP 2": (2, 1), "DP 2": (1, 2), "CP 4": (4, 1), "CP 2 x DP 2": (2, 2)}
METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"}
STALE = [
    {"use_tis": True, "mis_staleness": True, "tis_when": "stale", "rs_max_staleness": 1, "mis_metrics": "all"},
    {"mis_staleness": True, "rs_max_staleness": 2, "rs_staleness_level": "sequence_max", "mis_metrics": "all"}
    | {"use_tis": True, "mis_denominator": "kept", "tis_batch_normalize": True},
]
SECONDS = 60
MARGIN = 1e-5


# --- data: a list of calls, one per data-parallel rank


def dataset(name: str, dp_size: int) -> tuple[list[Samples], list[list[int]]]:
    """Samples and total lengths of every data-parallel rank; ranks have different numbers of samples."""
    lengths = {
        "plain": [[5, 1, 19, 3, 12, 1, 2, 33], [7, 16, 1]],
        "broken": [[9, 1, 24, 2], [3, 17, 1, 6, 8]],
        "single tokens": [[1, 1], [1]],
        "all masked": [[4, 2], [9, 3]],
    }[name]
    prompts = [1, 2, 30, 5, 3, 64, 7, 4]
    calls, totals = [], []
    for dp_rank in range(dp_size):
        samples = random_samples(lengths[dp_rank], seed=100 + dp_rank, outliers=0.1)
        if name == "broken":
            samples = sprinkle(samples, seed=200 + dp_rank, share=0.03)
        if name == "all masked" and dp_rank == 0:
            for mask in samples.masks:
                mask.zero_()
        if name == "plain":
            samples.masks[2].zero_()
        calls.append(samples)
        totals.append([p + n for p, n in zip(prompts, lengths[dp_rank], strict=False)])
    return calls, totals


def grid() -> list[tuple[dict, bool]]:
    """Every weight, gate and normalizer; vetoes, denominators and the framework's reducer alternate."""
    vetoes = ["no veto", "low veto", "high veto", "probability veto", "all vetoes"]
    out = []
    for weight in WEIGHTS:
        normalizers = ["no normalizer", "kept", "kept, micro-batch", "valid", "valid, micro-batch"]
        for gate in GATES:
            for normalizer in normalizers if weight[0] != "none" else normalizers[:1]:
                turn = len(out)
                keys = correction_keys(weight, gate=gate, veto=vetoes[turn % 5], normalizer=normalizer)
                keys["mis_denominator"] = ["fixed", "kept"][turn % 2]
                out.append((keys, turn % 4 < 2))
    return out


# --- what a worker is


class Counter(TorchDispatchMode):
    """Counts collectives below Python, and the bytes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.calls.append(func.overloadpacket.__name__)
            sizes = []
            for argument in args:
                tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
                if tensors:
                    sizes.append(sum(t.numel() * t.element_size() for t in tensors))
            # The input of a gather is smaller than its outputs.
            self.bytes += min(sizes, default=0)
        return func(*args, **(kwargs or {}))


class WrappedGroup:
    """A fault-tolerant wrapper as Miles has them: not a ProcessGroup, but it forwards to one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._replica_id = 0
        self._rank = group.rank()
        self.used = 0

    def size(self) -> int:
        return self._group.size()

    def rank(self) -> int:
        return self._rank

    def allgather(self, outputs, inputs, opts=None):
        self.used += 1
        return self._group.allgather(outputs, inputs, dist.AllgatherOptions() if opts is None else opts)


class Worker:
    """One rank of one topology."""

    def __init__(self, cp_size: int, dp_size: int, *, seconds: float = SECONDS) -> None:
        self.cp_size, self.dp_size = cp_size, dp_size
        rank = dist.get_rank()
        self.cp_rank, self.dp_rank = rank % self.cp_size, rank // self.cp_size
        everyone = list(range(self.cp_size * self.dp_size))
        by_cp = [everyone[i : i + self.cp_size] for i in range(0, len(everyone), self.cp_size)]
        by_dp = [everyone[i :: self.cp_size] for i in range(self.cp_size)]
        timeout = timedelta(seconds=seconds)
        self.cp_group = [dist.new_group(ranks, timeout=timeout) for ranks in by_cp][self.dp_rank]
        self.dp_group = [dist.new_group(ranks, timeout=timeout) for ranks in by_dp][self.cp_rank]
        self.dp_cp_group = dist.new_group(everyone, timeout=timeout)

    def parallel_state(self, wrap: Callable = lambda group: group) -> SimpleNamespace:
        """The arguments of Miles."""

        def axis(rank: int, size: int, group) -> SimpleNamespace:
            return SimpleNamespace(rank=rank, size=size, group=wrap(group))

        dp = axis(self.dp_rank, self.dp_size, self.dp_group)
        dp_cp = axis(dist.get_rank(), dist.get_world_size(), self.dp_cp_group)
        cp = axis(self.cp_rank, self.cp_size, self.cp_group)
        return SimpleNamespace(cp=cp, intra_dp=dp, effective_dp=dp, intra_dp_cp=dp_cp, effective_dp_cp=dp_cp)

    def owned(self, lengths: list[int], totals: list[int], **layout) -> list[list[int]]:
        padded = layout.pop("padded_lengths", None)
        return [
            local_tokens(
                total_length=total,
                response_length=length,
                cp_rank=self.cp_rank,
                cp_size=self.cp_size,
                padded_length=None if padded is None else padded[index],
                **layout,
            )
            for index, (length, total) in enumerate(zip(lengths, totals, strict=True))
        ]

    def local(self, column: list[torch.Tensor], totals: list[int], **layout) -> list[torch.Tensor]:
        return take(column, total_lengths=totals, cp_rank=self.cp_rank, cp_size=self.cp_size, **layout)

    def hook(self, args, samples: Samples, totals: list[int], *, padded_lengths=None, **keywords):
        """Call the hook on this rank's part, and return its output with the local loss that went in."""
        layout = {"padded_lengths": padded_lengths}
        train = self.local(samples.train, totals, **layout)
        rollout = self.local(samples.rollout, totals, **layout)
        # As after prepare_rollout.
        session_for(args).token_lags = TokenLags(rollout, self.local(samples.lags, totals, **layout))
        pg_loss = torch.linspace(-1.0, 2.0, sum(t.numel() for t in train))
        output = mis_ext.compute_mis_weights_with_cp(
            args=args,
            pg_loss=pg_loss,
            train_log_probs=train,
            rollout_log_probs=rollout,
            loss_masks=samples.masks,
            total_lengths=totals,
            response_lengths=[m.numel() for m in samples.masks],
            **keywords,
        )
        return output, pg_loss

    def check(self, failures: list[str], name: str, compare: Callable[[], None]) -> None:
        """Record a failed comparison. An exception of the hook itself is raised before, and ends the worker."""
        try:
            compare()
        except (AssertionError, pytest.fail.Exception) as error:
            failures.append(f"rank {dist.get_rank()}, {name}: {str(error)[:600]}")

    # --- sections

    def compare_hook(
        self, cases, data: str, *, max_seq_lens=False, miles=True, qkv_format="thd", wrap=lambda group: group
    ) -> list[str]:
        failures: list[str] = []
        calls, all_totals = dataset(data, self.dp_size)
        samples, totals = calls[self.dp_rank], all_totals[self.dp_rank]
        lengths = [m.numel() for m in samples.masks]
        padded = [max(totals) + 5] * len(totals) if max_seq_lens else None
        own = self.owned(lengths, totals, padded_lengths=padded)
        for keys, per_token_loss in cases:
            expected = correct(calls, keys, per_token_loss=per_token_loss)[self.dp_rank]
            assert expected.margin > MARGIN
            args = args_of(keys, per_token_loss=per_token_loss, qkv_format=qkv_format)
            keywords = {"parallel_state": self.parallel_state(wrap), "max_seq_lens": padded} if miles else {}
            output, pg_loss = self.hook(args, samples, totals, padded_lengths=padded, **keywords)
            self.check(
                failures,
                f"{data}, {keys}",
                lambda e=expected, o=output, p=pg_loss: assert_hook_output(o, e, samples, pg_loss=p, tokens=own),
            )
        return failures

    def run_thd(self) -> list[str]:
        return (
            self.compare_hook([*grid()[::31], *((keys, False) for keys in STALE)], "plain")
            + self.compare_hook(grid()[1::29], "broken")
            + self.compare_hook(grid()[::37], "single tokens")
            + self.compare_hook(grid()[::37], "all masked")
        )

    def run_bshd(self) -> list[str]:
        return self.compare_hook(grid()[::41], "plain", max_seq_lens=True, qkv_format="bshd")

    def run_contiguous(self) -> list[str]:
        failures: list[str] = []
        for data in ["plain", "broken"]:
            calls, all_totals = dataset(data, self.dp_size)
            samples, totals = calls[self.dp_rank], all_totals[self.dp_rank]
            lengths = [m.numel() for m in samples.masks]
            for partition in ["contiguous", "zigzag"]:
                own = self.owned(lengths, totals, partition=partition)
                layout = mis_ext.PackedLayout.context_parallel(
                    lengths,
                    total_lengths=totals,
                    cp_rank=self.cp_rank,
                    cp_size=self.cp_size,
                    partition=partition,
                    device=torch.device("cpu"),
                )
                for keys in (*(keys for keys, _ in grid()[::53]), *STALE):
                    expected = correct(calls, keys)[self.dp_rank]
                    correction = mis_ext.compute_correction(
                        proximal_logprobs_T=torch.cat(self.local(samples.train, totals, partition=partition)),
                        behavior_logprobs_T=torch.cat(self.local(samples.rollout, totals, partition=partition)),
                        response_mask_R=torch.cat(samples.masks),
                        layout=layout,
                        config=mis_ext.config_from_mapping(keys),
                        cp_group=self.cp_group,
                        dp_group=self.dp_group,
                        lag_T=torch.cat(self.local(samples.lags, totals, partition=partition)),
                    )

                    def compare(expected=expected, own=own, correction=correction, samples=samples) -> None:
                        assert_close(correction.weights_T, flat(pick(expected.weights, own)), what="weights")
                        assert torch.equal(correction.keep_mask_T, flat(pick(expected.masks, own)) != 0)
                        assert torch.equal(correction.keep_mask_R, flat(expected.masks) != 0)
                        values = {name: metric.value() for name, metric in correction.metrics.items()}
                        assert_values(values, expected, samples)

                    self.check(failures, f"{partition}, {data}, {keys}", compare)
        return failures

    def run_collectives(self) -> list[str]:
        failures: list[str] = []
        for keys in [METRICS_ONLY, *(keys for keys, _ in grid()[::53])]:
            args = args_of(keys)
            seen = []
            for lengths in [[8, 8, 8], [800, 8, 8], [8, 8, 8], [1] * 40]:
                samples = random_samples(lengths, seed=len(seen))
                totals = [length + 6 for length in lengths]
                with Counter() as counter:
                    self.hook(args, samples, totals, parallel_state=self.parallel_state(), max_seq_lens=None)
                seen.append((counter.calls, counter.bytes, sum(lengths)))
            # The first call may run guards.
            (_, _, _), long, short, many = seen
            growth = (long[1] - short[1]) / (long[2] - short[2])
            levels = {keys.get("tis_level", "token")}
            levels |= {keys["rs_level"]} if keys.get("use_rs") else set()
            token_gate = self.has_token_gate(keys)
            whole_sequences = not keys["use_tis"] or (levels & {"sequence", "geometric"} and not token_gate)

            def compare(long=long, short=short, many=many, growth=growth, whole_sequences=whole_sequences) -> None:
                assert long[0] == short[0] == many[0], f"collectives depend on the data: {long[0]} {short[0]} {many[0]}"
                assert len(short[0]) <= 3, f"{len(short[0])} collectives: {short[0]}"
                # Before other collectives, slime looks for free memory.
                assert set(short[0]) <= {"_allgather_base_"}, f"{short[0]}"
                assert growth <= 1 / 8, f"{growth} bytes per token"
                if whole_sequences:
                    assert growth == 0.0, f"{growth} bytes per token, but no token-level decision"
                assert self.cp_size * self.dp_size == 1 or short[0], "no collective was seen"

            self.check(failures, f"{keys}", compare)
        return failures

    def run_wrapped_groups(self) -> list[str]:
        made: list[WrappedGroup] = []

        def wrap(group: dist.ProcessGroup) -> WrappedGroup:
            made.append(WrappedGroup(group))
            return made[-1]

        failures = self.compare_hook(grid()[::61], "broken", wrap=wrap)
        if not any(group.used for group in made):
            failures.append("the wrapper's own methods were never called")
        return failures

    def has_token_gate(self, keys: dict) -> bool:
        by_gate = bool(keys.get("use_rs")) and keys["rs_level"] == "token"
        return by_gate or (keys.get("tis_level") == "token" and keys.get("tis_mode") == "mask")

    def run_megatron(self) -> list[str]:
        return self.compare_hook(grid()[::61], "plain", miles=False) + self.compare_hook(
            grid()[::67], "broken", miles=False
        )
