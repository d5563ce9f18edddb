# SPDX-License-Identifier: Apache-2.0
"""The check at start refuses what the first step would refuse, or what would do nothing. Else it says what will run."""

import argparse
import functools
import importlib
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import loss_cases
import pytest
import yaml
from drawn_configs import draw_file_config
from hook_batches import make_batch
from rows import for_each

import mis_ext
from mis_ext.frameworks import MILES
from mis_ext.hosts.session import current_run
from mis_ext.keys.reading import flat_keys
from mis_ext.methods import METHODS

PATH = "mis_ext.check_setup"
HOOK = {"use_tis": True, "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp"}
MEASURE = HOOK | {"use_tis": False, "get_mismatch_metrics": True}
LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"}
# What both hosts' parsers set by themselves, and the rank that they write over it.
OF_HOSTS = {
    "use_tis": False,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "custom_tis_function_path": None,
}
OF_HOSTS |= {"loss_type": "policy_loss", "custom_loss_function_path": None, "rollout_data_postprocess_path": None}
OF_HOSTS |= {"tis_clip": 2.0, "tis_clip_low": 0, "eps_clip": 0.2, "rollout_temperature": 1.0, "rank": 0}
OF_HOSTS |= {
    "custom_rm_path": None,
    "custom_generate_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
}
OF_HOSTS |= {"custom_config_path": None, "custom_megatron_init_path": PATH}


def arguments(keys: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**OF_HOSTS | keys)


def flag_of(argument: str) -> str:
    return "--" + argument.replace("_", "-")


def start(keys: dict[str, Any]) -> None:
    """As ``init(args)`` of both hosts has it: the function is found by its path, and gets ``args`` alone."""
    args = arguments(keys)
    module, _, name = args.custom_megatron_init_path.rpartition(".")
    custom_init = getattr(importlib.import_module(module), name)
    assert custom_init(args) is None


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            HOOK,
            "mis_ext: the framework's loss calls compute_mis_weights_with_cp "
            "| weight, token: x = rho_t; w = min(x, 2) | 9 metrics train/mis_*",
        ),
        (
            HOOK
            | {"tis_level": "none", "use_rs": True, "rs_lower_bound": 0.5, "rs_upper_bound": 4.0, "mis_metrics": []},
            "mis_ext: the framework's loss calls compute_mis_weights_with_cp | gate rs_mask: 0.5 <= rho_t <= 4 "
            "| 0 metrics train/mis_*",
        ),
        (
            MEASURE | {"mis_metrics": ["mis_kl"]},
            "mis_ext: the framework's loss calls compute_mis_weights_with_cp | measures only | 1 metrics train/mis_*",
        ),
        (
            LOSS | {"use_tis": True, "tis_upper_bound": 3.0},
            "mis_ext: policy_loss replaces the framework's loss, mis_loss_mode: baseline "
            "| weight, token: x = rho_t; w = min(x, 3) | 9 metrics train/mis_*",
        ),
        (
            LOSS | {"mis_loss_method": "dppo_tv"},
            "mis_ext: policy_loss replaces the framework's loss, mis_loss_method: dppo_tv | no correction (no use_tis)",
        ),
        (
            LOSS
            | {
                "mis_group_over": "all",
                "mis_prompt_mean": True,
                "rollout_data_postprocess_path": "mis_ext.prepare_rollout",
                "custom_reward_post_process_path": "mis_ext.group_rewards",
            },
            "mis_ext: policy_loss replaces the framework's loss, mis_loss_mode: baseline | baseline of a prompt: mean "
            "over all | every prompt has the same weight | no correction (no use_tis)",
        ),
        (
            HOOK | {"mis_prompt_mean": True, "rollout_data_postprocess_path": "mis_ext.prepare_rollout"},
            "mis_ext: the framework's loss calls compute_mis_weights_with_cp | every prompt has the same weight "
            "| weight, token: x = rho_t; w = min(x, 2) | 9 metrics train/mis_*",
        ),
    ],
    ids=["hook", "gate alone", "metrics only", "whole loss", "method", "a baseline", "prompts"],
)
def test_a_good_configuration_passes_and_says_in_one_line_what_will_run(capsys, keys, line) -> None:
    start(keys)
    assert capsys.readouterr().out == line + "\n"


