# SPDX-License-Identifier: Apache-2.0
"""The startup check refuses what the first step would refuse, before the model loads."""

import argparse
import random
import sys
import types
from typing import Any

import loss_cases
import pytest
from drawn_configs import draw_point
from rows import for_each

import mis_ext
from mis_ext.frameworks import MILES
from mis_ext.keys.reading import flat_keys
from mis_ext.methods import METHODS

HOOK = {"use_tis": True, "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp"}
LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"}
CP_2, DP_2 = {"context_parallel_size": 2}, {"data_parallel_size": 2}


def start(keys: dict[str, Any]) -> None:
    mis_ext.check_setup(argparse.Namespace(**keys))


def first_step(keys: dict[str, Any]) -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    if not keys.get("use_kl_loss"):
        del batch["ref_log_probs"]
    mis_ext.policy_loss(argparse.Namespace(**keys), batch, batch.pop("logits"))


def raised(function: Any, keys: dict[str, Any]) -> Exception | None:
    try:
        function(keys)
    except (ValueError, TypeError) as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:.* does not use the trainer's own pass")
@pytest.mark.parametrize("with_reference", [False, True], ids=["alone", "kl"])
@for_each("name", METHODS)
def test_of_every_method_it_refuses_what_the_first_step_refuses_and_nothing_else(name, with_reference) -> None:
    keys = LOSS | {"mis_loss_method": name} | ({"use_kl_loss": True, "kl_loss_coef": 0.0} if with_reference else {})
    at_start, at_step = raised(start, keys), raised(first_step, keys)
    assert (type(at_start), str(at_start)) == (type(at_step), str(at_step))
    refused = {"drift_control"} if with_reference else {"drift_control", "grpo_k3", "grpo_k2", "grpo_unbiased_kl"}
    assert (at_start is not None) == (name in refused)


REFUSED = {
    "state values": (LOSS | {"mis_loss_method": "drift_control"}, "state_values are missing in the batch"),
    "reference": (LOSS | {"mis_loss_method": "grpo_k3"}, r"ref_log_probs are missing \(--use-kl-loss"),
    "loss keys of the hook": (
        HOOK | {"loss_type": "policy_loss", "mis_loss_mode": "bypass"},
        "mode='bypass': no eff",
    ),
    "greedy": (LOSS | {"rollout_temperature": 0.0}, r"rollout_temperature must be in \(0, inf\), got 0"),
    "no scoring": (LOSS | {"mis_loss_scoring": "host"}, "host requires slime or Miles"),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_it_refuses_before_the_model_loads(keys, message, capsys) -> None:
    for rank in (0, 1):
        with pytest.raises(ValueError, match=message):
            start(keys | {"rank": rank})
    assert capsys.readouterr().out == ""


PASSES = {
    "kl_coef": LOSS | {"mis_loss_method": "grpo_k3", "kl_coef": 0.1},
    # Its ranks have kl_coef 0, whatever the actor has.
    "critic": LOSS | {"mis_loss_method": "grpo_k3", "kl_coef": 0.0, "advantage_estimator": "ppo"},
    "gspo": LOSS | CP_2 | DP_2 | {"advantage_estimator": "gspo"},
    "top-p": LOSS | {"rollout_top_p": 0.9},
    "reference": LOSS | {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "padded": LOSS | CP_2 | {"qkv_format": "bshd"},
    "in place": LOSS | {"mis_loss_inplace": True, "entropy_coef": 0.1},
    "hook, padded": HOOK | CP_2 | DP_2 | {"qkv_format": "bshd"},
}


@pytest.mark.parametrize("keys", PASSES.values(), ids=PASSES)
def test_what_runs_passes_with_its_one_line(keys, capsys) -> None:
    start(keys)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_greedy_sampling_is_for_miles_to_know(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, MILES.loss, types.ModuleType(MILES.loss))
    start(LOSS | {"rollout_temperature": 0.0})


def test_drawn_configurations_pass_with_any_number_of_ranks() -> None:
    choose = random.Random(5).choice
    for _ in range(4):
        config = draw_point(choose).config.replace(per_token_loss=False)
        if config.scope == "micro_batch" and config.normalize_over is None and config.denominator == "fixed":
            config = config.replace(scope="data_parallel")
        ranks = {"context_parallel_size": choose([1, 2, 4]), "data_parallel_size": choose([1, 2])}
        keys = ranks | flat_keys(config) | {"rollout_data_postprocess_path": "mis_ext.prepare_rollout"}
        keys |= {"custom_generate_function_path": "mis_ext.rollout.generate"}
        for switches in (HOOK, LOSS | {"use_tis": True}):
            start(switches | keys)
