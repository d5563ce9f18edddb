# SPDX-License-Identifier: Apache-2.0
"""Who turns logits into log-probs: the keys, the flags of the hosts that keep their function, and what is refused."""

import loss_cases
import pytest
import torch
from host_stand_ins import HOSTS, called, running

import mis_ext
from mis_ext.hosts.session import current_run
from mis_ext.keys.rows import DEFAULT_SCORING
from mis_ext.loss.policy import MILES_METRICS

KEPT = [
    ({"true_on_policy_mode": True}, "--true-on-policy-mode: Miles' own function is bitwise equal to SGLang's"),
    ({"allgather_cp": True}, "--allgather-cp: only the framework's function handles and exchanges"),
    ({"allgather_cp": True, "context_parallel_size": 2}, "--allgather-cp: "),
]
QUOTIENTS = {"train_backend": "fsdp", "rollout_temperature": 0.7}


def who(keys: dict) -> str:
    return current_run(loss_cases.host_args(**keys), whole_loss=True).config.whole_loss.scoring


def test_fused_is_the_default_and_a_key_chooses() -> None:
    assert who({}) == DEFAULT_SCORING == "fused"
    for by in ("fused", "host"):
        assert who({"mis_loss_scoring": by}) == by
    # Without other ranks their parts are nobody's.
    assert who({"allgather_cp": True, "context_parallel_size": 1}) == "fused"


@pytest.mark.parametrize(("flags", "reason"), KEPT)
def test_the_hosts_function_is_kept_where_only_it_gives_its_numbers(flags, reason) -> None:
    assert who(flags) == who(flags | {"mis_loss_scoring": "host"}) == "host"
    with pytest.raises(ValueError, match=f"mis_loss_scoring: fused with {reason}.*; use mis_loss_scoring: host"):
        who(flags | {"mis_loss_scoring": "fused"})
    with pytest.raises(ValueError, match=f"mis_loss_inplace=True: no effect, because the framework's .* \\({reason}"):
        who(flags | {"mis_loss_inplace": True})
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    for host in HOSTS:
        with running(host) as asked:
            called(flags, dict(batch))
            assert len(asked.scored) == 1


def test_where_miles_rounds_what_is_stored_its_function_is_kept_unless_nobody_compares() -> None:
    assert who(QUOTIENTS) == "host"
    assert who(QUOTIENTS | {"mis_loss_scoring": "fused"}) == "fused"
    assert who(QUOTIENTS | {"mis_loss_proximal": "current"}) == "fused"
    assert who(QUOTIENTS | {"mis_loss_mode": "bypass"}) == "fused"
    for other in ({"train_backend": "megatron"}, {"rollout_temperature": 1.0}, {"rollout_temperature": 0.0}):
        assert who(QUOTIENTS | other) == "fused"


REFUSED = [
    ({"mis_loss_scoring": "fuse"}, "mis_loss_scoring must be one of fused | host, got 'fuse' .did you mean 'fused'"),
    ({"mis_loss_scoring": True}, "mis_loss_scoring must be one of fused | host, got True"),
    ({"mis_loss_inplace": "true"}, "mis_loss_inplace must be true or false, got 'true' .remove the quotes"),
    (
        {"mis_loss_inplace": True, "mis_loss_scoring": "host"},
        "the framework's function scores .mis_loss_scoring: host.; rem",
    ),
    ({"mis_loss_scoring": "host"}, "mis_loss_scoring: host requires slime or Miles"),
    (
        {"mis_loss_scoring": "fused", "loss_type": "policy_loss"},
        "mis_loss_scoring='fused': no effect, because --loss-type",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_has_no_effect_is_refused_by_name(keys, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message.replace(" | ", r" \| ")):
        called(keys, loss_cases.local_batch(loss_cases.whole_batch()))


def test_outside_of_a_host_the_function_of_none_can_be_asked_for() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    logits = batch.pop("logits")
    loss_func = mis_ext.make_loss_func(loss_cases.host_args(mis_loss_scoring="host"), batch)
    with pytest.raises(ValueError, match="mis_loss_scoring: host requires slime or Miles"):
        loss_func(logits)
    for key in ({"mis_loss_scoring": "fused"}, {"mis_loss_inplace": True}):
        with pytest.raises(ValueError, match="mis_loss_scoring, mis_loss_inplace: no effect on a loss from log-probs"):
            mis_ext.policy_loss_from_log_probs(
                loss_cases.host_args(**key),
                current_logprobs=torch.zeros(1, 2),
                advantages=torch.zeros(1, 2),
                response_mask=torch.ones(1, 2),
            )


def test_a_plain_loop_may_write_over_its_logits() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    leaf = batch.pop("logits").requires_grad_()
    logits = leaf * 1.0
    loss, *_ = mis_ext.make_loss_func(loss_cases.host_args(mis_loss_inplace=True), batch)(logits)
    loss.backward()
    assert torch.equal(logits.detach(), leaf.grad)
    assert leaf.grad.any()


# --- what the hosts are asked


def test_slimes_own_function_gets_what_its_own_loss_gives_it() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    plain = called(loss_cases.GATES, dict(batch))
    with running("slime") as asked:
        found = called(loss_cases.GATES | {"mis_loss_scoring": "host"}, dict(batch))
    assert [*found[1]] == [*plain[1]]
    assert asked.scored == [{"with_entropy": True, "top_p_token_ids": None}]
    assert len(asked.captured[0]) == len(loss_cases.RESPONSES)


def test_miles_own_function_computes_no_entropy_that_nobody_wants() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    plain = called({}, dict(batch))
    with running("miles") as asked:
        for keys in ({}, {"observe_training_entropy": False}, {"entropy_coef": 0.1}):
            found = called(keys | {"mis_loss_scoring": "host"}, dict(batch))
            assert {*found[1]} - {*plain[1]} == MILES_METRICS
    wanted = [(each["with_entropy"], each["entropy_requires_grad"]) for each in asked.scored]
    assert wanted == [(True, False), (False, False), (True, True)]