def test_only_rank_0_says_it_and_every_rank_refuses(capsys) -> None:
    for rank in range(4):
        start(HOOK | {"rank": rank})
    assert len(capsys.readouterr().out.splitlines()) == 1
    for rank in range(4):
        with pytest.raises(ValueError, match="tis_levl"):
            start(HOOK | {"tis_levl": "token", "rank": rank})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "preset", sorted((Path(__file__).parents[2] / "yaml").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_preset_passes_with_the_flags_of_its_launch(preset: Path) -> None:
    switches = MEASURE if preset.stem == "metrics_only" else HOOK
    start(switches | yaml.safe_load(preset.read_text()))


WRONG = [
    HOOK | {"tis_levl": "token"},
    HOOK | {"tis_level": "tokn"},
    HOOK | {"tis_upper_bound": "1e-4"},
    HOOK | {"rs_level": "token"},
    HOOK | {"use_rollout_logprobs": True},
    HOOK | {"tis_clip": 5.0},
    HOOK | {"mis_loss_mode": "decoupled"},
    LOSS | {"mis_loss_mode": "decoupled"},
    LOSS | {"mis_loss_mode": "bypas"},
    LOSS | {"mis_loss_proximal": "current", "num_steps_per_rollout": 4},
    LOSS | {"use_tis": True, "use_rollout_logprobs": True},
]


@pytest.mark.parametrize("keys", WRONG, ids=lambda keys: str([*keys.items()][-1]))
def test_it_refuses_with_the_error_of_the_first_step(capsys, keys) -> None:
    with pytest.raises((ValueError, TypeError)) as at_step:
        current_run(arguments(keys), whole_loss=keys.get("loss_type") == "custom_loss")
    with pytest.raises(type(at_step.value), match=f"^{re.escape(str(at_step.value))}$"):
        start(keys)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("launch", [HOOK, LOSS], ids=["hook", "loss"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *[("rollout_temperature", value) for value in (0.0, -1.0, float("nan"), "1.0", True)],
        *[("eps_clip", value) for value in ("0.2", -0.1, float("nan"))],
        *[("kl_loss_coef", value) for value in ("1e-3", float("inf"))],
        *[("entropy_coef", "0"), ("kl_loss_type", "k4"), ("eps_clip_c", 0.5), ("rollout_top_p", 1.5)],
        ("calculate_per_token_loss", 1),
    ],
)
def test_a_flag_of_the_host_with_which_a_loss_fails_or_is_nan_is_refused(launch, flag, value) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{flag} must be "):
        start(launch | {flag: value})


@pytest.mark.parametrize("launch", [HOOK, LOSS], ids=["hook", "loss"])
def test_greedy_sampling_is_for_miles_to_know(launch, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, MILES.loss, types.ModuleType(MILES.loss))
    start(launch | {"rollout_temperature": 0.0})


def test_outside_of_slime_and_miles_no_host_scores() -> None:
    with pytest.raises(ValueError, match="host requires slime or Miles"):
        start(LOSS | {"mis_loss_scoring": "host"})


def test_it_warns_of_kept_denominators_beside_a_function_that_may_split_rollouts(capsys) -> None:
    keys = HOOK | {"mis_denominator": "kept", "rs_veto_threshold": 0.1}
    for more, is_warned in (
        ({"custom_generate_function_path": "mine.generate"}, True),
        ({"custom_generate_function_path": "mis_ext.rollout.generate"}, False),
        ({}, False),
        ({"custom_generate_function_path": "mine.generate", "mis_denominator": "fixed"}, False),
        (
            {
                "custom_generate_function_path": "mine.generate",
                "rollout_data_postprocess_path": "mis_ext.prepare_rollout",
            },
            False,
        ),
    ):
        start(keys | more)
        assert ("several samples of a rollout" in capsys.readouterr().out) == is_warned


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        # --custom-tis-function-pth: the hosts' parsers drop it.
        (
            {"use_tis": True, "rs_veto_threshold": 1e-4},
            ["--custom-tis-function-path is not set. "],
        ),
        ({"use_tis": True}, ["--custom-tis-function-path is not set"]),
        ({"custom_tis_function_path": HOOK["custom_tis_function_path"]}, ["neither use_tis nor get_mismatch_metrics"]),
        (HOOK | {"loss_type": "sft_loss"}, ["--loss-type sft_loss calls no function of mis_ext"]),
        (HOOK | {"loss_type": "custom_loss"}, ["--custom-loss-function-path is not set. "]),
        (
            HOOK | {"custom_tis_function_path": "torch.nn.functional.relu"},
            ["--custom-tis-function-path torch.nn.functional.relu is not mis_ext.compute_mis_weights_with_cp"],
        ),
        (
            LOSS | {"custom_loss_function_path": HOOK["custom_tis_function_path"]},
            ["--custom-loss-function-path mis_ext.compute_mis_weights_with_cp is not mis_ext.policy_loss"],
        ),
    ],
)
def test_it_refuses_a_launch_that_would_not_call_mis_ext(capsys, keys, messages) -> None:
    with pytest.raises(ValueError, match=r"^mis_ext would not be called: ") as raised:
        start(keys)
    assert [message for message in messages if message not in str(raised.value)] == []
    assert capsys.readouterr().out == ""


