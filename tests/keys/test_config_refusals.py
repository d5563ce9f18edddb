# SPDX-License-Identifier: Apache-2.0
"""Configuration: what is refused, what is warned of, and that each message names key, value and legal range."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flat_keys import from_yaml
from rows import for_each

from mis_ext import CorrectionConfig, Gate, MismatchWarning, Weight, config_from_mapping, load_config, session_for
from mis_ext.correction.config import GUARD_NAMES
from mis_ext.keys.reading import read_config
from mis_ext.keys.rows import FLAT_KEYS, OF_OTHERS, PREFIXES, REMOVED, ROWS, TIS_OF_FRAMEWORKS
from mis_ext.methods import METHODS

REFUSED = {
    "{use_tis: true, tis_uper_bound: 2.0}": r"tis_uper_bound.*did you mean 'tis_upper_bound'",
    "{use_tis: true, rs_veto: 1.0e-4}": r"'rs_veto' \(did you mean 'rs_veto_threshold' or",
    "{use_tis: true, mis_metric: all}": r"mis_metric.*did you mean 'mis_metric",
    "{use_tis: true, tis_level: tokn}": r"tis_level must be one of token \| sequence .*'tokn'.*did you mean 'token'",
    "{use_tis: false, tis_level: tokn}": r"tis_level",
    "{use_tis: true, rs_level: mean}": r"rs_level",
    "{use_tis: true, tis_mode: cap}": r"tis_mode must be one of truncate \| clip",
    "{use_tis: true, tis_upper_bound: 0.0}": r"tis_upper_bound must be in \(0, inf\), got 0.0",
    "{use_tis: true, tis_lower_bound: -0.5}": r"tis_lower_bound must be in \[0, inf\), got -0.5",
    "{use_tis: true, tis_lower_bound: .inf}": r"tis_lower_bound must be in \[0, inf\), got inf",
    "{use_tis: true, use_rs: true, rs_upper_bound: 0.0}": r"rs_upper_bound must be in \(0, inf\], got 0.0",
    "{use_tis: true, use_rs: false, rs_lower_bound: -1.0}": r"rs_lower_bound must be in \[0, inf\), got -1.0",
    "{use_tis: true, use_rs: true, rs_lower_bound: 0.0, rs_upper_bound: .inf}": r"rs_upper_bound: a gate needs low",
    "{use_tis: true, tis_mode: clip, tis_lower_bound: 3.0}": r"tis_lower_bound: low must be below high, got low=3\.0",
    "{use_tis: true, tis_upper_bound: .inf}": r"tis_upper_bound must be in \(0, inf\), got inf \(use tis_mode: unbo",
    "{use_tis: true, tis_mode: mask, tis_upper_bound: 1.0}": r"tis_mode, tis_upper_bound: low must be below high",
    "{use_tis: true, use_rs: true, rs_upper_bound: 1.0, rs_lower_bound: 1.0}": r"rs_upper_bound: low must be below",
    "{use_tis: true, rs_veto_threshold: 0.0}": r"rs_veto_threshold must be in \(0, 1\], got 0.0",
    "{use_tis: true, rs_veto_upper_threshold: 0.5}": r"rs_veto_upper_threshold must be in \[1, inf\), got 0.5",
    "{use_tis: true, rs_veto_probability: 2.0}": r"rs_veto_probability",
    "{use_tis: true, tis_batch_normalize: true, tis_normalize_scope: batch}": r"tis_normalize_scope",
    "{use_tis: true, tis_batch_normalize: true, tis_normalize_over: all}": r"tis_normalize_over",
    "{use_tis: true, mis_denominator: survivors}": r"mis_denominator",
    "{use_tis: true, mis_max_reject_fraction: 1.5}": r"mis_max_reject_fraction must be in \[0, 1\]",
    "{use_tis: true, mis_guard: off}": r"mis_guard must be .* got False \(YAML reads yes, no, on and off as",
    "{use_tis: true, mis_guard: {shifted_logprobs: warn}}": r"did you mean 'shifted_log_probs'",
    "{use_tis: true, mis_metrics: most}": r"mis_metrics must be all, core or a list of names, got 'most'",
    "{use_tis: true, mis_metrics: [mis_k4_kl]}": r"'mis_k4_kl'.*did you mean 'mis_k3_kl'",
    "{use_tis: true, mis_metrics: [mis_tis_clip_fraction_low]}": r"unknown mis_metrics of this configuration",
    "{use_tis: true, rs_max_staleness: 2}": r"rs_max_staleness.* need mis_staleness: true",
    "{use_tis: true, tis_when: stale}": r"tis_when: stale.* need mis_staleness: true",
    "{use_tis: true, use_rs: true, rs_gates: [{statistic: lag, high: 2}]}": r"need mis_staleness: true",
    "{use_tis: true, mis_staleness: true, rs_max_staleness: -1}": r"rs_max_staleness must be in \[0, 1e\+06\), got -1",
    "{use_tis: true, mis_staleness: true, tis_when: stale, tis_level: sequence}": r"when: stale .* got level: sequence",
    "{use_tis: true, mis_staleness: true, tis_when: stale, tis_mode: mask}": r"when: stale .* got .*mode: mask",
    "{use_tis: true, mis_staleness: true, tis_when: stale, tis_upper_bound: 0.5}": r"when: stale .* high=0\.5",
    "{use_tis: true, mis_staleness: true, tis_when: old}": r"tis_when must be one of always \| stale",
    # Keys without effect.
    "{use_tis: true, mis_staleness: true, rs_staleness_level: token}": r"because rs_max_staleness is not set",
    "{use_tis: true, tis_level: none, use_rs: true, tis_when: stale}": r"no effect, because tis_level is none",
    "{use_tis: true, rs_level: geometric}": r"rs_level='geometric': no effect, because use_rs is not set",
    "{use_tis: true, rs_lower_bound: 0.9}": r"rs_lower_bound=0.9: no effect",
    "{use_tis: true, tis_normalize_scope: micro_batch}": r"no effect, because tis_batch_normalize is not set",
    "{use_tis: true, tis_normalize_over: valid}": r"no effect, because tis_batch_normalize is not set",
    "{use_tis: true, tis_level: none, use_rs: true, tis_mode: clip}": r"no effect, because tis_level is none",
    "{use_tis: true, tis_mode: unbounded, tis_upper_bound: 3.0}": r"tis_upper_bound=3.0: no effect, because no weight",
    "{use_tis: true, tis_level: none, use_rs: true, tis_batch_normalize: true}": r"because tis_level is none",
    "{use_tis: true, rs_veto_requires_rs: true}": r"no effect, because no veto is set",
    "{use_tis: true, rs_veto_requires_rs: true, rs_veto_threshold: 0.1}": r"rs_veto_threshold=0.1: no effect",
    "{use_tis: true, tis_batch_normalize: true, tis_normalize_over: valid}": r"tis_normalize_over='valid': no effect",
    "{use_tis: true, tis_level: none, use_rs: true, rs_lower_bound: 0.5, tis_lower_bound: 0.1}": r"tis_lower_bound=0.1",
    "{use_tis: true, tis_level: none, use_rs: true, rs_upper_bound: 2.0, tis_lower_bound: 0.1, tis_upper_bound: 3.0}": (
        r"tis_upper_bound=3.0: no effect"
    ),
    "{use_tis: true, use_rs: true, rs_level: none, rs_lower_bound: 0.5, rs_gates: [{high: 2.0}]}": r"rs_level is none",
    "{tis_level: none, tis_upper_bound: 3.0, use_rs: true, rs_level: none, rs_gates: [{high: 2.0}]}": "no weight",
    "{use_tis: true, tis_mode: mask, use_rs: true}": r"use_rs=True: no effect, because tis_mode rejects the same",
    "{use_tis: true, mis_staleness: true, mis_metrics: [mis_kl]}": r"mis_staleness=True: no effect",
    "{use_tis: true, mis_metric_max: 1.0, mis_metrics: []}": r"mis_metric_max=1.0: no effect",
    "{use_tis: false, tis_upper_bound: 3.0}": r"tis_upper_bound=3.0: no effect, because use_tis is not true",
    "{get_mismatch_metrics: true, rs_max_staleness: 0}": r"rs_max_staleness=0: no effect, because use_tis is not true",
    "{use_tis: true, tis_level: none}": r"needs a weight or a gate",
    "{use_rs: true, rs_lower_bound: 0.5, rs_gates: [{reduce: tokn, low: 0.5}]}": r"rs_gates\[0\]: reduce must be one",
    # Also where nothing is corrected.
    # Nothing where something is meant.
    "{use_tis: true, use_rss: true}": r"'use_rss' \(did you mean 'use_rs'\?\)",
    "{use_tis: true, use_rs_: true}": r"'use_rs_' \(did you mean 'use_rs'\?\)",
    "{use_tis: true, veto_threshold: 1.0e-4}": r"'veto_threshold' \(did you mean 'rs_veto_threshold'\?\)",
    "{use_tis: true, batch_normalize: true}": r"'batch_normalize' \(did you mean 'tis_batch_normalize'\?\)",
    "{use_tis: true, upper_bound: 1.5}": r"'upper_bound' \(did you mean 'tis_upper_bound'\?\)",
    "{use_tis: true, loss_mode: bypass}": r"'loss_mode' \(did you mean 'mis_loss_mode'\?\)",
    "{use_tis: true, rollout_is: sequence}": r"'rollout_is' \(use tis_level\)",
    "mis: {weight: {level: token}}": r"'mis' \(use flat keys since 0.6, such as tis_level",
    "use_mis: true": r"'use_mis' \(use use_tis: true, and use_rs: true for a filter\)",
    "{use_tis: false, normalize_over: kept}": r"'normalize_over' \(did you mean 'tis_normalize_over'\?\)",
    # The host's built-in correction, in whose place ours runs.
    "{use_tis: true, tis_clip: 5.0}": r"tis_clip=5.0: no effect, because it belongs to .* use tis_upper_bound",
    "{get_mismatch_metrics: true, tis_clip_low: 0.5}": r"tis_clip_low=0.5: no effect.*, or tis_mode: clip with tis_",
    "{use_tis: true, tis_level: null}": r"tis_level: null .* use tis_level: none, or remove the key",
    "{use_tis: true, tis_mode: null}": r"tis_mode: null .* use tis_mode: unbounded, or remove the key",
    "{use_tis: true, rs_level: null}": r"rs_level: null .* use rs_level: none, or remove the key",
    # Homoglyphs are shown as what they are.
    "{use_tis: true, tis_l\u0435vel: token}": r"'tis_l\\u0435vel' \(did you mean 'tis_level' or",
    "{use_tis: true, tis_level: t\u043eken}": r"'t\\u043eken' \(did you mean 'token'\?\)",
    "{use_tis: true, tis_level: TOKEN}": r"did you mean 'token'",
}


@for_each("text, message", REFUSED.items())
def test_what_is_not_legal_is_refused_with_key_and_range(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_yaml(text)


REFUSED_GATES = {
    "{higj: 2.0}": r"unknown keys of rs_gates\[0\]: 'higj' \(did you mean 'high'\?\)",
    "{reduce: token}": r"rs_gates\[0\]: a gate needs low or high",
    "{reduce: token, low: 0.0, high: .inf}": r"rs_gates\[0\]: a gate needs low or high",
    "{reduce: max, statistic: k3, low: 0.0}": r"rs_gates\[0\]: a gate needs low or high",
    "{reduce: max, statistic: probability_difference, high: 1.0}": r"a gate needs low or high",
    "{statistic: probability_gain, high: 1.5}": r"rs_gates\[0\]: high must be in \[-1, 1\], got 1.5",
    "{statistic: exp_abs_log_ratio, reduce: mean, high: 0.9}": r"high must be in \[1, inf\], got 0.9",
    "{reduce: geometric, low: 0.5}": r"rs_gates\[0\]: reduce must be one of token \| sum",
    "{reduce: token, low: 2.0, high: 0.5}": r"rs_gates\[0\]: low must be below high",
    "{reduce: token, low: 0.5, action: drop}": r"rs_gates\[0\]: action must be one of reject \| zero",
    "{reduce: token, low: 0.5, name: 5}": r"rs_gates\[0\]: name must be made of letters.*got 5",
    "{reduce: token, low: 0.5, name: größe}": r"rs_gates\[0\]: name must be made of letters.*got 'größe'",
    "{reduce: min, low: 0.1}, {reduce: min, low: 0.2}": r"duplicate veto",
}


@for_each("text, message", REFUSED_GATES.items())
def test_a_gate_that_is_not_legal_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_yaml(f"{{use_rs: true, rs_level: none, rs_gates: [{text}]}}")


WRONG_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "low above the default of high": ({"mode": "clip", "low": 3.0}, "low must be below high, got low=3.0 and high=2.0"),
    "high below the default of low": ({"mode": "clip", "high": 0.5}, r"got low=2.0 \(1 / high by default\)"),
    "a cap of 0": ({"high": 0.0}, r"high must be in \(0, inf\), got 0.0"),
    "a bound of none": ({"mode": "unbounded", "high": 3.0}, "unbounded has no bounds"),
    "a low bound of a cap": ({"mode": "truncate", "low": 0.5}, "truncate has no low bound"),
    "no level": ({"level": None}, "level must be one of token .* got None"),
}


@pytest.mark.parametrize(("parts", "message"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_a_weight_that_is_not_legal_is_refused_in_python(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Weight(**parts)


def test_all_wrong_keys_of_a_file_are_named_at_once_in_two_lines_each() -> None:
    wrong = {"tis_levl": "token", "tis_mode": "trunc", "tis_upper_bound": "1e-4", "tis_nonsense": 1, "use_rs": "yes"}
    wrong |= {"mis_metrics": "al", "mis_loss_mode": "bypas", "mis_loss_denominator": "all", "entropy_coef": "0"}
    wrong |= {"rs_gates": [{"reduce": "prefix", "low": 0.5}, {"statistic": "rati", "low": 0.5}], "loss_mode": "token"}
    wrong |= {"mis_group_over": "none", "tis_normalize_over": None, "rs_level": None, "get_mismatch_metrics": 1}
    with pytest.raises(ValueError, match="tis_levl") as raised:
        read_config({"use_tis": True} | wrong, whole_loss=True)
    text = str(raised.value)
    keys = [*(key for key in wrong if key != "tis_normalize_over"), r"rs_gates\[0\]: reduce", r"rs_gates\[1\]: statis"]
    assert [key for key in keys if not re.search(key, text)] == []
    assert max(map(len, text.splitlines())) < 240
    assert len({*text.splitlines()}) == len(text.splitlines())
    assert not re.search("prefix|batch", text.replace("'prefix'", ""))


@for_each("flags", [{"use_rollout_logprobs": 1}, {"eps_clip": "0.3"}, {"eps_clip_c": 0.5}])
def test_a_wrong_flag_is_named_alone_without_what_follows_from_it(flags: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(flags))} must be .*") as raised:
        read_config({"use_tis": False, "mis_loss_method": "icepop", **flags}, whole_loss=True)
    assert len(str(raised.value).splitlines()) == 1


@for_each("key", [*ROWS, *TIS_OF_FRAMEWORKS])
def test_a_key_whose_value_is_not_legal_has_one_error(key: str) -> None:
    corrects = {"use_tis": True, "loss_type": "policy_loss"}
    for given, whole_loss in ((corrects, False), (corrects, True), ({"use_rs": False}, True)):
        # Without a correction of ours the bounds of the framework's are its own.
        if given is corrects or key in ROWS:
            with pytest.raises((TypeError, ValueError), match=key) as raised:
                read_config(given | {key: {"a": 1}}, whole_loss=whole_loss)
            assert len(str(raised.value).splitlines()) == 1


FOLLOWS = (
    ("advantage_estimator", {"mis_group_baseline": "leave_one_out"}),
    ("loss_type", {"mis_loss_mode": "bypass"}),
    *[(name, {"mis_prompt_mean": True}) for name in ("mis_denominator", "custom_pg_loss_reducer_function_path")],
)


@for_each("key, others", FOLLOWS)
def test_what_would_follow_from_a_value_that_is_not_legal_is_not_said(key: str, others: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{key} must be ") as raised:
        read_config({"use_tis": True, key: ["a"]} | others, whole_loss=False)
    assert len(str(raised.value).splitlines()) == 1


def test_all_keys_without_effect_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)rs_level='token'.*\n.*rs_staleness_level='token'") as raised:
        from_yaml("{use_tis: true, rs_level: token, rs_staleness_level: token, tis_batch_normalize: false}")
    assert len(str(raised.value).splitlines()) == 2


WRONG_TYPES = {
    "{use_tis: true, rs_veto_threshold: 1e-4}": r"rs_veto_threshold .* write 0\.0001\)",
    "{use_tis: true, rs_veto_upper_threshold: 1e4}": r"write 10000\.0\)",
    "{use_tis: true, tis_upper_bound: '2.0'}": r"tis_upper_bound must be a number.*write 2\.0\)",
    "{use_tis: true, tis_upper_bound: inf}": r"write \.inf\)",
    "{use_tis: true, tis_upper_bound: true}": r"tis_upper_bound must be a number in \(0, inf\), got True$",
    "{use_tis: 1}": r"use_tis must be true or false, got 1",
    "{use_tis: true, use_rs: 'yes'}": r"use_rs must be true or false",
    "{use_tis: true, tis_batch_normalize: 1}": r"tis_batch_normalize must be true or false",
    "{use_tis: true, use_rs: true, rs_gates: {reduce: token}}": r"rs_gates must be a list",
    "{use_tis: true, use_rs: true, rs_gates: [[token]]}": r"rs_gates\[0\] must be a mapping, got \['token'\]",
    "{use_tis: true, use_rs: true, rs_gates: [{reduce: token, high: '2'}]}": r"rs_gates\[0\]: high must be a number",
    "{use_tis: true, use_rs: true, rs_gates: [{1: 2}]}": r"keys of rs_gates\[0\] must be strings, got 1",
    # The hosts' flags that we read.
    "{get_mismatch_metrics: 'false'}": r"get_mismatch_metrics must be true or false, got 'false' \(remove the quotes\)",
    "{calculate_per_token_loss: 'False'}": r"calculate_per_token_loss must be true .* \(remove the quotes\)",
    "{use_rollout_logprobs: 'true'}": r"use_rollout_logprobs must be true or false, got 'true' \(remove the quotes\)",
    # A selection is a list of names.
    "{use_tis: true, mis_metrics: {mis_kl: false}}": r"mis_metrics must be all, core or a list of names",
    "{use_tis: true, mis_metrics: [[mis_kl]]}": r"mis_metrics must be all, .* got \[\['mis_kl'\]\]",
    "{use_tis: true, mis_metrics: true}": r"mis_metrics must be all, core or a list of names, got True",
    # Keys that YAML does not read as text.
    "{1: 2, use_tis: true}": r"keys of the configuration must be strings, got 1$",
    "{on: 2, use_tis: true}": r"must be strings, got True \(YAML reads yes, no, on and off",
    "{mis_guard: {1: warn}}": r"keys of mis_guard must be strings, got 1",
}


@pytest.mark.parametrize(("text", "message"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_wrong_types_are_refused_and_the_message_names_the_fix(text: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_yaml(text)


NEAR_MISSES = {
    "tis-level": "tis_level",
    "tis level": "tis_level",
    "TIS_LEVEL": "tis_level",
    "is_level": "tis_level",
    "tsi_upper_bound": "tis_upper_bound",
    "USE_TIS": "use_tis",
    "usetis": "use_tis",
    "use_tsi": "use_tis",
    "use_ts": "use_tis",
    "use_tis ": "use_tis",
    "use-rs": "use_rs",
    "user_rs": "use_rs",
    "RS_VETO_TRESHOLD": "rs_veto_threshold",
    "ts_uper_bound": "tis_upper_bound",
    # The hosts' flags that are read.
    "get_mismatch_metric": "get_mismatch_metrics",
    "get-mismatch-metrics": "get_mismatch_metrics",
    "calculate_per_token_los": "calculate_per_token_loss",
    "calculate_per_tokens_loss": "calculate_per_token_loss",
    "use_rollout_logprob": "use_rollout_logprobs",
    "use_rollout_log_probs": "use_rollout_logprobs",
}


@for_each("value", [True, None, {"weight": {}}])
@for_each("name, key", NEAR_MISSES.items())
def test_a_near_miss_of_our_keys_is_no_key_of_the_host(name: str, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{key}'") as refused:
        config_from_mapping({"use_tis": True, "lr": 1e-6, name: value})
    assert ascii(name) in str(refused.value)


def test_all_near_misses_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"'user_rs' \(did you mean 'use_rs'\?\); 'tis-level' \(did you mean"):
        config_from_mapping({"user_rs": True, "tis-level": "token"})


# Of slime, Miles and Megatron-LM, and words that somebody's own key may be.
LOOK_ALIKES = """
    use_r3 use_te use_ref use_opd use_opsm use_kl_loss use_tiling use_wandb use_mup use_rollout_entropy use_unbiased_kl
    tis-clip TIS_CLIP custom_tis_function_path custom_pg_loss_reducer_function_path enable_mis
    level test_mode train_mode mode list dist limit tito_model tito_allowed_append_roles
    timing_log_level ci_train_rollout_logprob_abs_diff_threshold true_on_policy_mode calculate_entropy loss_type
    qkv_format miles_router_timeout mimo_encoder_prefetch mid_level_dataset_surplus min_lr mscale misc mismatch
    mismatch_threshold misc_metrics misc_guard vis_mode log_level users use_sr use_rms use_irs use_bias rs ts is m mi
    miss sim reset_position_ids normalization gr\u00f6\u00dfe
