# SPDX-License-Identifier: Apache-2.0
"""A local error on one rank is raised there and named on all others, and nobody waits in a collective."""

import argparse
import types
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import loss_cases
import pytest
import torch
from hook_batches import make_batch
from rows import for_each
from thread_ranks import Rank, current_rank, run_ranks
from zigzag import take

import mis_ext
from mis_ext import prepare_rollout
from mis_ext.correction import correct
from mis_ext.hosts import session as runs
from mis_ext.hosts.groups import Groups, find_groups
from mis_ext.hosts.guards import RankFailed, raise_if_failed

LAYOUTS = {"DP 2": (1, 2), "CP 2": (2, 1), "CP 2 x DP 2": (2, 2)}
KEYS = {
    "weights of tokens": {"tis_batch_normalize": True, "use_rs": True, "mis_denominator": "kept"},
    "weights of sequences": {"tis_level": "geometric"},
}
LOCAL = ("pg_loss", "train_log_probs", "rollout_log_probs")

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def args_of(**keys: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"use_tis": True} | keys)


def local_batch(rank: Rank, **settings: Any) -> dict[str, Any]:
    """This rank's part of a batch of its data-parallel rank."""
    batch = make_batch(seed=7 + rank.dp_rank, **settings)
    if rank.groups.cp_size > 1:
        losses = batch["pg_loss"].split(batch["response_lengths"])
        place = {"cp_rank": rank.cp_rank, "cp_size": rank.groups.cp_size, "total_lengths": batch["total_lengths"]}
        for name, whole in (("pg_loss", losses), *((name, batch[name]) for name in LOCAL[1:])):
            batch[name] = take(whole, **place)
        batch["pg_loss"] = torch.cat(batch["pg_loss"])
    return batch


def without_samples() -> dict[str, Any]:
    lists = ("train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
    return {"pg_loss": torch.empty(0), **{name: [] for name in lists}}


def call(rank: Rank, batch: dict[str, Any], args: argparse.Namespace) -> tuple:
    return mis_ext.compute_mis_weights_with_cp(args, **batch, parallel_state=rank.parallel_state, max_seq_lens=None)


def replaced(name: str, index: int, change: Callable) -> Callable[[dict], None]:
    def spoil(batch: dict[str, Any]) -> None:
        batch[name] = [change(sample) if index == i else sample for i, sample in enumerate(batch[name])]

    return spoil


def assigned(name: str, change: Callable) -> Callable[[dict], None]:
    def spoil(batch: dict[str, Any]) -> None:
        batch[name] = change(batch[name])

    return spoil


class Broken(list):
    """What nobody foresaw: neither a wrong value nor a wrong type."""

    def __iter__(self):
        raise KeyError("broken for good")


ERRORS: dict[str, tuple[Callable[[dict], None], type[Exception], str]] = {
    "no behavior log-probs": (
        assigned("rollout_log_probs", lambda _: None),
        ValueError,
        "rollout_log_probs are missing",
    ),
    "no proximal log-probs": (assigned("train_log_probs", lambda _: []), ValueError, "train_log_probs are missing"),
    "a short sample": (replaced("rollout_log_probs", 1, lambda x: x[:-1]), ValueError, "rollout_log_probs has samples"),
    "a missing sample": (assigned("train_log_probs", lambda x: x[:-1]), ValueError, "train_log_probs has samples"),
    "None for a sample": (
        replaced("train_log_probs", 2, lambda _: None),
        TypeError,
        r"train_log_probs\[2\] .* NoneType",
    ),
    "a list for a sample": (replaced("loss_masks", 0, lambda x: x.tolist()), TypeError, r"loss_masks\[0\] .* list"),
    "a short mask": (replaced("loss_masks", 3, lambda x: x[:-1]), ValueError, "loss_masks has samples"),
    "a column of losses": (assigned("pg_loss", lambda x: x[:, None]), ValueError, r"pg_loss has shape \[\d+, 1\]"),
    "no loss": (assigned("pg_loss", lambda _: None), TypeError, "pg_loss must be a 1-D tensor, got NoneType"),
    "what nobody foresaw": (assigned("train_log_probs", Broken), KeyError, "broken for good"),
    "a guard": (
        assigned("rollout_log_probs", lambda x: [torch.zeros_like(each) for each in x]),
        ValueError,
        "Engine log-probs are placeholders",
    ),
    "log-probs of the next token": (
        assigned("rollout_log_probs", lambda x: [each.roll(-1) for each in x]),
        ValueError,
        "Log-probs are shifted by one token",
    ),
}


def assert_agreement(outcomes: list[Any], failing: int, kind: type[Exception], message: str) -> None:
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Exception), f"rank {number} went on"
        if number == failing:
            with pytest.raises(kind, match=message):
                raise outcome
        else:
            with pytest.raises(RuntimeError, match=rf"failed on rank {failing};"):
                raise outcome


