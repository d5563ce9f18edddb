# SPDX-License-Identifier: Apache-2.0
"""`mis_loss_proximal: current`: one function scores, the ratio is exactly 1, and the host may skip its pass."""

import argparse
import warnings

import loss_cases
import pytest
import torch
from host_stand_ins import HOSTS, called, running
from loss_cases import GATES, HOOK, KL, SEQUENCES

import mis_ext
from mis_ext.hosts.session import current_run, session_for

CURRENT = {"mis_loss_proximal": "current"}
SKIPS = CURRENT | {"use_rollout_logprobs": True}
STRICT = {"mis_guard": "error"}
METHOD = {"mis_loss_method": "decoupled_token_tis", "eps_clip": 0.2, "eps_clip_high": None}
OPTIONS = {
    "ppo": {},
    "gates, entropy, kl": GATES | KL | {"kl_loss_type": "k3", "entropy_coef": 0.1},
    "sequences, gspo": SEQUENCES | {"advantage_estimator": "gspo"},
    "unbiased k3": KL | {"kl_loss_type": "k3", "use_unbiased_kl": True},
    "decoupled": HOOK | {"mis_loss_mode": "decoupled"},
    "a method": METHOD,
}


def local(**more) -> dict:
    return loss_cases.local_batch(loss_cases.whole_batch()) | more


def assert_equal(found: tuple, wanted: tuple) -> None:
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[2], wanted[2])
    assert [*found[1]] == [*wanted[1]]
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_loss_of_a_host_that_has_scored_nothing(name) -> None:
    keys = OPTIONS[name]
    wanted = called(keys, local(log_probs=None))
    with pytest.warns(mis_ext.MismatchWarning, match="mis_loss_proximal: current does not use .*set --use"):
        assert_equal(called(keys | CURRENT, local()), wanted)
    # What is stored says something else, and is not looked at.
    assert not torch.equal(called(keys, local())[2], wanted[2])


@pytest.mark.parametrize("name", OPTIONS)
def test_with_the_flag_that_skips_the_pass_the_behavior_policy_is_not_the_old_one(name) -> None:
    keys = OPTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = called(keys | SKIPS, local(log_probs=None))
    assert_equal(found, called(keys, local(log_probs=None)))


def test_without_the_key_that_flag_makes_the_behavior_policy_the_old_one() -> None:
    ours, theirs = called(SKIPS, local(log_probs=None)), called({"use_rollout_logprobs": True}, local(log_probs=None))
    assert float(ours[1]["ppo_kl"]) == 0.0 != float(theirs[1]["ppo_kl"])


@pytest.mark.parametrize("by", ["fused", "host"])
@pytest.mark.parametrize("host", HOSTS)
def test_the_ratio_is_exactly_one_whoever_scores(host, by) -> None:
    with running(host):
        _, metrics, gradient = called(SKIPS | HOOK | {"mis_loss_scoring": by}, local(log_probs=None))
    assert float(metrics["ppo_kl"]) == float(metrics["pg_clipfrac"]) == 0.0
    assert float(metrics["train_rollout_logprob_abs_diff"]) > 0.1
    assert gradient.any()


def test_the_correction_weighs_the_current_policy_against_the_behavior_policy() -> None:
    """Nothing is counted twice, so nothing is reported; the weight is that of the formula."""
    keys = SKIPS | STRICT | {"use_tis": True, "tis_upper_bound": 1.15, "mis_max_reject_fraction": 1.0}
    batch = local(log_probs=None)
    _, _, gradient = called(keys, dict(batch))
    logits = batch["logits"].clone().requires_grad_()
    begin, total = 0, torch.zeros(())
    for i, (prompt, response) in enumerate(loss_cases.LENGTHS):
        rows = logits[0, begin + prompt - 1 : begin + prompt + response - 1].log_softmax(-1)
        current = rows.gather(-1, batch["unconcat_tokens"][i][prompt:, None])[:, 0]
        weight = (current - batch["rollout_log_probs"][i]).exp().clamp_max(1.15).detach()
        loss = -(weight * batch["advantages"][i] * (current - current.detach()).exp()) * batch["loss_masks"][i]
        total = total + loss.sum() / batch["rollout_mask_sums"][i].clamp_min(1.0)
        begin += prompt + response
    total.backward()
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-7)


