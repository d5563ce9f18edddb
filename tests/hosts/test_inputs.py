# SPDX-License-Identifier: Apache-2.0
"""Inputs that do not fit: errors that name what is wrong."""

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hook_batches import call, make_batch

import mis_ext
from mis_ext.correction import collectives
from mis_ext.correction.collectives import gather_rows
from mis_ext.hosts.packing import MASK
from mis_ext.tools.report.part import Part


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
def test_samples_of_another_length_are_refused_even_if_the_total_fits(name) -> None:
    batch = make_batch(2, 10)
    batch[name] = [torch.cat(batch[name])[:9], torch.cat(batch[name])[9:]]
    with pytest.raises(ValueError, match=rf"{name} has samples of \[9, 11\] tokens on this rank.*\[10, 10\]"):
        call(batch)


SAMPLES = {
    "None": (lambda x: None, TypeError, r"\[1\] must be a 1-D tensor, got NoneType"),
    "a list": (lambda x: x.tolist(), TypeError, r"\[1\] must be a 1-D tensor, got list"),
    "an array": (lambda x: x.numpy(), TypeError, r"\[1\] must be a 1-D tensor, got ndarray"),
    "a column": (lambda x: x[:, None], ValueError, r"\[1\] must be a 1-D tensor, got shape \[10, 1\]"),
    "a number": (lambda x: x[0], ValueError, r"\[1\] must be a 1-D tensor, got shape \[\]"),
    "elsewhere": (lambda x: x.to("meta"), ValueError, r"\[1\] is on meta, .*\[0\] is on cpu"),
}


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
@pytest.mark.parametrize(("change", "kind", "message"), SAMPLES.values(), ids=SAMPLES)
def test_a_sample_that_is_no_flat_tensor_is_named(change, kind, message, name) -> None:
    batch = make_batch(3, 10)
    batch[name][1] = change(batch[name][1])
    with pytest.raises(kind, match=name + message):
        call(batch)
    streams = {key: batch[key] for key in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    with pytest.raises(kind, match=name + message):
        mis_ext.compute_mis_weights(mis_ext.CorrectionConfig(), **streams)


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
def test_columns_for_all_samples_are_refused(name) -> None:
    batch = make_batch(3, 10)
    batch[name] = [sample[:, None] for sample in batch[name]]
    with pytest.raises(ValueError, match=rf"{name}\[0\] must be a 1-D tensor, got shape \[10, 1\]"):
        call(batch)


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
@pytest.mark.parametrize(
    ("value", "message"), [(7, "must be a list of 1-D tensors, got int"), (torch.ones(20), r"\[0\]")]
)
def test_what_is_no_list_of_samples_is_named(name, value, message) -> None:
    with pytest.raises((TypeError, ValueError), match=name + ".*" + message):
        call(make_batch(2, 10) | {name: value})


def test_samples_may_be_the_rows_of_a_tensor() -> None:
    batch = make_batch(2, 10)
    rows = {name: torch.stack(batch[name]) for name in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    assert torch.equal(call(batch | rows)[0], call(batch)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], r"pg_loss has shape \[19\] on context-parallel rank 0 of 1, but the lengths are \[20\]"),
        (lambda x: x[:, None], r"pg_loss has shape \[20, 1\]"),
        (lambda x: x[0], r"pg_loss has shape \[\]"),
        (lambda x: None, "pg_loss must be a 1-D tensor, got NoneType"),
        (lambda x: x.tolist(), "pg_loss must be a 1-D tensor, got list"),
    ],
    ids=["short", "column", "number", "None", "list"],
)
def test_a_loss_of_another_shape_is_refused(change, message) -> None:
    batch = make_batch(2, 10)
    batch["pg_loss"] = change(batch["pg_loss"])
    with pytest.raises((TypeError, ValueError), match=message):
        call(batch)


PART = mis_ext.PackedLayout.context_parallel([4], total_lengths=[8], cp_rank=0, cp_size=2)
GROUP_OF_ONE, GROUP_OF_TWO = (SimpleNamespace(_replica_id=0, size=lambda size=size: size) for size in (1, 2))