@for_each("keys", KEYS.values())
@for_each("error", ERRORS)
@layouts
def test_an_error_on_one_rank_is_raised_there_and_named_on_all_others(layout, error, keys) -> None:
    spoil, kind, message = ERRORS[error]
    cp_size, dp_size = layout
    # The first rank with one configuration, the last with the other.
    failing = 0 if "tis_level" in keys else cp_size * dp_size - 1

    def work(rank: Rank) -> tuple:
        # Enough neighbors for a guard on each rank.
        batch = local_batch(rank, length=60)
        if rank.number == failing:
            spoil(batch)
        return call(rank, batch, args_of(**keys))

    assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), failing, kind, message)


@for_each("length, error", [(None, TypeError), ("5", TypeError), (1.5, TypeError)])
def test_a_length_that_one_rank_cannot_read_is_told_too(length, error) -> None:
    def work(rank: Rank) -> tuple:
        batch = local_batch(rank)
        if rank.number == 1:
            batch["response_lengths"] = [length, *batch["response_lengths"][1:]]
        # Where whole responses are rejected alone, no message has the length of their tokens.
        return call(rank, batch, args_of(tis_level="geometric"))

    assert_agreement(run_ranks(work, cp_size=2, dp_size=2), 1, error, r"response_lengths\[0\] must be an integer")


@layouts
def test_a_rank_without_lengths_is_told_by_the_hook(layout) -> None:
    cp_size, dp_size = layout

    def work(rank: Rank) -> tuple:
        batch = local_batch(rank)
        if rank.number == 1:
            batch["response_lengths"] = None
        # Messages have the lengths of responses, and the number of responses.
        return call(rank, batch, args_of(tis_mode="mask", tis_batch_normalize=True))

    assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), 1, TypeError, "response_lengths")


SEGMENTS = {"use_rs": True, "rs_gates": [{"reduce": "segment_mean", "low": 0.5, "high": 2.0}]}


@for_each("cp_size, dp_size, function", [
    (1, 2, "token_pass"),
    (2, 2, "token_pass"),
    (2, 2, "segment_values"),
    (1, 2, "response_pass"),
    (2, 1, "response_pass"),
    (2, 2, "response_pass"),
    (2, 1, "output_pass"),
    (2, 1, "gather_bits"),
])  # fmt: skip
def test_an_error_between_two_collectives_is_told_in_those_that_are_due(cp_size, dp_size, function) -> None:
    owner = correct.Due if function == "gather_bits" else correct
    failing, right = cp_size * dp_size - 1, getattr(owner, function)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if current_rank() == failing:
            raise torch.OutOfMemoryError("out of memory, says the test")
        return right(*args, **kwargs)

    keys = {"tis_mode": "mask", "tis_batch_normalize": True} | (SEGMENTS if function == "segment_values" else {})
    with mock.patch.object(owner, function, broken):
        # The last byte of the bits of tokens is not full.
        outcomes = run_ranks(
            lambda rank: call(rank, local_batch(rank, length=41), args_of(**keys)), cp_size=cp_size, dp_size=dp_size
        )
    assert_agreement(outcomes, failing, torch.OutOfMemoryError, "says the test")


