# SPDX-License-Identifier: Apache-2.0
"""From versions in a rollout to lags in the hook: what the trainer counts, what it cannot know, and who is told."""

import argparse
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hook_batches import make_batch

import mis_ext
from mis_ext import prepare_rollout

KEYS = {"use_tis": True, "mis_staleness": True, "tis_when": "stale", "rs_max_staleness": 1, "mis_metrics": "all"}
VERSION = 7
SAMPLES = ("train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")


class Trainer:
    """Calls the function at ``--rollout-data-postprocess-path`` as the trainers of both hosts do."""

    def __init__(self, args: argparse.Namespace, *, version: object = VERSION) -> None:
        self.args, self.weight_updater = args, SimpleNamespace(weight_version=version)

    def train(self, data: dict[str, Any], *, is_miles: bool) -> None:
        rollout_data = {"of": "another frame"}
        self.train_actor(data, is_miles=is_miles)
        assert rollout_data == {"of": "another frame"}

    def train_actor(self, rollout_data: dict[str, Any], *, is_miles: bool = False) -> None:
        if is_miles:
            prepare_rollout(self.args)
        else:
            prepare_rollout(self.args, 0, rollout_data)


def rollout(*, noise: float = 0.3) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
    """A batch, the lags of its tokens, and the rollout that a host holds of it."""
    batch = make_batch(noise=noise)
    generator = torch.Generator().manual_seed(1)
    lags = [torch.randint(0, 4, each.shape, generator=generator).float() for each in batch["rollout_log_probs"]]
    lags[2][5:9] = torch.nan
    data = {"log_probs": batch["train_log_probs"], "teacher_log_probs": [VERSION - lag for lag in lags], **batch}
    return batch, lags, data


def micro_batch(batch: dict[str, Any], chosen: list[int]) -> dict[str, Any]:
    return {name: [batch[name][index] for index in chosen] for name in SAMPLES} | {
        "pg_loss": torch.ones(40 * len(chosen))
    }


@pytest.mark.parametrize("is_miles", [False, True], ids=["slime", "miles"])
def test_the_hook_finds_the_lag_of_each_token_in_any_micro_batch(is_miles) -> None:
    args = argparse.Namespace(**KEYS)
    batch, lags, data = rollout()
    Trainer(args).train(data, is_miles=is_miles)
    # It is nobody's log-prob, and the host would log it.
    assert "teacher_log_probs" not in data
    for chosen in ([3, 0], [2], [1], [0, 1, 2, 3]):
        part = micro_batch(batch, chosen)
        if is_miles:
            # Miles gives its hook other tensors of the same memory.
            part["rollout_log_probs"] = [each.detach() for each in part["rollout_log_probs"]]
        loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(args, **part)
        weights, keeps, values = mis_ext.compute_mis_weights(
            mis_ext.config_from_mapping(KEYS),
            **{name: part[name] for name in SAMPLES[:3]},
            lags=[lags[index] for index in chosen],
        )
        assert torch.equal(loss, torch.cat(weights))
        assert torch.equal(torch.cat(masks), torch.cat(keeps))
        # Of samples of one length the host's mean over tokens is the mean of all that were measured.
        assert metrics["mis_lag_max"].unique() == values["mis_lag_max"] == 3.0
        lag_T = torch.cat([lags[index] for index in chosen])
        is_old_T = ~(lag_T <= 1.0)
        assert torch.equal(torch.cat(masks) == 0, is_old_T)
        assert torch.equal(loss[lag_T == 0.0], torch.ones(int((lag_T == 0.0).sum())))


