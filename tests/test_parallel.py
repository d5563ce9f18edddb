"""Real gloo processes: context and data parallelism give the numbers of one rank, with few and small collectives.

Every world size is spawned once. Its workers run all sections over their part of the data, compare with the judge on
the whole data, and write down what differs; each test then reads its section.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import (
    GATES,
    WEIGHTS,
    args_of,
    assert_close,
    assert_hook_output,
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
from mis_ext import prepare_rollout
from mis_ext.correction.backend import triton_obstacle

pytestmark = pytest.mark.distributed

TOPOLOGIES = {"CP 2": (2, 1), "DP 2": (1, 2), "CP 4": (4, 1), "CP 2 x DP 2": (2, 2)}
INTERPRETED_TOPOLOGIES = ["CP 2 x DP 2"]
SECTIONS = [
    "thd",
    "bshd",
    "contiguous",
    "collectives",
    "wrapped groups",
    "triton",
    "missing log-probs",
    "one ULP",
    "megatron",
    "rollout scope",
]
TRITON_OBSTACLE = triton_obstacle("cpu")
NEEDS_MEGATRON = ["megatron", "rollout scope"]
HAS_MEGATRON = find_spec("megatron") is not None and find_spec("megatron.core") is not None
METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"}
TIMEOUT = timedelta(seconds=60)
MARGIN = 1e-5


# --- data: a list of calls, one per data-parallel rank


def dataset(name: str, dp_size: int) -> tuple[list[Samples], list[list[int]]]:
    """Samples and total lengths of every data-parallel rank; ranks hold different numbers of samples."""
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
    """Every weight, gate and normaliser; vetoes, denominators and the host's reducer take turns."""
    vetoes = ["no veto", "low veto", "high veto", "probability veto", "all vetoes"]
    out = []
    for weight in WEIGHTS:
        normalizers = ["no normaliser", "kept", "kept, micro-batch", "valid", "valid, micro-batch"]
        for gate in GATES:
            for normalizer in normalizers if weight[0] != "none" else normalizers[:1]:
                turn = len(out)
                keys = correction_keys(weight, gate=gate, veto=vetoes[turn % 5], normalizer=normalizer)
                keys["mis_denominator"] = ["fixed", "kept"][turn % 2]
                out.append((keys, turn % 4 < 2))
    return out


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Set MIS_EXT_BACKEND for a while."""
    before = os.environ.get("MIS_EXT_BACKEND")
    os.environ["MIS_EXT_BACKEND"] = name
    try:
        yield
    finally:
        del os.environ["MIS_EXT_BACKEND"]
        if before is not None:
            os.environ["MIS_EXT_BACKEND"] = before


# --- what a worker is


class Counter(TorchDispatchMode):
    """Counts collectives below Python and the bytes that each one sends."""

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
            # Of an input and the outputs gathered from it, the input is the smaller.
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

    def allreduce(self, tensors, opts=None):
        self.used += 1
        return self._group.allreduce(tensors, dist.AllreduceOptions() if opts is None else opts)


class Worker:
    """One rank of one topology."""

    def __init__(self, topology: str) -> None:
        self.cp_size, self.dp_size = TOPOLOGIES[topology]
        rank = dist.get_rank()
        self.cp_rank, self.dp_rank = rank % self.cp_size, rank // self.cp_size
        everyone = list(range(self.cp_size * self.dp_size))
        by_cp = [everyone[i : i + self.cp_size] for i in range(0, len(everyone), self.cp_size)]
        by_dp = [everyone[i :: self.cp_size] for i in range(self.cp_size)]
        self.cp_group = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in by_cp][self.dp_rank]
        self.dp_group = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in by_dp][self.cp_rank]
        self.dp_cp_group = dist.new_group(everyone, timeout=TIMEOUT)

    def parallel_state(self, wrap: Callable = lambda group: group) -> SimpleNamespace:
        """What Miles passes."""

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
        pg_loss = torch.linspace(-1.0, 2.0, sum(t.numel() for t in train))
        output = mis_ext.compute_mis_weights_with_cp(
            args=args,
            pg_loss=pg_loss,
            train_log_probs=train,
            rollout_log_probs=self.local(samples.rollout, totals, **layout),
            loss_masks=samples.masks,
            total_lengths=totals,
            response_lengths=[m.numel() for m in samples.masks],
            **keywords,
        )
        return output, pg_loss

    def check(self, failures: list[str], name: str, compare: Callable[[], None]) -> None:
        """Write down a comparison that fails; an exception of the hook itself is raised before, and ends the worker."""
        try:
            compare()
        except AssertionError as error:
            failures.append(f"rank {dist.get_rank()}, {name}: {str(error)[:600]}")

    # --- sections

    def compare_hook(self, cases, data: str, *, max_seq_lens=False, miles=True, qkv_format="thd") -> list[str]:
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
            keywords = {"parallel_state": self.parallel_state(), "max_seq_lens": padded} if miles else {}
            output, pg_loss = self.hook(args, samples, totals, padded_lengths=padded, **keywords)
            self.check(
                failures,
                f"{data}, {keys}",
                lambda e=expected, o=output, p=pg_loss: assert_hook_output(o, e, samples, pg_loss=p, tokens=own),
            )
        return failures

    def run_thd(self) -> list[str]:
        # Every setting in one of the four topologies.
        topology = (self.cp_size, self.dp_size)
        cases = grid()[[*TOPOLOGIES.values()].index(topology) :: len(TOPOLOGIES)]
        failures = self.compare_hook(cases, "plain") + self.compare_hook(grid()[1::14], "broken")
        return (
            failures + self.compare_hook(grid()[::18], "single tokens") + self.compare_hook(grid()[::18], "all masked")
        )

    def run_bshd(self) -> list[str]:
        return self.compare_hook(grid()[::9], "plain", max_seq_lens=True, qkv_format="bshd")

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
                for keys, _ in grid()[::15]:
                    expected = correct(calls, keys)[self.dp_rank]
                    correction = mis_ext.compute_correction(
                        proximal_logprobs_T=torch.cat(self.local(samples.train, totals, partition=partition)),
                        behavior_logprobs_T=torch.cat(self.local(samples.rollout, totals, partition=partition)),
                        response_mask_R=torch.cat(samples.masks),
                        layout=layout,
                        config=mis_ext.config_from_mapping(keys),
                        cp_group=self.cp_group,
                        dp_group=self.dp_group,
                    )

                    def compare(expected=expected, own=own, correction=correction) -> None:
                        assert_close(correction.weights_T, flat(pick(expected.weights, own)), what="weights")
                        assert torch.equal(correction.keep_mask_T, flat(pick(expected.masks, own)) != 0)
                        assert torch.equal(correction.keep_mask_R, flat(expected.masks) != 0)

                    self.check(failures, f"{partition}, {data}, {keys}", compare)
        return failures

    def run_collectives(self) -> list[str]:
        failures: list[str] = []
        for keys in [METRICS_ONLY, *(keys for keys, _ in grid()[::11])]:
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
                assert growth <= 1 / 8, f"{growth} bytes per token"
                if whole_sequences:
                    assert growth == 0.0, f"{growth} bytes per token, but no token-level decision"
                assert self.cp_size * self.dp_size == 1 or short[0], "no collective was seen"

            self.check(failures, f"{keys}", compare)
        return failures

    def run_wrapped_groups(self) -> list[str]:
        failures: list[str] = []
        calls, all_totals = dataset("broken", self.dp_size)
        samples, totals = calls[self.dp_rank], all_totals[self.dp_rank]
        own = self.owned([m.numel() for m in samples.masks], totals)
        made: list[WrappedGroup] = []

        def wrap(group: dist.ProcessGroup) -> WrappedGroup:
            made.append(WrappedGroup(group))
            return made[-1]

        for keys, per_token_loss in grid()[::11]:
            expected = correct(calls, keys, per_token_loss=per_token_loss)[self.dp_rank]
            args = args_of(keys, per_token_loss=per_token_loss)
            output, pg_loss = self.hook(
                args, samples, totals, parallel_state=self.parallel_state(wrap), max_seq_lens=None
            )
            self.check(
                failures,
                f"{keys}",
                lambda e=expected, o=output, p=pg_loss: assert_hook_output(o, e, samples, pg_loss=p, tokens=own),
            )
        if not any(group.used for group in made):
            failures.append("the wrapper's own methods were never called")
        return failures

    def run_triton(self) -> list[str]:
        """The kernels, interpreted, which takes seconds a call: with and without gates on tokens, packed and padded."""
        with_gate, without = (
            next(keys for keys, _ in grid()[start:] if self.has_token_gate(keys) == has)
            for start, has in ((20, True), (9, False))
        )
        with backend("triton"):
            failures = self.compare_hook([(with_gate, True)], "broken") + self.compare_hook([(without, False)], "plain")
            return failures + self.compare_hook([(with_gate, False)], "plain", max_seq_lens=True, qkv_format="bshd")

    def has_token_gate(self, keys: dict) -> bool:
        by_gate = bool(keys.get("use_rs")) and keys["rs_level"] == "token"
        return by_gate or (keys.get("tis_level") == "token" and keys.get("tis_mode") == "mask")

    def run_missing_log_probs(self) -> list[str]:
        failures: list[str] = []
        calls, all_totals = dataset("plain", self.dp_size)
        samples, totals = calls[self.dp_rank], all_totals[self.dp_rank]
        lengths = [m.numel() for m in samples.masks]
        own = self.owned(lengths, totals)
        response = flat(pick([m.tolist() for m in samples.masks], own)) != 0
        args = args_of(METRICS_ONLY)
        for missing in [None, []]:
            loss = torch.ones(response.numel())
            out, masks, metrics = mis_ext.compute_mis_weights_with_cp(
                args=args,
                pg_loss=loss,
                train_log_probs=self.local(samples.train, totals),
                rollout_log_probs=missing,
                loss_masks=samples.masks,
                total_lengths=totals,
                response_lengths=lengths,
                parallel_state=self.parallel_state(),
                max_seq_lens=None,
            )

            def compare(out=out, loss=loss, masks=masks, metrics=metrics) -> None:
                assert out is loss
                assert masks is samples.masks
                for value in metrics.values():
                    assert value.shape == loss.shape
                    assert value[response].isnan().all()
                    assert not value[~response].any()

            self.check(failures, f"{missing}", compare)
        return failures

    def run_one_ulp(self) -> list[str]:
        """Equal engines but for one token, which the last data-parallel and one context-parallel rank holds."""
        failures: list[str] = []
        calls, all_totals = dataset("plain", self.dp_size)
        calls = [Samples(s.train, [t.clone() for t in s.train], s.masks) for s in calls]
        token = calls[-1].rollout[0][:1]
        token.copy_(token.nextafter(torch.tensor(-torch.inf)))
        gap = float(calls[-1].train[0][0] - token)
        samples, totals = calls[self.dp_rank], all_totals[self.dp_rank]
        own = self.owned([m.numel() for m in samples.masks], totals)
        response = flat(pick([m.tolist() for m in samples.masks], own)) != 0
        # Of each response, whoever holds its tokens: the share of trainable tokens that differ.
        shares = [
            (t != r)[m != 0].float().mean().expand(m.numel())
            for t, r, m in zip(samples.train, samples.rollout, samples.masks, strict=True)
        ]
        share = torch.cat(self.local(shares, totals))
        names = ["mis_train_rollout_logprob_abs_diff_" + name for name in ("max", "nonzero")]
        args = args_of(METRICS_ONLY | {"mis_metrics": names})
        parallel = {"parallel_state": self.parallel_state(), "max_seq_lens": None}
        (_, _, metrics), _ = self.hook(args, samples, totals, **parallel)

        def compare() -> None:
            assert gap > 0.0
            assert metrics[names[0]][response].tolist() == [gap] * int(response.sum())
            assert metrics[names[1]][response].tolist() == share[response].tolist()
            assert share[response].any() == (self.dp_rank == self.dp_size - 1 and bool(own[0]))

        self.check(failures, f"{gap}", compare)
        return failures

    def run_megatron(self) -> list[str]:
        return self.compare_hook(grid()[::9], "plain", miles=False) + self.compare_hook(
            grid()[::13], "broken", miles=False
        )

    def run_rollout_scope(self) -> list[str]:
        """Slime's rollout: every data-parallel rank prepares all its samples, then trains on them in two calls."""
        failures: list[str] = []
        parts = [dataset(name, self.dp_size) for name in ["plain", "broken"]]
        everything = [samples for calls, _ in parts for samples in calls]
        mine = parts[0][0][self.dp_rank] + parts[1][0][self.dp_rank]
        totals = parts[0][1][self.dp_rank] + parts[1][1][self.dp_rank]
        for keys, per_token_loss in grid()[::5]:
            if not keys.get("tis_batch_normalize") and keys["mis_denominator"] == "fixed":
                continue
            keys = keys | {"tis_normalize_scope": "rollout"}
            args = args_of(keys, per_token_loss=per_token_loss)
            data = {
                "log_probs": self.local(mine.train, totals),
                "rollout_log_probs": self.local(mine.rollout, totals),
                "loss_masks": mine.masks,
                "total_lengths": totals,
                "response_lengths": [m.numel() for m in mine.masks],
            }
            prepare_rollout(args, 0, data)
            for calls, all_totals in parts:
                expected = correct(calls, keys, per_token_loss=per_token_loss, rollout=everything)[self.dp_rank]
                samples, call_totals = calls[self.dp_rank], all_totals[self.dp_rank]
                own = self.owned([m.numel() for m in samples.masks], call_totals)
                output, pg_loss = self.hook(args, samples, call_totals)
                self.check(
                    failures,
                    f"{keys}",
                    lambda e=expected, o=output, p=pg_loss, s=samples, t=own: assert_hook_output(
                        o, e, s, pg_loss=p, tokens=t
                    ),
                )
        return failures