WORDS_AND_NUMBERS = ("loss_type", "advantage_estimator", "qkv_format", "global_batch_size", "update_weights_interval")
PATHS = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path")


@pytest.mark.parametrize("argument", [*WORDS_AND_NUMBERS, *PATHS])
def test_a_list_or_a_mapping_for_a_word_or_a_number_is_refused_by_name(argument) -> None:
    for launch in (HOOK | {"mis_staleness": True}, LOSS | {"mis_loss_proximal": "current", "rollout_batch_size": 4}):
        for value in (["a"], {"a": 1}):
            said = f"({argument} must be|{flag_of(argument)}) .*{re.escape(str(value))}"
            with pytest.raises((TypeError, ValueError), match=said):
                start(launch | {argument: value})


def test_names_of_the_hosts_are_no_misspellings(capsys) -> None:
    with pytest.raises(ValueError, match="would not be called") as raised:
        start({})
    assert "did you mean" not in str(raised.value)


def test_a_path_that_leads_nowhere_is_the_hosts_own_error_with_the_flag() -> None:
    flag = "--custom-tis-function-path"
    with pytest.raises(AttributeError, match=f"^{flag} mis_ext.compute_mis_weights_with_pc: .* has no attribute"):
        mis_ext.check_setup(arguments(HOOK | {"custom_tis_function_path": "mis_ext.compute_mis_weights_with_pc"}))
    with pytest.raises(ImportError, match=f"^{flag} no_such_package.hook: No module named 'no_such_package'"):
        mis_ext.check_setup(arguments(HOOK | {"custom_tis_function_path": "no_such_package.hook"}))
    with pytest.raises(AttributeError, match=r"^--custom-loss-function-path mis_ext\.policy_los: "):
        mis_ext.check_setup(arguments(LOSS | {"custom_loss_function_path": "mis_ext.policy_los"}))


def test_the_long_path_of_our_function_and_a_wrapper_of_it_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    start(HOOK | {"custom_tis_function_path": "mis_ext.hosts.slime_miles.hook.compute_mis_weights_with_cp"})
    mine = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)

    @functools.wraps(mis_ext.compute_mis_weights_with_cp)
    def wrapper(args: Any, **given: Any) -> Any:
        return mis_ext.compute_mis_weights_with_cp(args, **given)

    mine.wrapper, mine.other = wrapper, lambda args, **given: wrapper(args, **given)
    start(HOOK | {"custom_tis_function_path": "mine.wrapper"})
    with pytest.raises(ValueError, match=r"functools\.wraps"):
        start(HOOK | {"custom_tis_function_path": "mine.other"})


