# SPDX-License-Identifier: Apache-2.0
"""The check at start calls once what the host will call: it refuses what the first step would, and leaves nothing."""

import argparse
import functools
import pickle
import random
import re
import sys
import types
from typing import Any

import loss_cases
import pytest
import torch
from drawn_configs import draw_point
from rows import for_each
from torch.overrides import TorchFunctionMode

import mis_ext
from mis_ext.frameworks import MILES, SLIME
from mis_ext.hosts import runs
from mis_ext.keys.presets import flat_keys
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
    "loss keys of the hook": (HOOK | {"mis_loss_mode": "bypass"}, "mis_loss_mode: no effect"),
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


@pytest.mark.filterwarnings("ignore:a g", "ignore:the bounds")
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


def test_what_could_not_be_tried_is_said_on_rank_0(monkeypatch, capsys) -> None:
    def untried(keys: dict[str, Any]) -> list[str]:
        start(keys)
        _, *lines = capsys.readouterr().out.splitlines()
        return [re.sub(".*in the first step: ", "", line) for line in lines]

    monkeypatch.setitem(sys.modules, SLIME.loss, types.ModuleType(SLIME.loss))
    assert untried(LOSS) == []
    scored_by_host = LOSS | {"mis_loss_scoring": "host"}
    assert untried(scored_by_host) == ["the framework's function for log-probs"]
    assert capsys.readouterr().out == ""
    reducer = "loss_cases.reduce_by_kept"
    assert untried(LOSS | {"custom_pg_loss_reducer_function_path": reducer}) == [
        f"--custom-pg-loss-reducer-function-path {reducer}"
    ]
    mine = types.ModuleType("mine")
    mine.wrapper = functools.wraps(mis_ext.policy_loss)(lambda *given: mis_ext.policy_loss(*given))
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert untried(LOSS | {"custom_loss_function_path": "mine.wrapper"}) == [
        "--custom-loss-function-path mine.wrapper, only mis_ext.policy_loss in it"
    ]
    mis_ext.check_setup(argparse.Namespace(**scored_by_host, rank=1))
    assert capsys.readouterr().out == ""


class NoExponential(TorchFunctionMode):
    """A machine whose CPU lacks an operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.exp, torch.Tensor.exp):
            raise NotImplementedError("no kernel for exp")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keys", "name"), [(HOOK, "compute_mis_weights_with_cp"), (LOSS, "policy_loss")])
def test_where_the_call_cannot_run_it_says_so_and_the_run_goes_on(keys, name, capsys) -> None:
    with NoExponential():
        start(keys)
    _, said = capsys.readouterr().out.splitlines()
    assert said.endswith(f"in the first step: mis_ext.{name} itself (NotImplementedError: no kernel for exp)")


@pytest.mark.parametrize("keys", [HOOK, LOSS | {"use_tis": True, "mis_loss_method": "clip_cov", "tis_level": "none"}])
def test_it_leaves_nothing_behind(keys) -> None:
    args = argparse.Namespace(**keys | CP_2 | DP_2 | {"rs_veto_threshold": 1e-4})
    session = runs.current_run(args, whole_loss="loss_type" in keys).session
    before = (
        torch.get_rng_state(),
        random.getstate(),
        torch.get_num_threads(),
        len(runs._kept),
        pickle.dumps(session),
    )
    mis_ext.check_setup(args)
    assert torch.equal(before[0], torch.get_rng_state())
    assert runs.current_run(args).session is session
    after = random.getstate(), torch.get_num_threads(), len(runs._kept), pickle.dumps(session)
    assert before[1:] == after
    assert not torch.distributed.is_initialized()