def _loss(keys: dict[str, Any] | None, groups: Groups, **more: Any) -> Any:
    ones = torch.ones(2, 4)
    given = {"proximal_logprobs": -ones, "behavior_logprobs": -ones, "advantages": ones, "response_mask": ones}
    return mis_ext.policy_loss_from_log_probs(keys, current_logprobs=-ones, groups=groups, **given | more)


def _loss_from_hidden(keys: dict[str, Any] | None, groups: Groups, **more: Any) -> Any:
    ones, weight, ids = torch.ones(2, 4), torch.eye(5, 3), torch.zeros(2, 4, dtype=torch.long)
    given = {"behavior_logprobs": -ones, "advantages": ones, "response_mask": ones, "hidden": torch.ones(2, 4, 3)}
    return mis_ext.policy_loss_from_hidden(keys, weight=weight, token_ids=ids, groups=groups, **given | more)


def _loss_func(keys: Any, groups: Groups, **more: Any) -> Any:
    whole = loss_cases.local_batch(loss_cases.whole_batch(), cp_rank=0, cp_size=1)
    batch = more.pop("batch", whole | more)
    return mis_ext.make_loss_func(keys, batch, groups=groups)(whole["logits"])


def _corrected(keys: dict[str, Any], groups: Groups, **more: Any) -> Any:
    ones = torch.ones(4)
    streams = mis_ext.PackedStreams(-ones, -ones, ones, mis_ext.PackedLayout.whole([4]))
    return mis_ext.Session(keys).correct(more.get("streams", streams), groups=groups)


def _computed(keys: dict[str, Any], groups: Groups, **more: Any) -> Any:
    ones = torch.ones(4)
    given = {"proximal_logprobs_T": -ones, "behavior_logprobs_T": -ones, "response_mask_R": ones}
    given |= {"layout": mis_ext.PackedLayout.whole([4]), "config": mis_ext.config_from_mapping(keys)} | more
    found = mis_ext.compute_correction(**given, cp_group=groups.cp_group, dp_group=groups.dp_group)
    # It leaves to its caller whether the status is read.
    raise_if_failed([float(found.status)])


MISSPELLED = {"tis_levle": "token"}


@for_each("compute, keys, more, kind, message", [
    (_loss, MISSPELLED, {}, ValueError, "tis_levle"),
    (_loss, {"mis_loss_inplace": True}, {}, ValueError, "mis_loss_inplace"),
    (_loss, {}, {"response_mask": None}, TypeError, "response_mask"),
    (_loss, {}, {"layout": 3}, AttributeError, "'int' object has no attribute"),
    (_loss, None, {}, TypeError, "args must be a mapping"),
    (_loss_from_hidden, MISSPELLED, {}, ValueError, "tis_levle"),
    (_loss_from_hidden, {}, {"hidden": None}, TypeError, "hidden"),
    (_loss_from_hidden, {}, {"layout": 3}, AttributeError, "'int' object has no attribute"),
    (_loss_from_hidden, {}, {"nonsense": 1}, TypeError, "nonsense"),
    (_corrected, {}, {"streams": None}, TypeError, "streams must be a PackedStreams, got None"),
    (_computed, {}, {"behavior_logprobs_T": torch.ones(3)}, ValueError, "behavior_logprobs_T must be"),
    (_computed, {}, {"response_mask_R": None}, TypeError, "response_mask_R"),
    (_loss_func, {}, {"batch": None}, AttributeError, "'NoneType' object has no attribute 'get'"),
    (_loss_func, {}, {"response_lengths": torch.ones(6)}, TypeError, r"response_lengths\[0\] must be an integer"),
])  # fmt: skip
def test_a_key_or_an_argument_that_one_rank_cannot_read_is_told(compute, keys, more, kind, message) -> None:
    def work(rank: Rank) -> Any:
        fails = rank.number == 1
        given = {"use_tis": True, "tis_batch_normalize": True, "mis_guard": "warn"}
        if compute is _loss_func:
            given["eps_clip"] = 0.2
        if fails:
            given = None if keys is None else given | keys
        return compute(given, rank.groups, **more if fails else {})

    assert_agreement(run_ranks(work, dp_size=2), 1, kind, message)