PROMPTS = {"mis_prompt_mean": True}


def test_what_needs_the_whole_rollout_is_refused_where_nobody_looks_at_it() -> None:
    for switches in (HOOK, LOSS | {"use_tis": True}):
        with pytest.raises(ValueError, match=r"needs --rollout-data-postprocess-path mis_ext\.prepare_rollout"):
            start(switches | PROMPTS)
        with pytest.raises(ValueError, match=r"needs --rollout-data-postprocess-path mis_ext\.prepare_rollout"):
            start(switches | PROMPTS | {"rollout_data_postprocess_path": "mis_ext.log_mismatch"})
        start(switches | PROMPTS | {"rollout_data_postprocess_path": "mis_ext.prepare_rollout"})


def test_a_baseline_of_kept_trajectories_needs_no_function_of_rewards() -> None:
    keys = {"mis_group_over": "kept", "rollout_data_postprocess_path": "mis_ext.prepare_rollout"}
    start(HOOK | keys | {"mis_group_baseline": "leave_one_out", "custom_reward_post_process_path": None})


REWARDS = {"mis_group_baseline": "leave_one_out", "mis_group_over": "all"}
TOKENS = {"on_policy_tokens": {"cache_by_version": True, "canary": "warn"}}


@pytest.mark.parametrize(
    ("keys", "argument", "ours"),
    [
        (PROMPTS, "rollout_data_postprocess_path", "mis_ext.prepare_rollout"),
        (REWARDS, "custom_reward_post_process_path", "mis_ext.group_rewards"),
        (TOKENS, "custom_generate_function_path", "mis_ext.rollout.generate"),
    ],
    ids=["prompts", "rewards", "tokens"],
)
def test_what_a_foreign_function_may_leave_undone_is_said_at_start(capsys, keys, argument, ours) -> None:
    flag = argument.replace("_", "-")
    said = f"has no effect unless --{flag} os.path.join calls {ours}"
    start(HOOK | keys | {argument: "os.path.join"})
    assert said in capsys.readouterr().out
    start(HOOK | keys | {argument: ours})
    assert "nothing" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [True, 1, "text", ["canary"], {1: True}, {}])
def test_a_value_of_another_program_at_our_key_of_the_rollout_is_no_business_of_the_loss(value, capsys) -> None:
    args = arguments(HOOK | {"on_policy_tokens": value, "custom_generate_function_path": ["a", "list"]})
    mis_ext.compute_mis_weights_with_cp(args, **make_batch())
    mis_ext.check_setup(args)
    assert ("on_policy_tokens (1)" in capsys.readouterr().out) == (value == {1: True})


def test_keys_of_a_generate_function_that_nobody_calls_are_named(capsys) -> None:
    start(HOOK | TOKENS)
    expected = (
        "on_policy_tokens (cache_by_version, canary) has no effect unless a custom function calls mis_ext.rollout"
    )
    assert f"mis_ext: warning: {expected}.generate\n" in capsys.readouterr().out
    start(HOOK | TOKENS | {"load_debug_rollout_data": "a dump"})
    assert "nothing" not in capsys.readouterr().out


@pytest.mark.parametrize("path", [None, "os.path.join"], ids=["none", "of the user"])
def test_in_miles_what_needs_the_whole_rollout_is_refused_with_any_function_at_that_flag(
    path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MILES.loss, types.ModuleType(MILES.loss))
    for switches in (HOOK, LOSS | {"use_tis": True}):
        start(switches | {"rollout_data_postprocess_path": path})
        with pytest.raises(ValueError, match=r"prompt_mean: true.*Miles (passes no rollout data; remove|has nothing)"):
            start(switches | PROMPTS | {"rollout_data_postprocess_path": path})