def work(rank: int, world_size: int, folder: str) -> None:
    """All sections of all topologies of one world size."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    store = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    out: dict[str, list[str]] = {}
    report = Path(folder) / f"world{world_size}_rank{rank}.json"
    try:
        for topology, (cp_size, dp_size) in TOPOLOGIES.items():
            if cp_size * dp_size != world_size:
                continue
            worker = Worker(topology)
            for section in [section for section in SECTIONS if not obstacle(section)]:
                if section == "triton" and topology not in INTERPRETED_TOPOLOGIES:
                    continue
                key = f"{topology}, {section}"
                if section == "megatron":
                    from megatron.core import parallel_state

                    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
                try:
                    out[key] = getattr(worker, f"run_{section.lower().replace(' ', '_').replace('-', '_')}")()
                except Exception:
                    out[key] = [f"rank {rank}: {traceback.format_exc()[-2500:]}"]
                    raise
                finally:
                    report.write_text(json.dumps(out))
            if HAS_MEGATRON:
                parallel_state.destroy_model_parallel()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_world(world_size: int, folder: Path) -> dict[str, list[str]]:
    """Failures by topology and section; a section that a crash left out is missing."""
    crash = ""
    try:
        mp.spawn(work, args=(world_size, str(folder)), nprocs=world_size)
    except Exception as error:
        crash = str(error)[-1500:]
    merged: dict[str, list[str]] = {}
    reports = [folder / f"world{world_size}_rank{rank}.json" for rank in range(world_size)]
    for report in reports:
        for key, failures in (json.loads(report.read_text()) if report.exists() else {}).items():
            merged.setdefault(key, []).extend(failures)
    merged["crash"] = [crash] if crash else []
    return merged


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Callable[[str], dict[str, list[str]]]:
    """Runs a world size when the first of its tests asks."""
    done: dict[int, dict[str, list[str]]] = {}

    def outcome(topology: str) -> dict[str, list[str]]:
        cp_size, dp_size = TOPOLOGIES[topology]
        world_size = cp_size * dp_size
        if world_size not in done:
            done[world_size] = run_world(world_size, tmp_path_factory.mktemp("gloo"))
        return done[world_size]

    return outcome


def obstacle(section: str) -> str | None:
    if section in NEEDS_MEGATRON and not HAS_MEGATRON:
        return "needs megatron-core"
    return TRITON_OBSTACLE if section == "triton" else None


def assert_section(outcomes, topology: str, section: str) -> None:
    if obstacle(section):
        pytest.skip(str(obstacle(section)))
    outcome = outcomes(topology)
    key = f"{topology}, {section}"
    assert key in outcome, f"not reached: {outcome['crash']}"
    failures = outcome[key]
    assert not failures, f"{len(failures)} differences, the first:\n" + "\n".join(failures[:3])


topologies = pytest.mark.parametrize("topology", list(TOPOLOGIES))


@topologies
def test_packed_samples_give_the_results_of_one_rank_for_every_setting(outcomes, topology):
    assert_section(outcomes, topology, "thd")


@topologies
def test_padded_samples_give_the_results_of_one_rank(outcomes, topology):
    assert_section(outcomes, topology, "bshd")


@topologies
def test_the_pipeline_on_contiguous_and_zigzag_chunks_gives_the_results_of_one_rank(outcomes, topology):
    assert_section(outcomes, topology, "contiguous")


@topologies
def test_at_most_three_small_collectives_that_do_not_depend_on_the_data(outcomes, topology):
    assert_section(outcomes, topology, "collectives")


@topologies
def test_fault_tolerant_wrappers_around_the_groups_work(outcomes, topology):
    assert_section(outcomes, topology, "wrapped groups")


@pytest.mark.parametrize("topology", INTERPRETED_TOPOLOGIES)
def test_the_triton_backend_gives_the_results_of_one_rank(outcomes, topology):
    assert_section(outcomes, topology, "triton")


@topologies
def test_missing_log_probs_do_not_hang_or_change_anything_in_metrics_only_mode(outcomes, topology):
    assert_section(outcomes, topology, "missing log-probs")


@topologies
def test_one_token_that_differs_by_one_ulp_is_seen_by_every_rank(outcomes, topology):
    assert_section(outcomes, topology, "one ULP")


@topologies
def test_groups_come_from_megatron_when_the_host_passes_none(outcomes, topology):
    assert_section(outcomes, topology, "megatron")


@topologies
def test_the_rollout_normaliser_is_the_same_on_all_ranks_and_in_all_micro_batches(outcomes, topology):
    assert_section(outcomes, topology, "rollout scope")


def test_chunks_match_positions_worked_out_by_hand():
    # Eight positions, two ranks, chunks of two: rank 0 owns positions 0, 1, 6, 7 and scores tokens 1, 2, 7.
    own = [local_tokens(total_length=8, response_length=6, cp_rank=rank, cp_size=2) for rank in range(2)]
    assert own == [[0, 5], [1, 2, 3, 4]]
    # Ten positions make chunks of three, the last one short.
    own = [local_tokens(total_length=10, response_length=9, cp_rank=rank, cp_size=2) for rank in range(2)]
    assert own == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    # Padded to sixteen: chunks of four.
    own = [
        local_tokens(total_length=10, response_length=9, cp_rank=rank, cp_size=2, padded_length=16) for rank in range(2)
    ]
    assert own == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    own = [
        local_tokens(total_length=8, response_length=6, cp_rank=rank, cp_size=2, partition="contiguous")
        for rank in range(2)
    ]
    assert own == [[0, 1, 2], [3, 4, 5]]