def test_the_whole_loss_has_the_same_correction_from_lags_of_its_own() -> None:
    keys = KEYS | {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"}
    batch, lags, _ = rollout()
    proximal, behavior = (torch.stack(batch[name]) for name in SAMPLES[:2])
    found = mis_ext.policy_loss_from_log_probs(
        keys,
        current_logprobs=proximal.clone().requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=torch.ones(4),
        response_mask=torch.ones_like(proximal),
        lag=torch.stack(lags),
    )
    padded = mis_ext.correct_padded(
        KEYS,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        response_mask=torch.ones_like(proximal),
        lag=torch.stack(lags),
    )
    kept_weights = torch.where(padded.keep_mask, padded.weights, 0.0)
    torch.testing.assert_close(found.mean, -kept_weights.mean(), rtol=1e-6, atol=0.0)


def test_tokens_of_a_later_version_than_the_trainers_have_an_unknown_lag() -> None:
    args = argparse.Namespace(**KEYS)
    batch, _, data = rollout()
    # As after a restart, where the count began anew.
    Trainer(args, version=0).train_actor(data)
    _, masks, metrics = mis_ext.compute_mis_weights_with_cp(args, **batch)
    assert torch.cat(masks).sum() == 0
    assert metrics["mis_unknown_lag_token_fraction"].unique() == 1.0
    assert metrics["mis_lag_mean"].isnan().all()


def test_a_rank_without_samples_has_no_lags_and_no_error() -> None:
    args = argparse.Namespace(use_tis=True, mis_staleness=True)
    names = ("log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "teacher_log_probs")
    Trainer(args).train_actor({name: [] for name in names})
    batch = {"train_log_probs": [], **{name: [] for name in names[1:5]}}
    loss_T, _, _ = mis_ext.compute_mis_weights_with_cp(args, pg_loss=torch.zeros(0), **batch)
    assert loss_T.shape == (0,)


def test_who_gives_no_lags_is_named_in_the_loss_where_other_ranks_hear_of_it(capfd) -> None:
    batch, _, data = rollout()

    def message(prepare) -> str:
        args = argparse.Namespace(**KEYS)
        prepare(args)
        with pytest.raises(ValueError, match="mis_staleness") as found:
            mis_ext.compute_mis_weights_with_cp(args, **batch)
        return str(found.value)

    assert "mis_ext.prepare_rollout" in message(lambda args: None)
    assert "no weight_updater with a weight_version" in message(lambda args: prepare_rollout(args, 0, data))
    without = {name: value for name, value in data.items() if name != "teacher_log_probs"}
    assert "mis_ext.rollout.generate" in message(lambda args: Trainer(args).train_actor(without))
    broken = data | {"teacher_log_probs": [*data["teacher_log_probs"][:-1], None]}
    assert "the versions of this rollout: AttributeError" in message(lambda args: Trainer(args).train_actor(broken))
    assert "in _token_lags" in capfd.readouterr().err

    def copied(args: argparse.Namespace) -> None:
        others = [each.clone() for each in batch["rollout_log_probs"]]
        Trainer(args).train_actor(rollout()[2] | {"rollout_log_probs": others})
        copied.held = others

    assert "copied its rollout_log_probs" in message(copied)


def test_lags_that_are_missing_have_the_name_of_the_callers_argument() -> None:
    row = torch.zeros(1, 2)
    padded = {"proximal_logprobs": row, "behavior_logprobs": row, "response_mask": row + 1.0}
    lists = {"train_log_probs": [row[0]], "rollout_log_probs": [row[0]], "loss_masks": [row[0] + 1.0]}
    streams = mis_ext.PackedStreams(row[0], row[0], row[0] + 1.0, mis_ext.PackedLayout.whole([2]))
    none = mis_ext.PackedStreams(*[torch.zeros(0)] * 3, mis_ext.PackedLayout.whole([]))
    calls = {
        "lag": [
            partial(mis_ext.correct_padded, KEYS, **padded),
            partial(mis_ext.policy_loss_from_log_probs, KEYS, **padded, current_logprobs=row, advantages=torch.ones(1)),
        ],
        "lags": [partial(mis_ext.compute_mis_weights, KEYS, **lists)],
        "lag_T": [partial(mis_ext.Session(KEYS).correct, each) for each in (streams, none)],
    }
    for name, each in ((name, each) for name, of_name in calls.items() for each in of_name):
        with pytest.raises(ValueError, match=rf"need the lags of the tokens: .*\b{name}\b"):
            each()


def test_a_function_without_lags_names_one_that_has_them() -> None:
    batch, _, _ = rollout()
    with pytest.raises(ValueError, match="call policy_loss_from_log_probs, which has the argument lag"):
        mis_ext.compute_mis_weights_with_cp(argparse.Namespace(**KEYS), **batch)


def test_a_micro_batch_without_samples_needs_no_lag() -> None:
    args = argparse.Namespace(**KEYS)
    Trainer(args).train_actor(rollout()[2])
    loss, masks, _ = mis_ext.compute_mis_weights_with_cp(args, **micro_batch(make_batch(), []))
    assert (len(loss), masks) == (0, [])


def test_a_call_that_corrects_nothing_needs_no_lag() -> None:
    batch, _, data = rollout()
    sums = [mask.sum() for mask in data["loss_masks"]]
    Trainer(argparse.Namespace(**KEYS, mis_denominator="kept")).train_actor(data | {"rollout_mask_sums": sums})
    for keys in ({**KEYS, "mis_guard": "warn"}, {"get_mismatch_metrics": True, "mis_staleness": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mis_ext.MismatchWarning)
            found = mis_ext.compute_mis_weights_with_cp(
                argparse.Namespace(**keys), **batch | {"rollout_log_probs": None}
            )
        assert torch.equal(found[0], batch["pg_loss"])


START = {"custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp", "rank": 0, **KEYS}
READY = {
    "rollout_data_postprocess_path": "mis_ext.prepare_rollout",
    "custom_generate_function_path": "mis_ext.rollout.generate",
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_data_postprocess_path": None}, "needs --rollout-data-postprocess-path mis_ext.prepare_rollout"),
        ({"custom_generate_function_path": None}, "needs --custom-generate-function-path mis_ext.rollout.generate"),
        ({"use_opd": True}, "use_opd use the same field, teacher_log_probs"),
    ],
)
def test_what_is_missing_is_said_at_start(keys, message, capsys) -> None:
    with pytest.raises(ValueError, match=message):
        mis_ext.check_setup(argparse.Namespace(**START | READY | keys))
    mis_ext.check_setup(argparse.Namespace(**START | READY))
    assert "lag_t <= 1" in capsys.readouterr().out