def test_a_layout_of_whole_responses_on_one_context_parallel_rank_is_told() -> None:
    def work(rank: Rank) -> Any:
        part = mis_ext.PackedLayout.context_parallel([4], total_lengths=[8], cp_rank=rank.cp_rank, cp_size=2)
        log_probs_T = torch.zeros(part.num_local_tokens)
        given = {"layout": part, "proximal_logprobs_T": log_probs_T, "behavior_logprobs_T": log_probs_T}
        return _computed({"use_tis": True}, rank.groups, **given if rank.number == 0 else {})

    assert_agreement(run_ranks(work, cp_size=2), 1, ValueError, "PackedLayout.whole needs one rank")


@layouts
def test_keys_that_one_rank_cannot_read_are_told_by_the_hook(layout) -> None:
    cp_size, dp_size = layout

    def work(rank: Rank) -> tuple:
        return call(rank, local_batch(rank), args_of(**MISSPELLED if rank.number == 1 else {}))

    assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), 1, ValueError, "tis_levle")


@for_each("wrong, kind, message", [
    (args_of(**MISSPELLED), ValueError, "unknown keys: 'tis_levle'"),
    (None, TypeError, "args must be a mapping"),
])  # fmt: skip
@layouts
def test_new_keys_are_told_as_in_a_first_call_and_logged(layout, wrong, kind, message, capfd) -> None:
    """Where the others have their old ones, gloo ends the process of this rank without its error."""

    def work(rank: Rank) -> tuple:
        args = args_of()
        for _ in range(2):
            call(rank, local_batch(rank), args)
        return call(rank, local_batch(rank), wrong if rank.number == 1 else args_of(tis_batch_normalize=True))

    cp_size, dp_size = layout
    assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), 1, kind, message)
    assert capfd.readouterr().err.startswith(f"rank 1: {kind.__name__}: {message}")


def test_a_loss_func_is_not_made_of_args_that_cannot_be_read() -> None:
    def work(rank: Rank) -> Any:
        _loss_func({"eps_clip": 0.2, "mis_loss_mode": "bypass"}, rank.groups)
        # A pipeline stage that is not the last one does not call it.
        return mis_ext.make_loss_func(None if rank.number == 1 else {"eps_clip": 0.3}, {}, groups=rank.groups)

    assert_agreement(run_ranks(work, dp_size=2), 1, TypeError, "args must be a mapping")


def test_keys_of_the_loss_that_one_rank_cannot_read_after_the_hook_are_told() -> None:
    def work(rank: Rank) -> Any:
        args = args_of(tis_batch_normalize=True, mis_loss_mode="bypas" if rank.number == 1 else "bypass")
        call(rank, local_batch(rank), args)
        return _loss(args, rank.groups)

    assert_agreement(run_ranks(work, dp_size=2), 1, ValueError, "mis_loss_mode")


@layouts
def test_a_status_that_one_rank_cannot_read_is_logged_and_told_in_the_correction(layout, capfd) -> None:
    gather = runs._statuses_of_ranks

    def gather_or_fail(*given: Any) -> Any:
        statuses = gather(*given)
        if current_rank() != 1:
            return statuses
        return mock.Mock(is_cuda=False, **{"amax.side_effect": MemoryError("none left")})

    def work(rank: Rank) -> tuple:
        return call(rank, local_batch(rank), args_of(tis_batch_normalize=True))

    def make_only(rank: Rank) -> int:
        """What a pipeline stage does that is not the last one: it computes no loss."""
        args = args_of(eps_clip=0.2)
        for _ in range(2):
            mis_ext.make_loss_func(args, {}, groups=rank.groups)
        return rank.num_collectives

    cp_size, dp_size = layout
    with mock.patch.object(runs, "_statuses_of_ranks", gather_or_fail):
        assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), 1, MemoryError, "none left")
        assert "rank 1: MemoryError: none left" in capfd.readouterr().err
        # In their second call all know that the first is behind them.
        counts = run_ranks(make_only, cp_size=cp_size, dp_size=dp_size)
        assert counts == [(cp_size > 1) + (dp_size > 1)] * len(counts)


