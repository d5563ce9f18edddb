# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the first call must catch, and doubts that it must voice."""

import argparse
import ast
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from flat_keys import keys_of
from hook_batches import call, make_batch

import mis_ext
from mis_ext import MismatchWarning
from mis_ext.hosts.session import session_for
from mis_ext.rollout import StaleWeightsWarning
from mis_ext.rollout.custom_generate.host import LogProbDefinitionWarning


def zeros(batch: dict) -> None:
    batch["rollout_log_probs"] = [torch.zeros_like(x) for x in batch["rollout_log_probs"]]


def constant(batch: dict) -> None:
    batch["rollout_log_probs"] = [torch.full_like(x, -1.0) for x in batch["rollout_log_probs"]]


def sentinel(batch: dict) -> None:
    batch["rollout_log_probs"][2][:] = -9999.0


def shifted_later(batch: dict) -> None:
    batch["rollout_log_probs"] = [x.roll(1) for x in batch["rollout_log_probs"]]


def shifted_earlier(batch: dict) -> None:
    batch["rollout_log_probs"] = [x.roll(-1) for x in batch["rollout_log_probs"]]


def missing_rollout(batch: dict) -> None:
    batch["rollout_log_probs"] = None


def empty_train(batch: dict) -> None:
    batch["train_log_probs"] = []


def nan_rollout(batch: dict) -> None:
    batch["rollout_log_probs"] = [torch.full_like(x, torch.nan) for x in batch["rollout_log_probs"]]


def infinite_train(batch: dict) -> None:
    batch["train_log_probs"] = [torch.full_like(x, -torch.inf) for x in batch["train_log_probs"]]


def nan_of_most(batch: dict) -> None:
    for x in batch["rollout_log_probs"][:3]:
        x[:] = torch.nan


def zeros_of_trainer(batch: dict) -> None:
    batch["train_log_probs"] = [torch.zeros_like(x) for x in batch["train_log_probs"]]


@pytest.mark.filterwarnings("error")
def test_half_of_the_log_probs_without_a_number_stop_nothing() -> None:
    batch = make_batch()
    for x in batch["rollout_log_probs"][:2]:
        x[:] = torch.nan
    call(batch, mis_max_reject_fraction=1.0)


MISTAKES = {
    "nan rollout": (nan_rollout, "missing_log_probs", "100.0% of the response tokens have a non-finite engine"),
    "infinite train": (infinite_train, "missing_log_probs", "non-finite trainer log-prob"),
    "zeros": (zeros, "degenerate_behavior", "Engine log-probs are placeholders: 160 of 160"),
    "constant": (constant, "degenerate_behavior", "Engine log-probs are placeholders: 160 of 160"),
    "sentinel": (sentinel, "degenerate_behavior", "placeholders: 40 of 160"),
    "shifted later": (shifted_later, "shifted_log_probs", "shifted by one token"),
    "shifted earlier": (shifted_earlier, "shifted_log_probs", "shifted by one token"),
    "most nan": (nan_of_most, "missing_log_probs", "75.0% of the response tokens"),
    "zeros of the trainer": (zeros_of_trainer, "degenerate_behavior", "Trainer log-probs are placeholders: 160"),
    "missing rollout": (missing_rollout, "missing_log_probs", "rollout_log_probs are missing"),
    "empty train": (empty_train, "missing_log_probs", "train_log_probs are missing"),
}