def test_the_hook_of_whole_rollouts_counts_nothing_twice_either() -> None:
    flags = {"use_tis": True, "use_rollout_logprobs": True, "loss_type": "custom_loss"}
    for keys in (CURRENT, {"mis_loss_mode": "bypass"}):
        session_for(argparse.Namespace(**flags, **keys))
        current_run(argparse.Namespace(**flags, **keys), whole_loss=True)
    with pytest.raises(ValueError, match="corrects the mismatch twice"):
        session_for(argparse.Namespace(**flags))


def test_a_pass_that_is_skipped_or_not_there_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        called(SKIPS, local())
        called(CURRENT, local(log_probs=None))
        called(CURRENT | {"skip_actor_forward_only": True}, local())


def test_a_loss_from_log_probs_takes_the_current_ones_too() -> None:
    given = {
        "current_logprobs": torch.tensor([[-1.0, -2.0]]),
        "advantages": torch.tensor([[1.0, -1.0]]),
        "response_mask": torch.ones(1, 2),
    }
    stored = given | {"proximal_logprobs": torch.tensor([[-1.5, -1.0]])}
    found = mis_ext.policy_loss_from_log_probs(CURRENT, **stored)
    assert torch.equal(found.total, mis_ext.policy_loss_from_log_probs({}, **given).total)
    assert not torch.equal(found.total, mis_ext.policy_loss_from_log_probs({}, **stored).total)


# --- where it makes no sense


REFUSED = [
    ({"mis_loss_proximal": "new"}, "mis_loss_proximal must be one of stored | current, got 'new'"),
    (
        CURRENT | {"mis_loss_mode": "bypass"},
        "proximal='current': no effect, because mis_loss_mode: bypass does",
    ),
    (
        SKIPS | HOOK | {"mis_loss_mode": "reinforce"},
        "proximal='current': no effect, because mis_loss_mode: reinforce",
    ),
    (CURRENT | METHOD | {"mis_loss_method": "dppo_tv"}, "no effect, because mis_loss_method: dppo_tv does not compare"),
    (CURRENT | {"use_opsm": True}, "--use-opsm with mis_loss_proximal: current compares"),
    (
        CURRENT | {"loss_type": "policy_loss"},
        "mis_loss_proximal='current': no effect, because --loss-type is policy_loss",
    ),
    (CURRENT | {"num_steps_per_rollout": 2}, "mis_loss_proximal: current with 2 optimizer steps per rollout"),
    (
        CURRENT | {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64},
        "mis_loss_proximal: current with 4 optimizer steps per rollout",
    ),
    (METHOD | {"use_rollout_logprobs": True}, "drop the flag, or with one .* use mis_loss_proximal: current"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_where_it_makes_no_sense_it_is_refused_by_name(keys, message) -> None:
    with pytest.raises(ValueError, match=message.replace(" | ", r" \| ")):
        called(keys, local())


@pytest.mark.parametrize(
    "flags",
    [
        {"num_steps_per_rollout": 1},
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 256},
        # Then Miles makes the batch as large as the rollout.
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64}
        | {"use_dynamic_global_batch_size": True},
        {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": None},
    ],
)
def test_one_step_per_rollout_or_an_unknown_number_is_legal(flags) -> None:
    current_run(loss_cases.host_args(**SKIPS | flags), whole_loss=True)


def test_stored_is_legal_with_any_number_of_steps() -> None:
    current_run(loss_cases.host_args(mis_loss_proximal="stored", num_steps_per_rollout=4), whole_loss=True)