def test_ranks_call_again_when_the_keys_of_one_are_corrected() -> None:
    def work(rank: Rank) -> int:
        args = args_of(tis_batch_normalize=True)
        first = args_of(**MISSPELLED) if rank.number == 1 else args
        with pytest.raises((ValueError, RankFailed)):
            call(rank, local_batch(rank), first)
        # The same args on rank 0: it has not yet heard that all could read their keys.
        return len(call(rank, local_batch(rank), args))

    assert run_ranks(work, dp_size=2) == [3, 3]


def test_no_status_is_exchanged_in_later_calls_or_with_replicas_that_join_later() -> None:
    def work(rank: Rank) -> list[int]:
        args, counts = args_of(tis_batch_normalize=True), [0]
        for _ in range(2):
            call(rank, local_batch(rank), args)
            counts.append(rank.num_collectives)
        return [counts[1] - counts[0], counts[2] - counts[1]]

    assert run_ranks(work, dp_size=2) == [[2, 1], [2, 1]]
    replicas = SimpleNamespace(_replica_id=0)
    assert Groups.of_places(0, 2, "cp", 0, 2, replicas).started_together == ("cp",)


def said_on_ranks(keys: dict[str, Any], **settings: Any) -> list[str]:
    """What two data-parallel ranks warn about in two calls."""

    def work(rank: Rank) -> None:
        args = args_of(**keys)
        for _ in range(2):
            call(rank, local_batch(rank, **settings), args)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_ranks(work, dp_size=2) == [None, None]
    return [str(warning.message) for warning in caught if issubclass(warning.category, mis_ext.MismatchWarning)]


def test_doubts_are_voiced_by_the_first_rank_alone() -> None:
    (message,) = said_on_ranks({}, noise=1.0)
    assert "nats per token (limit: 0.3)" in message


def test_rejection_is_watched_by_the_first_rank_alone() -> None:
    (message,) = said_on_ranks({"use_rs": True, "rs_lower_bound": 0.999, "rs_upper_bound": 1.1})
    assert "of the tokens in a micro-batch were rejected" in message


def test_lengths_of_padding_count_for_padded_sequences_alone() -> None:
    def work(rank: Rank) -> torch.Tensor:
        batch = local_batch(rank)
        padded = {"parallel_state": rank.parallel_state, "max_seq_lens": [64] * 4}
        output = mis_ext.compute_mis_weights_with_cp(args_of(qkv_format="thd"), **batch, **padded)
        assert torch.equal(output[0], call(rank, batch, args_of(qkv_format="thd"))[0])
        with pytest.raises(ValueError, match="the lengths are"):
            mis_ext.compute_mis_weights_with_cp(args_of(qkv_format="bshd"), **batch, **padded)
        with pytest.raises(ValueError, match="bshd with context parallelism needs max_seq_lens"):
            call(rank, batch, args_of(qkv_format="bshd"))
        return output[0]

    assert all(isinstance(loss, torch.Tensor) for loss in run_ranks(work, cp_size=2))


def test_the_data_parallel_group_of_miles_spans_replicas() -> None:
    def axis(rank: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, size=size, group=object() if size > 1 else None)

    state = SimpleNamespace(cp=axis(0, 1), intra_dp=axis(1, 2), effective_dp=axis(5, 8))
    groups = find_groups(state)
    assert (groups.dp_rank, groups.dp_size, groups.dp_group) == (5, 8, state.effective_dp.group)
    for absent in ({}, {"effective_dp": None}):
        groups = find_groups(SimpleNamespace(cp=state.cp, intra_dp=state.intra_dp, **absent))
        assert (groups.dp_rank, groups.dp_size, groups.dp_group) == (1, 2, state.intra_dp.group)


def test_a_rank_that_nobody_needs_fails_alone() -> None:
    # No number of this configuration is over data-parallel ranks: they exchange nothing.
    def work(rank: Rank) -> tuple:
        batch = local_batch(rank)
        if rank.number == 1:
            batch["pg_loss"] = None
        args = args_of(mis_metrics=["mis_k3_kl"])
        call(rank, batch, args)
        output = call(rank, batch, args)
        # In the first call they hear that all of them could read their keys.
        assert rank.num_collectives == 1
        return output

    outcomes = run_ranks(work, dp_size=2)
    assert isinstance(outcomes[0], tuple)
    assert isinstance(outcomes[1], TypeError)