def test_in_miles_a_function_of_ours_gets_no_rollout_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "mis_ext.prepare_rollout"
    for switches in (HOOK, LOSS | {"use_tis": True}, LOSS):
        start(switches | {"rollout_data_postprocess_path": path})
    monkeypatch.setitem(sys.modules, MILES.loss, types.ModuleType(MILES.loss))
    for switches in (HOOK, LOSS | {"use_tis": True}, LOSS):
        with pytest.raises(ValueError, match=f"--rollout-data-postprocess-path {path}: Miles passes no rollout data"):
            start(switches | {"rollout_data_postprocess_path": path})


def test_the_session_of_the_check_is_the_one_of_the_run() -> None:
    args = arguments(HOOK)
    mis_ext.check_setup(args)
    session = mis_ext.session_for(args)
    mis_ext.check_setup(args)
    assert mis_ext.session_for(args) is session


def with_file(path: str, content: dict[str, Any]) -> argparse.Namespace:
    """As both hosts have it: their parser, the file over it, and what they set later."""
    parser = argparse.ArgumentParser()
    flags = OF_HOSTS | HOOK | {"eps_clip_high": None}
    del flags["custom_config_path"], flags["rank"]
    for flag, default in (flags | {"custom_config_path": path, "padded_vocab_size": None}).items():
        parser.add_argument(f"--{flag.replace('_', '-')}", default=default)
    args = parser.parse_args([])
    args.sglang_mem_fraction = 0.8
    for key, value in content.items():
        setattr(args, key, value)
    args.rank, args.world_size = 0, 1
    return args


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_turns: 3\n", ["'max_turns'"]),
        ("eps_clip_hihg: 0.28\nname: x\n", ["'eps_clip_hihg' (did you mean 'eps_clip_high'?)", "'name'"]),
        ("tau: 0.1\nmis_loss_x: null\n", None),
        ("eps_clip_high: 0.28\ntis_upper_bound: 3.0\nrs_veto_threshold: 1.0e-4\nsglang_mem_fraction: 0.7\n", []),
        ("on_policy_tokens: {}\nmis_metrics: [mis_kl]\n", []),
        ("# Nothing yet.\n", []),
    ],
)
def test_every_key_of_the_file_that_nobody_reads_is_named(text, named, tmp_path, capsys) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    args = with_file(str(path), yaml.safe_load(text) or {})
    if named is None:
        with pytest.raises(ValueError, match="unknown keys: 'mis_loss_x'"):
            mis_ext.check_setup(args)
        return
    mis_ext.check_setup(args)
    _, *lines = capsys.readouterr().out.splitlines()
    about = f"keys of {path} that neither mis_ext nor the framework has, without effect unless"
    assert lines == [f"mis_ext: warning: {about} a custom function reads them: {', '.join(named)}"] * bool(named)


# As a reward or generate function of the user's reads them. Both frameworks put every key of the file on ``args``.
OF_OTHERS = {"weights": {"acc": 0.7, "fmt": 0.3}, "metric": "accuracy", "scopes": ["math"], "guards": ["length"]}
OF_OTHERS |= {"low": 1, "high": 0.9, "after": 100, "gate": "linear", "statistic": "x", "reduce": "mean", "name": "x"}
OF_OTHERS |= {"level": "token", "mode": "clip", "normalize": True, "ppo": True, "icepop": True}


def test_keys_that_may_be_somebody_elses_stop_nothing_and_are_named(tmp_path, capsys) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(OF_OTHERS))
    mis_ext.check_setup(args := with_file(str(path), OF_OTHERS))
    assert mis_ext.session_for(args).config == mis_ext.CorrectionConfig()
    _, line = capsys.readouterr().out.splitlines()
    assert [key for key in OF_OTHERS if f"{key!r}" not in line] == []


def test_own_flags_and_what_slime_sets_behind_the_file_are_read_by_somebody(tmp_path, capsys) -> None:
    path = tmp_path / "my.yaml"
    text = "{debug_train_only: true, load_debug_rollout_data: x, padded_vocab_size: 8, train_backend: megatron}"
    path.write_text(text)
    mis_ext.check_setup(with_file(str(path), yaml.safe_load(text) | {"debug_rollout_only": False}))
    mis_ext.check_setup(argparse.Namespace(high=2.0, **OF_HOSTS | HOOK))
    assert len(capsys.readouterr().out.splitlines()) == 2


