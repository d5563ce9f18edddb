# SPDX-License-Identifier: Apache-2.0
"""Fused scoring in the hosts: the numbers of their own functions, and who scores where nobody says so."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import loss_cases
import pytest
import torch
import torch.distributed as dist
from host_stand_ins import HOSTS, called, running
from loss_cases import GATES, TOP_P
from parallel_worker import Counter
from process_ranks import on_processes
from synchronization import recorded
from thread_ranks import Rank, run_ranks
from torch.utils._pytree import tree_leaves

import mis_ext
from mis_ext.correction.layout import PackedLayout
from mis_ext.frameworks import SLIME
from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles.policy_loss import find_host, find_ranks, kept_columns

OF_LARGEST = 2e-6
"""Both sum float32 logarithms of eight columns, in another order."""
HOT = loss_cases.NOT_RECORDED["hot"]
OPTIONS = loss_cases.OPTIONS | {"hot": HOT}
ON_RANKS = (*loss_cases.CONTEXT_PARALLEL, "temperature", "no proximal log-probs", "hot")


def both(keys: dict, batch: dict) -> list[tuple]:
    return [called(keys | {"mis_loss_scoring": by}, dict(batch)) for by in ("fused", "host")]


def assert_same(found: tuple, wanted: tuple) -> None:
    """Within a share of the largest entry: of loss and metrics, whose terms have both signs, and of the gradient."""
    assert [*found[1]] == [*wanted[1]]
    numbers = [[torch.stack([x[0].cpu(), *x[1].values()]).nan_to_num(1.0), x[2].float()] for x in (found, wanted)]
    for ours, theirs in zip(*numbers, strict=True):
        if theirs.numel() > 0:
            assert float((ours - theirs).abs().max()) <= OF_LARGEST * max(float(theirs.abs().max()), 1e-3)


# --- the same numbers


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("host", HOSTS)
def test_fused_scoring_gives_the_loss_with_the_hosts_own_log_probs(host, name) -> None:
    with running(host) as asked:
        found, wanted = both(OPTIONS[name], loss_cases.local_batch(loss_cases.whole_batch()))
        assert len(asked.scored) == 1
    assert_same(found, wanted)
    assert wanted[2].abs().max() > 0.0


@pytest.mark.parametrize(
    ("host", "is_padded", "cp_sizes"),
    [("slime", False, [4]), ("miles", False, [2]), ("miles", True, [1, 4]), ("vime", True, [2])],
)
@pytest.mark.parametrize("name", ON_RANKS)
def test_fused_scoring_gives_it_on_context_parallel_ranks_too(host, is_padded, cp_sizes, name) -> None:
    keys = OPTIONS[name] | ({"qkv_format": "bshd"} if is_padded else {})
    with running(host):
        for cp_size in cp_sizes:

            def on_rank(rank: Rank, cp_size=cp_size) -> list[tuple]:
                place = {"cp_rank": rank.cp_rank, "cp_size": cp_size, "is_padded": is_padded}
                return both(keys, loss_cases.local_batch(loss_cases.whole_batch(), **place))

            for found in run_ranks(on_rank, cp_size=cp_size):
                if isinstance(found, Exception):
                    raise found
                assert_same(*found)


def test_miles_takes_logits_of_bfloat16_and_gets_their_gradient() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    batch["logits"] = batch["logits"].bfloat16()
    with running("miles"):
        found, wanted = both({"entropy_coef": 0.1, "train_backend": "fsdp"}, batch)
    assert found[2].dtype == wanted[2].dtype == torch.bfloat16
    # One rounding to 8 bits of the same number.
    torch.testing.assert_close(found[2], wanted[2], rtol=2**-7, atol=0.0)
    assert_same((*found[:2], found[2] * 0), (*wanted[:2], wanted[2] * 0))


@pytest.mark.parametrize("host", HOSTS)
def test_entropy_is_wanted_as_by_the_host(host) -> None:
    """Miles leaves it out where nobody looks at it; without a coefficient it has no gradient."""
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    with running(host):
        for keys in ({}, {"observe_training_entropy": False}, {"observe_training_entropy": False, "entropy_coef": 0.1}):
            found, wanted = both(keys, batch)
            assert_same(found, wanted)
            is_left_out = host == "miles" and keys == {"observe_training_entropy": False}
            assert (float(found[1]["entropy_loss"]) == 0.0) is is_left_out


def test_miles_does_not_divide_by_a_temperature_of_zero_and_others_refuse_it() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    greedy = {"rollout_temperature": 0.0}
    with running("miles"):
        for by in both(greedy, batch):
            assert_same(by, called({}, dict(batch)))
    for place in (nullcontext(), running("slime")):
        with place, pytest.raises(ValueError, match=r"rollout_temperature must be in \(0, inf\], got 0.0"):
            called(greedy, dict(batch))
    with pytest.raises(ValueError, match=r"rollout_temperature must be in \[0, inf\), got -1.0"):
        called({"rollout_temperature": -1.0}, dict(batch))


# --- top-p


@pytest.mark.parametrize(("cp_size", "unrecorded"), [(1, 3), (2, 0), (4, 3), (4, 9)])
def test_log_probs_are_among_the_tokens_that_top_p_kept(cp_size, unrecorded) -> None:
    whole = loss_cases.with_top_p(loss_cases.whole_batch(), unrecorded=unrecorded)
    with running("slime") as asked:

        def on_rank(rank: Rank) -> list[tuple]:
            local = loss_cases.local_batch(whole, cp_rank=rank.cp_rank, cp_size=cp_size)
            return [*both(TOP_P, local), called({"entropy_coef": 0.1}, dict(local))]

        for found in run_ranks(on_rank, cp_size=cp_size):
            if isinstance(found, Exception):
                raise found
            assert_same(*found[:2])
            assert (found[0][2] - found[2][2]).abs().max() > 0.01
        assert asked.scored[0]["top_p_token_ids"] is whole["rollout_top_p_token_ids"]


@pytest.mark.parametrize("key", ["rollout_top_p_token_ids", "rollout_top_p_token_offsets"])
def test_top_p_without_what_was_kept_is_refused(key) -> None:
    batch = loss_cases.local_batch(loss_cases.with_top_p(loss_cases.whole_batch()))
    with running("slime"):
        with pytest.raises(ValueError, match=f"{key} are missing: with a --rollout-top-p that is not 1 the rollout f"):
            called(TOP_P, batch | {key: None})
        with pytest.raises(ValueError, match=f"{key} has 2 samples, but the batch has 6"):
            called(TOP_P, batch | {key: batch[key][:2]})


def test_no_samples_keep_no_tokens() -> None:
    batch = {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": []}
    assert [len(each) for each in kept_columns(batch, PackedLayout.whole([]))] == [0, 0, 0]


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("host", HOSTS)
def test_the_host_scores_no_samples_with_a_term_of_the_entropy(host, rows) -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    nothing = {key: [] if isinstance(values, list) else values[:0] for key, values in batch.items()}
    keys = {"mis_loss_scoring": "host", "entropy_coef": 0.1}
    with running(host):
        loss, _, gradient = called(keys, nothing | {"logits": batch["logits"][:, :rows]})
    assert (float(loss), gradient.count_nonzero()) == (0.0, 0)


def test_where_no_host_replays_top_p_it_changes_nothing() -> None:
    """Miles has the flag and no replay."""
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    for place in (nullcontext(), running("miles")):
        with place:
            assert torch.equal(called({"rollout_top_p": 0.9}, dict(batch))[2], called({}, dict(batch))[2])


# --- recomputation, and the gradient in the place of the logits


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_recomputed_and_in_place_it_is_the_same(host, recompute, inplace) -> None:
    keys = GATES | {"entropy_coef": 0.1}
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    with running(host):
        wanted = called(keys, dict(batch))
        found = called(keys | {"mis_loss_inplace": inplace}, dict(batch), recompute=recompute)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[2], wanted[2])
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


# --- ranks and batches without tokens


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_a_rank_without_tokens_takes_part_and_reaches_every_logit(host, inplace) -> None:
    batch = loss_cases.whole_batch()
    one = {key: [values[2]] if isinstance(values, list) else values[2:3] for key, values in batch.items()}
    keys = GATES | {"entropy_coef": 0.1, "mis_loss_inplace": inplace}
    with running(host):

        def on_rank(rank: Rank) -> tuple:
            local = loss_cases.local_batch(one, cp_rank=rank.cp_rank, cp_size=2)
            return sum(map(len, local["advantages"])), called(keys, local)

        parts = run_ranks(on_rank, cp_size=2)
    assert sorted(part[0] for part in parts) == [0, 1]
    for count, (loss, _, gradient) in parts:
        assert gradient is not None
        assert bool(gradient.any()) is (count == 1)
        assert (float(loss) == 0.0) is (count == 0)


def test_a_rank_without_tokens_needs_no_second_gradient() -> None:
    """Fused scoring reaches every logit by itself: in place there is no other tensor of that size."""
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    for key in (*loss_cases.PER_TOKEN, "loss_masks"):
        batch[key] = [values[:0] for values in batch[key]]
    batch["response_lengths"] = [0] * len(loss_cases.RESPONSES)
    logits = batch.pop("logits").requires_grad_() * 1.0
    places = []
    logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    loss, _ = mis_ext.policy_loss(loss_cases.host_args(mis_loss_inplace=True), batch, logits)
    loss.backward()
    assert places == [logits.data_ptr()]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("num_samples", [0, 1])
def test_a_batch_without_tokens_has_no_loss(host, num_samples) -> None:
    """No samples, or one without a response; with and without rows of logits."""
    whole = loss_cases.whole_batch()
    batch = {key: values[:num_samples] for key, values in whole.items()}
    for key in (*loss_cases.PER_TOKEN, "loss_masks"):
        batch[key] = [values[:0] for values in batch[key]]
    batch["response_lengths"] = [0] * num_samples
    keys = {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}
    with running(host):
        for num_rows in (sum(batch["total_lengths"]), sum(batch["total_lengths"]) + 3):
            batch["logits"] = torch.randn(1, num_rows, loss_cases.VOCABULARY)
            loss, _, gradient = called(keys, dict(batch))
            assert float(loss) == 0.0
            assert gradient.shape == batch["logits"].shape
            assert not gradient.any()


# --- no tensor per sample


def test_the_debug_dump_of_slime_gets_its_samples_and_else_none_is_made() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    with running("slime") as asked:
        called({"mis_loss_scoring": "fused"}, dict(batch))
        assert asked.captured == []
        module = sys.modules[SLIME.loss]
        module._LOG_PROB_CAPTURE = {}
        for by in both({}, batch):
            assert by[0].isfinite()
    ours, theirs = asked.captured
    assert not any(sample.requires_grad for sample in ours)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("host", HOSTS)
def test_the_work_from_logits_to_gradient_does_not_depend_on_the_number_of_samples(host, monkeypatch) -> None:
    args = loss_cases.host_args(**GATES, entropy_coef=0.1)
    run = current_run(args, whole_loss=True)
    counts = []
    with running(host):
        # The guards read until they have seen enough: the first call is not counted. Nor is a call with a look at the
        # mask, one of four.
        for num_samples in (40, 8, 24):
            batch = loss_cases.of_lengths([64] * num_samples)
            for _ in range(3):
                batch_loss(run, find_host(args, run.config, *find_ranks()), batch, torch.randn(1, 67 * num_samples, 8))
            logits = torch.randn(1, 67 * num_samples, 8, requires_grad=True)
            inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            with recorded(monkeypatch, logits, *inputs) as recorder:
                batch_loss(run, find_host(args, run.config, *find_ranks()), batch, logits).loss.backward()
            counts.append(len(recorder.names))
    # On a CPU rows of few tokens are reduced several at a time. A loop would ask for 32 operations more, at least.
    assert 100 < max(counts) < 1.02 * min(counts)


# --- tensor parallelism, on gloo processes


def parts_of_a_vocabulary(rank: int) -> None:
    """Two ranks have half of the columns each: the loss of one, with one all-gather."""
    half = loss_cases.VOCABULARY // 2
    mine = slice(rank * half, (rank + 1) * half)
    place = SimpleNamespace(rank=rank, size=2, group=dist.group.WORLD)
    for host in HOSTS:
        for keys in (HOT, {"observe_training_entropy": False}, *([TOP_P] if host == "slime" else [])):
            batch = loss_cases.local_batch(loss_cases.with_top_p(loss_cases.whole_batch(), unrecorded=3))
            with running(host):
                wanted = called(keys | {"mis_loss_scoring": "host"}, dict(batch))
            with running(host, tp=place), Counter() as counter:
                found = called(keys, batch | {"logits": batch["logits"][..., mine]})
            assert len(counter.calls) == 1
            assert_same(found, (*wanted[:2], wanted[2][..., mine]))


def parts_without_tokens(_rank: int) -> None:
    """Both ranks of a vocabulary hold the same tokens: here none."""
    place = SimpleNamespace(rank=dist.get_rank(), size=2, group=dist.group.WORLD)
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    for key in (*loss_cases.PER_TOKEN, "loss_masks"):
        batch[key] = [values[:0] for values in batch[key]]
    batch["response_lengths"] = [0] * len(loss_cases.RESPONSES)
    for host in HOSTS:
        with running(host, tp=place):
            loss, _, gradient = called({"entropy_coef": 0.1}, dict(batch))
        assert float(loss) == 0.0
        assert not gradient.any()


CHECKS = {check.__name__: check for check in (parts_of_a_vocabulary, parts_without_tokens)}

test_on_two_processes = on_processes(CHECKS, world_size=2, seconds=30)