@pytest.mark.parametrize(("spoil", "guard", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_data_stops_the_first_call_or_warns(spoil, guard, message) -> None:
    batch = make_batch()
    spoil(batch)
    with pytest.raises(ValueError, match=f"{message}.*mis_guard: {{{guard}: warn}}"):
        call(batch)
    for setting in ({guard: "warn"}, "warn"):
        with pytest.warns(MismatchWarning, match=message):
            call(batch, mis_guard=setting)


def test_missing_log_probs_with_a_warning_pass_the_loss_through() -> None:
    batch = make_batch()
    missing_rollout(batch)
    loss, masks, metrics = call(batch, mis_guard="warn", mis_metrics="all")
    assert loss is batch["pg_loss"]
    assert masks is batch["loss_masks"]
    assert all(values.isnan().all() for values in (metrics["mis_kl"], metrics["mis_ess_ratio_token"]))


@pytest.mark.filterwarnings("error")
def test_measuring_alone_says_nothing_of_missing_log_probs() -> None:
    batch = make_batch()
    missing_rollout(batch)
    _, _, metrics = call(batch, use_tis=False, get_mismatch_metrics=True)
    assert all(values.isnan().all() for values in metrics.values())


def test_counting_the_mismatch_twice_stops_the_first_call() -> None:
    with pytest.raises(ValueError, match=r"use_tis with use_rollout_logprobs corrects the mismatch twice") as error:
        call(make_batch(), use_rollout_logprobs=True)
    assert len(str(error.value)) <= 240


def test_a_custom_loss_that_calls_the_hook_counts_the_mismatch_twice_too() -> None:
    args = argparse.Namespace(loss_type="custom_loss", use_rollout_logprobs=True)
    # As prepare_rollout does, which does not know the loss.
    session_for(args)
    with pytest.raises(ValueError, match="corrects the mismatch twice"):
        mis_ext.compute_mis_weights_with_cp(args, **make_batch())


def test_counting_the_mismatch_twice_can_be_a_warning() -> None:
    with pytest.warns(MismatchWarning, match="use_rollout_logprobs"):
        call(make_batch(), use_rollout_logprobs=True, mis_guard={"double_correction": "warn"})


@pytest.mark.filterwarnings("error")
def test_healthy_data_raises_and_warns_nothing() -> None:
    call(make_batch())
    call(make_batch(noise=0.2), tis_level="geometric", tis_batch_normalize=True)


@pytest.mark.filterwarnings("error")
def test_unrelated_log_probs_are_not_taken_for_shifted_ones() -> None:
    batch = make_batch(noise=0.0)
    batch["rollout_log_probs"] = [-torch.rand_like(x) * 0.1 for x in batch["train_log_probs"]]
    batch["train_log_probs"] = [-torch.rand_like(x) * 0.1 for x in batch["train_log_probs"]]
    call(batch)


@pytest.mark.filterwarnings("error")
def test_masked_tokens_do_not_trip_the_guards() -> None:
    batch = make_batch()
    for mask, rollout in zip(batch["loss_masks"], batch["rollout_log_probs"], strict=True):
        mask[:20], rollout[:20] = 0, -9999.0
    call(batch)


def test_a_mistake_that_was_corrected_stops_nothing_any_more() -> None:
    args, batch = argparse.Namespace(use_tis=True), make_batch()
    zeros(batch)
    with pytest.raises(ValueError, match="mis_guard"):
        mis_ext.compute_mis_weights_with_cp(args, **batch)
    mis_ext.compute_mis_weights_with_cp(args, **make_batch())
    mis_ext.compute_mis_weights_with_cp(args, **batch)  # Has seen enough.


def test_a_mistake_that_is_a_warning_is_said_once(recwarn) -> None:
    args, batch = argparse.Namespace(use_tis=True, mis_guard="warn"), make_batch(2, 10)  # Too few to have judged.
    zeros(batch)
    for _ in range(3):
        mis_ext.compute_mis_weights_with_cp(args, **batch)
    assert sum("placeholders" in str(warning.message) for warning in recwarn) == 1


def test_metrics_only_warns_about_mistakes_and_goes_on() -> None:
    batch = make_batch()
    zeros(batch)
    with pytest.warns(MismatchWarning, match="placeholders"):
        call(batch, use_tis=False, get_mismatch_metrics=True)


def test_a_large_mean_difference_warns() -> None:
    with pytest.warns(MismatchWarning, match=r"nats per token \(limit: 0\.3\).*mis-ext report"):
        call(make_batch(noise=1.0))


@pytest.mark.parametrize(("gap", "warns"), [(0.29, False), (0.31, True)])
def test_the_mean_difference_from_which_on_it_warns(gap: float, warns: bool) -> None:
    # As few tokens as it judges, below 0 on both sides.
    batch = make_batch(length=16, noise=0.3)
    trainer, engine = ([each - 3.0 for each in batch[name]] for name in ("train_log_probs", "rollout_log_probs"))
    batch["train_log_probs"] = trainer
    factor = gap / torch.cat([a - b for a, b in zip(trainer, engine, strict=True)]).abs().mean()
    batch["rollout_log_probs"] = [a - factor * (a - b) for a, b in zip(trainer, engine, strict=True)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(batch)
    assert any("nats per token (limit" in str(each.message) for each in said) is warns


@pytest.mark.filterwarnings("error")
def test_what_only_loses_its_weight_is_not_rejected() -> None:
    gate = {"statistic": "abs_log_ratio", "high": 0.005, "action": "zero"}
    args = argparse.Namespace(**keys_of(weight={}, gates=[gate], max_reject_fraction=0.0))
    batch = make_batch()
    for _ in range(3):
        loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(args, **batch)
    assert (loss == 0.0).float().mean() > 0.5
    assert torch.equal(torch.cat(masks), torch.ones(160))
    assert torch.equal(metrics["mis_kept_token_fraction"], torch.ones(160))
    assert torch.equal(metrics["mis_kept_seq_fraction"], torch.ones(160))


def test_rejecting_whole_sequences_counts_as_sequences_too() -> None:
    batch = make_batch()
    batch["loss_masks"][0][4:] = 0
    batch["rollout_log_probs"][0][3] += 20.0  # Vetoes 4 of 124 tokens, but one sequence in four.
    args = argparse.Namespace(use_tis=True, rs_veto_threshold=1e-4, mis_max_reject_fraction=0.2)
    with pytest.warns(MismatchWarning, match=r"25\.0% of the sequences"):
        mis_ext.compute_mis_weights_with_cp(args, **batch)


def test_a_session_leaves_args_as_they_were() -> None:
    # Megatron pickles args into every checkpoint.
    args = argparse.Namespace(use_tis=True)
    before = dict(vars(args))
    mis_ext.compute_mis_weights_with_cp(args, **make_batch())
    assert vars(args) == before
    assert pickle.loads(pickle.dumps(args)) == args


def test_every_warning_of_the_package_has_the_class_that_a_user_filters() -> None:
    assert issubclass(StaleWeightsWarning, MismatchWarning)
    assert issubclass(LogProbDefinitionWarning, MismatchWarning)
    legal, num_calls = ("MismatchWarning", "StaleWeightsWarning", "LogProbDefinitionWarning"), 0
    for path in Path(mis_ext.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                num_calls += 1
                assert [*map(ast.unparse, node.args[1:])] in ([name] for name in legal), path
    assert num_calls >= 9