@pytest.mark.parametrize(
    ("layout", "cp_group", "message"),
    [
        (mis_ext.PackedLayout.whole([4]), GROUP_OF_TWO, "PackedLayout.whole needs one rank, but cp_group has 2"),
        (PART, None, "PackedLayout.context_parallel needs several ranks, but cp_group has 1"),
        (PART, GROUP_OF_ONE, "PackedLayout.context_parallel needs several ranks, but cp_group has 1"),
    ],
)
def test_a_layout_of_other_ranks_than_the_groups_is_refused(layout, cp_group, message) -> None:
    log_probs_T = torch.zeros(layout.num_local_tokens)
    streams = {"proximal_logprobs_T": log_probs_T, "behavior_logprobs_T": log_probs_T, "response_mask_R": torch.ones(4)}
    with pytest.raises(ValueError, match=message):
        mis_ext.compute_correction(**streams, layout=layout, config=mis_ext.CorrectionConfig(), cp_group=cp_group)


def test_context_parallelism_needs_a_prompt_token() -> None:
    with pytest.raises(ValueError, match="needs a prompt token before every response"):
        mis_ext.PackedLayout.context_parallel([4, 4], total_lengths=[6, 4], cp_rank=0, cp_size=2)


def test_context_parallelism_needs_a_total_length_for_every_response() -> None:
    with pytest.raises(ValueError, match="3 response_lengths, but 2 total_lengths and 2 padded_lengths"):
        mis_ext.PackedLayout.context_parallel([4, 4, 4], total_lengths=[6, 6], cp_rank=0, cp_size=2)


@pytest.mark.parametrize(("cp_rank", "cp_size"), [(0, 1), (0, 2), (1, 2)])
def test_a_padded_length_covers_the_sequence_on_every_rank(cp_rank, cp_size) -> None:
    given = {"total_lengths": [7, 4], "cp_rank": cp_rank, "cp_size": cp_size}
    mis_ext.PackedLayout.context_parallel([4, 2], padded_lengths=[7, 4], **given)
    with pytest.raises(ValueError, match=r"padded_lengths\[0\] must be at least 7, its total length, got 6"):
        mis_ext.PackedLayout.context_parallel([4, 2], padded_lengths=[6, 4], **given)


def test_an_empty_micro_batch_comes_back_empty() -> None:
    empty = {"train_log_probs": [torch.empty(0)], "rollout_log_probs": [torch.empty(0)], "loss_masks": [torch.empty(0)]}
    batch = {"pg_loss": torch.empty(0), **empty, "total_lengths": [3], "response_lengths": [0]}
    loss, masks, metrics = call(batch, tis_batch_normalize=True)
    assert loss.numel() == 0
    assert [mask.numel() for mask in masks] == [0]
    assert all(values.numel() == 0 for values in metrics.values())


class FailingGroup:
    """A fault-tolerant group whose peer is gone: the work it returns reports a failure instead of raising."""

    _replica_id, _rank = 0, 0

    def size(self) -> int:
        return 2

    def fail(self, *_: object) -> argparse.Namespace:
        return argparse.Namespace(wait=lambda: False)

    allgather = fail


def test_a_lost_peer_of_a_fault_tolerant_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a peer is unavailable"):
        gather_rows(torch.ones(3), FailingGroup())
    with pytest.raises(TypeError, match=r"needs a torch.distributed process group, got a FailingGroup"):
        collectives.gather_objects("a report", FailingGroup())


def test_a_context_parallel_group_of_one_rank_is_not_asked() -> None:
    class Alone(FailingGroup):
        def size(self) -> int:
            return 1

    row, layout = torch.zeros(2), mis_ext.PackedLayout.whole([2])
    streams = {"proximal_logprobs_T": row, "behavior_logprobs_T": row, "response_mask_R": row + 1.0, "layout": layout}
    found = mis_ext.compute_correction(**streams, config=mis_ext.CorrectionConfig(), cp_group=Alone())
    assert found.weights_T.tolist() == [1.0, 1.0]


def test_a_rank_that_fails_in_a_collective_tells_the_others_in_the_same_one(monkeypatch) -> None:
    sent = []

    def gather(row, _group):
        sent.append(row.tolist())
        raise MemoryError if len(sent) == 1 else RuntimeError

    monkeypatch.setattr(collectives, "gather_rows", gather)
    due = collectives.Due([collectives.Message((2,), torch.float64, "a group")], torch.device("cpu"))
    with pytest.raises(MemoryError), due.reporting_errors():
        due.gather(torch.zeros(2, dtype=torch.float64))
    assert sent == [[0.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 9])