FOREIGN = {
    "twice": b"lr: 1.0\nlr: 2.0\n",
    "UTF-16": "lr: 1.0\n".encode("utf-16"),
    "merged": b"lr: &base {tis_upper_bound: 3.0}\n<<: *base\n",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_the_hosts_took_stops_nothing(text, tmp_path, capsys) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(text)
    mis_ext.check_setup(with_file(str(path), {}))
    _, line = capsys.readouterr().out.splitlines()
    assert line.endswith("reads them: 'lr'")


def test_a_file_that_is_not_on_this_node_stops_nothing(tmp_path, capsys) -> None:
    mis_ext.check_setup(with_file(str(tmp_path / "my.yaml"), {"max_turns": 3}))
    assert len(capsys.readouterr().out.splitlines()) == 1


HIDDEN = LOSS | {"custom_model_provider_path": "mis_ext.model_provider"}


def test_a_model_without_logits_is_announced(capsys) -> None:
    start(HIDDEN)
    assert "mis_ext: model_provider makes no logits" in capsys.readouterr().out
    start(LOSS | {"custom_model_provider_path": None})
    assert "no logits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            HOOK | {"custom_model_provider_path": "mis_ext.model_provider"},
            "only mis_ext.policy_loss takes hidden states",
        ),
        (HIDDEN | {"mis_loss_scoring": "host"}, "the framework's own function scores here"),
        (HIDDEN | {"mis_loss_inplace": True}, "mis_loss_inplace: no effect without logits"),
    ],
)
def test_a_model_without_logits_that_could_not_train_is_refused(keys, message) -> None:
    with pytest.raises((ValueError, AttributeError), match=message):
        start(keys)


@pytest.mark.parametrize(("interval", "is_warned"), [(None, False), (1, False), (4, True)])
def test_it_warns_of_a_trainer_that_is_ahead_of_every_version(capsys, interval, is_warned) -> None:
    given = {
        "mis_staleness": True,
        "custom_generate_function_path": "mis_ext.rollout.generate",
        "rollout_data_postprocess_path": "mis_ext.prepare_rollout",
    }
    start(HOOK | given | {"update_weights_interval": interval})
    found = re.findall(r"up to (\d+) rollouts ahead", capsys.readouterr().out)
    assert found == (["3"] if is_warned else [])


def test_keys_of_the_loss_have_no_effect_without_a_loss_type_either() -> None:
    with pytest.raises(ValueError, match=r"mis_loss_mode='bypass': no effect, because --loss-type is policy_loss"):
        mis_ext.check_setup(argparse.Namespace(**HOOK, mis_loss_mode="bypass"))


# --- with nothing on ``args`` but what is given


def check(keys: dict[str, Any]) -> None:
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
    at_start, at_step = raised(check, keys), raised(first_step, keys)
    assert (type(at_start), str(at_start)) == (type(at_step), str(at_step))
    refused = {"drift_control"} if with_reference else {"drift_control", "grpo_k3", "grpo_k2", "grpo_unbiased_kl"}
    assert (at_start is not None) == (name in refused)


CP_2, DP_2 = {"context_parallel_size": 2}, {"data_parallel_size": 2}
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
    check(keys)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_drawn_configurations_pass_with_any_number_of_ranks() -> None:
    choose = random.Random(5).choice
    for _ in range(4):
        config = draw_file_config(choose)
        ranks = {"context_parallel_size": choose([1, 2, 4]), "data_parallel_size": choose([1, 2])}
        keys = ranks | flat_keys(config) | {"rollout_data_postprocess_path": "mis_ext.prepare_rollout"}
        keys |= {"custom_generate_function_path": "mis_ext.rollout.generate"}
        for switches in (HOOK, LOSS | {"use_tis": True}):
            check(switches | keys)