def test_a_guard_fires_in_a_later_call_on_all_ranks() -> None:
    def work(rank: Rank) -> tuple:
        args = args_of()
        for turn in range(8):
            batch = local_batch(rank, num_samples=1, length=12)
            if rank.number == 1:
                batch["rollout_log_probs"] = [batch["train_log_probs"][0].roll(1)]
            try:
                call(rank, batch, args)
            except (ValueError, RuntimeError) as error:
                return turn, type(error)
        return None

    # Eleven pairs a call: the sixth is the first that has seen enough.
    assert run_ranks(work, dp_size=2) == [(5, RankFailed), (5, ValueError)]


def test_an_error_of_a_rank_without_data_is_told() -> None:
    def work(rank: Rank) -> None:
        lengths = None if rank.number == 1 else []
        session = mis_ext.Session({"use_tis": True, "tis_batch_normalize": True})
        session.join_without_data(lengths, groups=rank.groups, device=torch.device("cpu"))

    assert_agreement(run_ranks(work, dp_size=2), 1, TypeError, "response_lengths must be a list of integers")


@layouts
def test_keys_of_a_rollout_that_one_rank_cannot_read_are_told(layout) -> None:
    cp_size, dp_size = layout

    def work(rank: Rank) -> None:
        prepare_rollout(args_of(**MISSPELLED if rank.number == 1 else {}), 0, local_batch(rank))

    assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), 1, ValueError, "tis_levle")


@layouts
@pytest.mark.parametrize("spoil", ["loss_masks", "rollout_mask_sums"])
def test_an_error_in_one_ranks_rollout_is_named_on_all_others(layout, spoil) -> None:
    def work(rank: Rank) -> None:
        data = {**local_batch(rank), "rollout_mask_sums": torch.full((4,), 40.0)}
        if rank.number == 0:
            data[spoil] = data[spoil][:-1]
        prepare_rollout(args_of(mis_denominator="kept"), 3, data)

    cp_size, dp_size = layout
    assert_agreement(run_ranks(work, cp_size=cp_size, dp_size=dp_size), 0, Exception, "rollout_mask_sums")


@for_each("name, value, message", [
    ("loss_masks", 3, "loss_masks must be a list of 1-D tensors, got int"),
    ("response_lengths", torch.ones(4), r"response_lengths\[0\] must be an integer"),
])  # fmt: skip
def test_a_wrong_type_in_one_ranks_rollout_is_named_on_all_others(name, value, message) -> None:
    def work(rank: Rank) -> None:
        data = {**local_batch(rank), "rollout_mask_sums": torch.full((4,), 40.0)}
        if rank.number == 0:
            data[name] = value
        prepare_rollout(args_of(mis_denominator="kept"), 3, data)

    assert_agreement(run_ranks(work, dp_size=2), 0, TypeError, message)


def test_the_first_error_of_a_rollout_is_raised_where_a_group_fails_too(monkeypatch) -> None:
    groups = Groups(dp_size=2, dp_group=types.SimpleNamespace(_replica_id=0, size=lambda: 2))
    monkeypatch.setattr("mis_ext.hosts.slime_miles.rollout.find_groups", lambda: groups)
    with pytest.raises(TypeError, match="loss_masks must be a list"):
        prepare_rollout(args_of(mis_denominator="kept"), 3, {"loss_masks": 3, "rollout_mask_sums": torch.ones(1)})


def test_a_shared_denominator_on_one_rank_is_refused_on_all() -> None:
    def work(rank: Rank) -> None:
        batch = local_batch(rank)
        sums = torch.full((4,), 40.0 if rank.dp_rank == 0 else 80.0)
        prepare_rollout(args_of(mis_denominator="kept"), 0, {**batch, "rollout_mask_sums": sums})

    outcomes = run_ranks(work, cp_size=2, dp_size=2)
    assert "failed on rank 2;" in str(outcomes[0])
    assert "failed on rank 3;" in str(outcomes[1])
    assert "several samples of this rollout share a denominator" in str(outcomes[2])