def test_bits_of_tokens_come_back_from_a_message_of_the_size_that_is_due(num_tokens, monkeypatch) -> None:
    sent = []

    def gather(row, _group):
        sent.append((*row.shape,))
        return torch.stack([row, torch.zeros_like(row)])

    monkeypatch.setattr(collectives, "gather_rows", gather)
    message = collectives.bits_message(num_tokens, "a group")
    flags_R, status_1 = torch.arange(num_tokens) % 3 == 0, torch.tensor([2.0], dtype=torch.float64)
    found_R, found_1 = collectives.Due([message], torch.device("cpu")).gather_bits(flags_R, status_1)
    assert torch.equal(found_R, flags_R)
    assert torch.equal(found_1, status_1)
    assert sent == [message.shape]


ILLEGAL = {"-1": -1.0, "nan": torch.nan, "inf": torch.inf}


def masked_calls(mask: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Everything that takes a mask of one response of ten tokens, in its first call."""
    batch = make_batch(1, 10) | {"loss_masks": [mask]}
    streams = {key: batch[key] for key in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    behavior, proximal = batch["rollout_log_probs"], batch["train_log_probs"]
    padded = {"behavior_logprobs": behavior[0][None], "response_mask": mask[None]}
    loss = padded | {"current_logprobs": proximal[0][None], "advantages": torch.ones(1)}
    config = mis_ext.CorrectionConfig()
    layout, keys = mis_ext.PackedLayout.whole([10]), argparse.Namespace
    packed = mis_ext.PackedStreams(proximal[0], behavior[0], mask, layout)
    rollout = batch | {"log_probs": proximal, "advantages": [torch.zeros(10)]}
    rollout |= {"rewards": [0.0], "sample_indices": [0], "rollout_ids": [0]}
    rollout_args = keys(use_tis=True, mis_group_over="kept", n_samples_per_prompt=1)
    logits = torch.randn(1, 15, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    whole = batch | {"unconcat_tokens": [torch.arange(15)], "advantages": [torch.ones(10)], "log_probs": proximal}
    return {
        "hook": lambda: call(batch),
        "hook that measures": lambda: call(batch, use_tis=False, get_mismatch_metrics=True),
        "compute_mis_weights": lambda: mis_ext.compute_mis_weights(config, **streams),
        "correct_padded": lambda: mis_ext.correct_padded(config, proximal_logprobs=proximal[0][None], **padded),
        "correct_padded, session": lambda: mis_ext.correct_padded(
            mis_ext.Session(config), proximal_logprobs=proximal[0][None], **padded
        ),
        "Session.correct": lambda: mis_ext.Session(config).correct(packed),
        "policy_loss_from_log_probs": lambda: mis_ext.policy_loss_from_log_probs(keys(), **loss),
        "policy_loss_from_log_probs, corrected": lambda: mis_ext.policy_loss_from_log_probs(keys(use_tis=True), **loss),
        "policy_loss_from_log_probs, packed": lambda: mis_ext.policy_loss_from_log_probs(
            keys(), current_logprobs=proximal[0], advantages=torch.ones(10), response_mask=mask, layout=layout
        ),
        "policy_loss": lambda: mis_ext.policy_loss(keys(loss_type="custom_loss"), whole, logits),
        "make_loss_func": lambda: mis_ext.make_loss_func(keys(), whole)(logits),
        "prepare_rollout": lambda: mis_ext.prepare_rollout(rollout_args, 0, rollout),
        "report": lambda: Part.of_lists(proximal=proximal, behavior=behavior, masks=[mask]),
    }


@pytest.mark.filterwarnings("ignore::mis_ext.MismatchWarning")
@pytest.mark.parametrize("value", ILLEGAL.values(), ids=ILLEGAL)
@pytest.mark.parametrize("entry", masked_calls(torch.ones(10)))
def test_a_mask_that_says_neither_yes_nor_no_is_refused_wherever_one_is_taken(entry, value) -> None:
    mask = torch.ones(10)
    for legal in (mask, mask.bool(), mask.int(), mask * 0.25, mask * 2.0, mask * 0.0):
        masked_calls(legal)[entry]()
    mask[3] = value
    with pytest.raises(ValueError, match=r"the response mask \(loss_masks\) has values from -?[\w.]+ to [\w.]+: each"):
        masked_calls(mask)[entry]()
    if value < 0:
        with pytest.raises(ValueError, match="has values from -1 to 1: each"):
            masked_calls(mask.int())[entry]()


def test_a_mask_is_looked_at_again() -> None:
    session, good = mis_ext.Session(mis_ext.CorrectionConfig()), torch.ones(3)
    for _ in range(8):
        session.check_range(good, MASK)
    with pytest.raises(ValueError, match="has values from -1 to -1"):
        session.check_range(-good, MASK)
    session.check_range(good, MASK)