"""


def test_names_of_the_hosts_are_not_near_misses() -> None:
    others = dict.fromkeys(LOOK_ALIKES.split(), 1)
    assert config_from_mapping({"use_tis": True, **others}) == CorrectionConfig()


def test_no_name_on_the_args_of_a_host_is_refused_whatever_its_value() -> None:
    names = set((Path(__file__).parents[1] / "data" / "host_flags" / "names.txt").read_text().split())
    assert {"eps_clip", "rollout_top_p", "tensor_model_parallel_size", "tis_clip", "mode"} < names
    others = names - {*ROWS, "tis_clip", "tis_clip_low"}
    assert len(others) > 1500
    for value in ("train", ["a"]):
        assert config_from_mapping({"use_tis": True, **dict.fromkeys(others, value)}) == CorrectionConfig()


def test_the_name_of_a_method_is_no_slip_of_the_hand() -> None:
    others = {name: ["anything"] for name in METHODS if not name.startswith(PREFIXES)}
    assert len(others) > 50
    assert config_from_mapping({"use_tis": True, **others}) == CorrectionConfig()
    assert config_from_mapping({"use_tis": True, **dict.fromkeys(others, True)}) == CorrectionConfig()


def test_names_of_another_framework_may_be_there_as_null_or_false() -> None:
    """As flags are that are not used."""
    others = [name for name in OF_OTHERS if not name.startswith(("mis", "-", "rs_gates", "tis_", "preset"))]
    assert "rollout_is" in others
    for value in (None, False):
        strays = dict.fromkeys(others, value)
        assert config_from_mapping({"use_tis": True, **strays}) == CorrectionConfig()
        assert session_for(argparse.Namespace(use_tis=True, **strays)).config == CorrectionConfig()
    for name in others:
        with pytest.raises(ValueError, match=f"'{name}' "):
            session_for(argparse.Namespace(use_tis=True, **{name: ["anything"]}))


def test_every_name_of_ours_of_several_words_is_refused_without_its_prefix() -> None:
    bare = {key.removeprefix(prefix) for key in FLAT_KEYS for prefix in PREFIXES if key.startswith(prefix)}
    assert {"veto_threshold", "level"} < bare
    for name in bare:
        if "_" in name:
            with pytest.raises(ValueError, match=f"'{name}' "):
                config_from_mapping({"use_tis": True, name: "anything"})
        else:  # A word may be anybody's.
            config_from_mapping({"use_tis": True, name: "anything"})


def test_the_hosts_own_bounds_may_be_changed_where_nothing_of_ours_runs() -> None:
    assert config_from_mapping({"use_tis": False, "tis_clip": 5.0}).metrics_only
    with pytest.raises(ValueError, match=r"tis_clip=5\.0: no effect"):
        session_for(argparse.Namespace(use_tis=True, tis_clip=5.0))
    for defaults in ({"tis_clip": 2.0, "tis_clip_low": 0.0}, {"tis_clip": 2, "tis_clip_low": None}):
        assert config_from_mapping({"use_tis": True, **defaults}) == CorrectionConfig()


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_numbers_beyond_floats_are_refused_as_out_of_range(value: int) -> None:
    for mapping in ({"tis_upper_bound": value}, {"mis_metric_max": value}):
        with pytest.raises(ValueError, match=r"(upper_bound|metric_max) must be in .* got an integer beyond 1.8e\+308"):
            config_from_mapping({"use_tis": True, **mapping})


def test_metrics_that_are_no_tuple_of_names_are_refused_in_python_too() -> None:
    for metrics in ({"mis_kl": False}, ["mis_kl"], (["mis_kl"],)):
        with pytest.raises(ValueError, match="metrics must be all, core or a tuple of names"):
            CorrectionConfig(metrics=metrics)  # type: ignore[arg-type]


WRONG_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "a level for a weight": ({"weight": "token"}, "weight must be a Weight, got 'token'"),
    "a gate for gates": ({"gates": Gate(high=3.0)}, r"gates must be a tuple or list, got Gate\("),
    "a mapping for a gate": ({"gates": [{"high": 3.0}]}, "each of gates must be a Gate, got {'high': 3.0}"),
    "a name for names": ({"warn_only": "degenerate_behavior"}, "warn_only must be .* got 'degenerate_behavior'"),
}
WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a word for a flag": ({"compile": "always"}, "compile must be auto, true or false, got 'always'"),
    "a mean of no weight": (
        {"weight": None, "normalize_over": "kept"},
        "normalize_over has no effect without a weight",
    ),
    "a weight that only measures": ({"metrics_only": True}, "metrics_only cannot be combined with a weight or gates"),
    "two gates of a name": ({"gates": [Gate(high=3.0, name="a")] * 2}, "two gates have the name 'a'"),
    "a gate whose metrics are others": (
        {"gates": [Gate(reduce="min", low=0.1, name="kept")]},
        r"duplicate metric names \(kept_seq_fraction, kept_token_fraction\): rename the gate",
    ),
}


@pytest.mark.parametrize(
    ("kind", "parts", "message"),
    [
        pytest.param(kind, *row, id=name)
        for kind, rows in ((TypeError, WRONG_PARTS), (ValueError, WRONG_VALUES))
        for name, row in rows.items()
    ],
)
def test_wrong_parts_are_refused_in_python(kind: type[Exception], parts: dict[str, Any], message: str) -> None:
    with pytest.raises(kind, match=message):
        CorrectionConfig(**parts)


def test_guards_and_limits_are_checked_in_python_too() -> None:
    with pytest.raises(ValueError, match="did you mean 'shifted_log_probs'"):
        CorrectionConfig(warn_only=frozenset({"shifted_logprobs"}))
    with pytest.raises(ValueError, match=r"unknown guards: 1\. Known: degenerate_behavior"):
        CorrectionConfig(warn_only=[1])  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match=r"max_reject_fraction must be in \[0, 1\], got 1.5"):
        CorrectionConfig(max_reject_fraction=1.5)
    with pytest.raises(TypeError, match="metrics_only must be true or false, got 1"):
        CorrectionConfig(weight=None, metrics_only=1)  # type: ignore[arg-type]
    assert from_yaml("mis_guard: warn").warn_only == frozenset(GUARD_NAMES)
    assert from_yaml("mis_guard: {shifted_log_probs: error}").warn_only == frozenset()
    with pytest.raises(TypeError, match=r"metrics_only must be true or false, got \S*True_?$"):
        CorrectionConfig(metrics_only=np.bool_(True))  # type: ignore[arg-type]


def test_nan_is_never_a_legal_bound() -> None:
    with pytest.raises(ValueError, match="tis_upper_bound"):
        config_from_mapping({"use_tis": True, "tis_upper_bound": math.nan})


WARNED = {
    "{use_tis: true, tis_lower_bound: 0.5}": "tis_lower_bound=0.5 has no effect with tis_mode: truncate",
}


@pytest.mark.parametrize(("text", "message"), WARNED.items(), ids=WARNED)
@pytest.mark.filterwarnings("ignore")
def test_legal_but_doubtful_settings_warn(text: str, message: str) -> None:
    with pytest.warns(MismatchWarning, match=message):
        from_yaml(text)


def test_bands_of_the_usual_width_and_inherited_ones_of_the_same_level_warn_nothing() -> None:
    for text in (
        "{use_tis: true, use_rs: true}",
        "{use_tis: true, tis_level: sequence, use_rs: true, rs_level: sequence}",
        "{use_tis: true, tis_level: none, tis_upper_bound: 3.0, use_rs: true, rs_level: sequence}",
        "{use_tis: true, tis_level: sequence, use_rs: true, rs_lower_bound: 0.5, rs_upper_bound: 2.0}",
        "{use_rs: true, rs_lower_bound: 0.98, rs_upper_bound: 1.001, rs_gates: [{reduce: sum, low: 0.99, high: 1.02}]}",
        "rs_veto_threshold: 0.999",
        "{use_rs: true, rs_level: geometric, rs_lower_bound: 0.999, rs_upper_bound: 1.001}",
        # Keys that have an effect through another one.
        "{use_tis: true, tis_level: none, tis_lower_bound: 0.4, use_rs: true}",
        "{use_tis: true, tis_level: none, tis_upper_bound: 3.0, use_rs: true, rs_upper_bound: 4.0}",
        "{use_tis: true, tis_mode: mask, use_rs: true, rs_level: sequence}",
        "{use_tis: true, mis_denominator: kept, rs_veto_threshold: 0.1, tis_normalize_scope: micro_batch}",
        "{use_tis: true, tis_batch_normalize: true, tis_normalize_over: valid, rs_veto_threshold: 0.1}",
        "{use_tis: true, tis_mode: mask, use_rs: true, rs_gates: [{statistic: k3, high: 0.5}]}",
    ):
        from_yaml(text)


def test_a_file_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("use_tis: true\ntis_level: tokn\n")
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*tis_level"):
        load_config(path)
    path.write_text("- use_tis\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_config(path)


# --- what 0.6 removed


def file_with(name: str) -> dict[str, Any]:
    if name.startswith("rs_gates."):
        key, _, value = name.removeprefix("rs_gates.").partition(": ")
        return {"use_rs": True, "rs_gates": [{"high": 2.0}, {key: value or 1}]}
    return {name: True} if name.startswith("mis_loss_") else {"mis_metrics": ["mis_kl", name]}


@pytest.mark.parametrize("name", REMOVED)
def test_one_error_names_the_version_and_what_to_write(name) -> None:
    with pytest.raises(ValueError, match=r"0\.6") as error:
        config_from_mapping({"use_tis": True, **file_with(name)})
    assert str(error.value) == f"{name} was removed in mis_ext 0.6: {REMOVED[name]}"


def test_other_wrong_keys_of_the_filter_are_named_too() -> None:
    with pytest.raises(ValueError, match=r"rs_gates\.level was removed.*\n.*rs_gates\[0\]: 'hihg'"):
        config_from_mapping({"use_rs": True, "rs_gates": [{"level": "token", "hihg": 2.0}]})