@pytest.mark.parametrize("empty", [{1}, {0, 1}], ids=["one rank", "all ranks"])
def test_zero_samples_are_a_legal_call(empty) -> None:
    keys = {"tis_batch_normalize": True, "use_rs": True, "mis_denominator": "kept", "mis_metrics": "all"}

    def work(rank: Rank) -> tuple:
        batch = without_samples() if rank.dp_rank in empty else local_batch(rank, num_samples=2, length=20)
        return call(rank, batch, args_of(**keys))

    alone = run_ranks(lambda rank: call(rank, local_batch(rank, num_samples=2, length=20), args_of(**keys)), cp_size=2)
    outcomes = run_ranks(work, cp_size=2, dp_size=2)
    for rank, outcome in enumerate(outcomes):
        loss, masks, metrics = outcome
        if rank // 2 in empty:
            assert loss.numel() == 0
            assert masks == []
            assert list(metrics) == list(alone[0][2])
            assert all(values.numel() == 0 for values in metrics.values())
        else:
            assert torch.equal(loss, alone[rank][0])
            for name, values in metrics.items():
                torch.testing.assert_close(values, alone[rank][2][name], rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("absent", [[], None], ids=["empty lists", "None"])
def test_a_rank_without_samples_needs_no_log_probs(absent) -> None:
    def work(rank: Rank) -> tuple:
        batch = without_samples() | {"train_log_probs": absent, "rollout_log_probs": absent}
        return call(rank, local_batch(rank) if rank.number == 0 else batch, args_of())

    assert [type(outcome) for outcome in run_ranks(work, dp_size=2)] == [tuple, tuple]


@pytest.mark.parametrize("empty", [{1}, {0, 1}], ids=["one rank", "all ranks"])
def test_zero_samples_are_a_legal_rollout(empty) -> None:
    def work(rank: Rank) -> tuple:
        args = args_of(mis_denominator="kept", tis_batch_normalize=True, use_rs=True)
        batch = without_samples() if rank.dp_rank in empty else local_batch(rank)
        data = {"log_probs": batch["train_log_probs"], **batch, "rollout_mask_sums": torch.full((4,), 40.0)}
        if rank.dp_rank in empty:
            data |= {"log_probs": None, "rollout_mask_sums": torch.empty(0)}
        prepare_rollout(args, 0, data)
        return call(rank, batch, args)[0]

    single = run_ranks(lambda rank: work(Rank(rank.number, rank.groups)), cp_size=2)
    outcomes = run_ranks(work, cp_size=2, dp_size=2)
    for rank, loss in enumerate(outcomes):
        assert isinstance(loss, torch.Tensor), loss
        if rank // 2 not in empty:
            assert torch.equal(loss, single[rank])


@pytest.mark.parametrize("keys", [{"mis_denominator": "kept"}, {"tis_batch_normalize": True}], ids=str)
def test_a_rank_without_log_probs_does_not_count(keys) -> None:
    keys = keys | {"use_rs": True, "rs_lower_bound": 0.98, "rs_upper_bound": 1.02, "mis_guard": "warn"}

    def work(rank: Rank) -> tuple:
        batch = local_batch(rank)
        if rank.dp_rank == 1:
            batch["rollout_log_probs"] = None
        return call(rank, batch, args_of(**keys))

    for cp_size in (1, 2):
        alone = run_ranks(lambda rank: call(rank, local_batch(rank), args_of(**keys)), cp_size=cp_size)
        outcomes = run_ranks(work, cp_size=cp_size, dp_size=2)
        for cp_rank in range(cp_size):
            assert torch.equal(outcomes[cp_rank][0], alone[cp_rank][0])
            assert 0.0 < torch.cat(outcomes[cp_rank][1]).mean() < 1.0
            loss, _, metrics = outcomes[cp_size + cp_rank]
            assert all(values.shape == loss.shape and values.isnan().any() for values in metrics.values())
