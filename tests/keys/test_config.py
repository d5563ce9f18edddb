# SPDX-License-Identifier: Apache-2.0
"""Configuration: what the keys mean."""

import argparse
import math
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flat_keys import from_yaml

import mis_ext
from mis_ext import CorrectionConfig, Gate, Session, Weight, config_from_mapping
from mis_ext.correction.config import GUARD_NAMES

REPOSITORY = Path(__file__).parents[2]


def test_defaults_are_those_that_users_know() -> None:
    config = config_from_mapping({"use_tis": True})
    assert config == CorrectionConfig()
    assert config.weight == Weight(level="token", mode="truncate", high=2.0)
    assert config.gates == ()
    assert config.normalize_over is None
    assert config.denominator == "fixed"
    assert config.metrics == "core"
    assert config.warn_only == frozenset()
    assert config.max_reject_fraction == 0.1


def test_an_existing_file_that_only_says_batch_normalize_gets_data_parallel_over_kept() -> None:
    config = from_yaml("{use_tis: true, tis_batch_normalize: true}")
    assert (config.scope, config.normalize_over) == ("data_parallel", "kept")


def test_unset_bounds_are_inherited_as_in_the_reference() -> None:
    config = from_yaml("{use_tis: true, tis_mode: clip, tis_upper_bound: 4.0, use_rs: true, rs_level: sequence}")
    assert config.weight == Weight(mode="clip", low=0.25, high=4.0)
    assert config.gates == (Gate(reduce="sum", low=0.25, high=4.0),)


def test_a_cap_of_one_is_legal_for_truncation() -> None:
    assert from_yaml("{use_tis: true, tis_upper_bound: 1.0}").weight == Weight(high=1.0)


def test_the_default_of_an_unused_lower_bound_is_no_contradiction() -> None:
    assert from_yaml("{use_tis: true, tis_upper_bound: 0.5}").weight.high == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("extra", ["tis_mode: clip", "tis_mode: mask"])
def test_a_used_lower_bound_whose_default_is_above_the_cap_says_where_it_comes_from(extra: str) -> None:
    with pytest.raises(
        ValueError, match=r"tis_mode, tis_upper_bound: .* low=1\.25 \(1 / high by default\) and high=0\.8"
    ):
        from_yaml(f"{{use_tis: true, tis_upper_bound: 0.8, {extra}}}")


def test_null_means_unset() -> None:
    text = "{use_tis: true, tis_upper_bound: null, rs_lower_bound: null, use_rs: null, get_mismatch_metrics: null}"
    assert from_yaml(text) == CorrectionConfig() == from_yaml("{use_tis: null}")


def test_filters_without_a_band_need_no_bounds() -> None:
    gate = "{statistic: k3, reduce: sum, high: 0.1, action: zero}"
    config = from_yaml(f"{{use_rs: true, rs_level: none, rs_gates: [{gate}], rs_veto_threshold: 1.0e-4}}")
    assert config.gates == (Gate(statistic="k3", reduce="sum", high=0.1, action="zero"), Gate(reduce="min", low=1e-4))
    for idle in ("rs_lower_bound: 0.5", "rs_upper_bound: 2.0"):
        with pytest.raises(ValueError, match="no effect, because rs_level is none"):
            from_yaml(f"{{use_rs: true, rs_level: none, rs_gates: [{gate}], {idle}}}")
    with pytest.raises(ValueError, match="rs_level: none needs rs_gates"):
        from_yaml("{use_rs: true, rs_level: none, rs_veto_threshold: 1.0e-4}")


GATES = {
    "{reduce: token, high: 2.0}": Gate(reduce="token", high=2.0),
    "{reduce: sum, high: 2.0}": Gate(reduce="sum", high=2.0),
    "{reduce: mean, high: 1.01}": Gate(reduce="mean", high=1.01),
    "{reduce: min, low: 0.1}": Gate(reduce="min", low=0.1),
    "{reduce: max, high: 9.0}": Gate(reduce="max", high=9.0),
    "{reduce: min, low: 0.1, statistic: proximal_probability}": Gate(
        statistic="proximal_probability", reduce="min", low=0.1
    ),
    "{reduce: sum, statistic: k2, low: 0.0, high: 0.5}": Gate(statistic="k2", reduce="sum", high=0.5),
    "{reduce: sum, statistic: probability_gain, low: -3.0, high: 3.0}": Gate(
        statistic="probability_gain", reduce="sum", low=-3.0, high=3.0
    ),
    "{reduce: min, low: 0.1, high: .inf, statistic: proximal_probability}": Gate(
        statistic="proximal_probability", reduce="min", low=0.1
    ),
    "{reduce: max, low: 0.1, high: 9.0}": Gate(reduce="max", low=0.1, high=9.0),
    "{reduce: token, high: 2.0, action: zero, name: mild}": Gate(reduce="token", high=2.0, action="zero", name="mild"),
    "{statistic: k3, high: 2.0}": Gate(statistic="k3", high=2.0),
    "{reduce: token, high: 2.0, name: null, low: null}": Gate(reduce="token", high=2.0),
}


@pytest.mark.parametrize(("text", "gate"), GATES.items(), ids=GATES)
def test_a_filter_is_what_its_keys_say(text: str, gate: Gate) -> None:
    assert from_yaml(f"{{use_rs: true, rs_level: none, rs_gates: [{text}]}}").gates == (gate,)
    flat = f"{{use_rs: true, rs_lower_bound: 0.5, rs_upper_bound: 3.0, rs_gates: [{text}]}}"
    assert from_yaml(flat).gates[1:] == (gate,)


def test_all_filters_of_a_list_are_read_in_their_order() -> None:
    text = ", ".join([*GATES][:3])
    assert from_yaml(f"{{use_rs: true, rs_level: none, rs_gates: [{text}]}}").gates == (*[*GATES.values()][:3],)


def test_a_bound_of_a_weight_at_an_open_end_is_none() -> None:
    assert Weight(mode="unbounded", high=math.inf) == Weight(mode="unbounded")
    assert Weight(low=0.0) == Weight()
    assert Weight(when="stale", high=1.0).edges == (-math.inf, 0.0)
    assert Weight(mode="clip", low=0.0).edges == (-math.inf, math.log(2.0))


ONE_METRIC = ("mis_k3_kl",)
VETO = Gate(reduce="min", low=1e-4)
EXCHANGES = {
    "numbers of responses alone": (CorrectionConfig(metrics=ONE_METRIC), False, True),
    "a metric of the group": (CorrectionConfig(metrics=("mis_ratio_max",)), True, True),
    "a mean weight": (CorrectionConfig(metrics=ONE_METRIC, normalize_over="kept"), True, True),
    "a kept denominator": (CorrectionConfig(metrics=ONE_METRIC, denominator="kept"), True, True),
    "of the micro-batch": (CorrectionConfig(metrics=ONE_METRIC, denominator="kept", scope="micro_batch"), False, True),
    "weights of responses": (CorrectionConfig(weight=Weight(level="sequence"), metrics=ONE_METRIC), False, False),
    "a veto": (CorrectionConfig(gates=(VETO,), metrics=ONE_METRIC), False, False),
    "a veto that zeroes": (CorrectionConfig(gates=(replace(VETO, action="zero"),), metrics=ONE_METRIC), False, True),
    "a veto and a band": (CorrectionConfig(gates=(VETO, Gate(high=2.0)), metrics=ONE_METRIC), False, True),
    "a band that zeroes": (
        CorrectionConfig(weight=Weight(level="sequence"), gates=(Gate(high=2.0, action="zero"),), metrics=ONE_METRIC),
        False,
        False,
    ),
    "measurement": (CorrectionConfig(weight=None, metrics_only=True, metrics=ONE_METRIC), False, False),
}


@pytest.mark.parametrize(("config", "totals", "bits"), EXCHANGES.values(), ids=EXCHANGES)
def test_ranks_exchange_totals_and_bits_of_tokens_only_where_a_result_needs_them(config, totals, bits) -> None:
    assert (config.needs_group, config.rejects_single_tokens) == (totals, bits)


def test_lists_and_sets_will_do_for_tuples_and_frozen_sets() -> None:
    gate = Gate(high=3.0)
    config = CorrectionConfig(gates=[gate], warn_only=["shifted_log_probs"])  # type: ignore[arg-type]
    expected = CorrectionConfig(gates=(gate,), warn_only=frozenset({"shifted_log_probs"}))
    assert config == expected == CorrectionConfig(gates=(gate,), warn_only={"shifted_log_probs"})  # type: ignore[arg-type]
    assert hash(config) == hash(expected)


def test_what_is_measured_without_a_correction_has_no_trace_of_it() -> None:
    measured = CorrectionConfig(weight=None, metrics_only=True)
    assert from_yaml("{get_mismatch_metrics: true, tis_batch_normalize: false}") == measured
    assert from_yaml("{get_mismatch_metrics: true, use_tis: true}") == CorrectionConfig()
    assert from_yaml("{calculate_per_token_loss: true}") == CorrectionConfig(per_token_loss=True)


def test_every_key_of_what_is_measured_reaches_the_configuration() -> None:
    keys = "mis_metrics: all, mis_metric_max: 3.0, mis_max_reject_fraction: 0.5, mis_compile: false"
    text = f"{{use_tis: true, {keys}, mis_staleness: true, mis_guard: warn, calculate_per_token_loss: true}}"
    fields = {"metrics": "all", "metric_max": 3.0, "max_reject_fraction": 0.5, "compile": False, "staleness": True}
    assert from_yaml(text) == CorrectionConfig(**fields, warn_only=frozenset(GUARD_NAMES), per_token_loss=True)


def test_flags_of_the_hosts_are_not_taken_for_ours() -> None:
    args = argparse.Namespace(use_tis=True, tis_clip=2.0, tis_clip_low=0, lr=1e-6, custom_tis_function_path="x")
    assert config_from_mapping(vars(args)) == CorrectionConfig()


def test_an_explicit_use_rs_false_switches_its_keys_off_without_complaint() -> None:
    text = "{use_tis: true, use_rs: false, rs_level: geometric, rs_lower_bound: 0.9, rs_upper_bound: 1.1}"
    assert from_yaml(text) == CorrectionConfig()


def test_the_veto_needs_rejection_only_in_the_compatible_form() -> None:
    veto = Gate(reduce="min", low=1e-4)
    assert from_yaml("{use_tis: true, rs_veto_threshold: 1.0e-4}").gates == (veto,)
    required = "use_tis: true, rs_veto_threshold: 1.0e-4, rs_veto_requires_rs: true"
    assert from_yaml(f"{{{required}, use_rs: false}}").gates == ()
    assert from_yaml(f"{{{required}, use_rs: true}}").gates[1:] == (veto,)


def test_whoever_takes_a_configuration_takes_a_mapping_that_spells_it() -> None:
    streams = [[torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])], [torch.tensor([-1.5, -1.0]), torch.tensor([-0.4])]]
    lists = dict(zip(("train_log_probs", "rollout_log_probs"), streams, strict=True))
    lists["loss_masks"] = [torch.ones(2), torch.ones(1)]
    batch = {"proximal_logprobs": streams[0][0][None], "behavior_logprobs": streams[1][0][None]}
    batch["response_mask"] = torch.ones(1, 2)
    keys = {"use_tis": True, "tis_upper_bound": 1.5, "lr": 1e-6}
    config = CorrectionConfig(weight=Weight(high=1.5))
    for given in (config, keys, types.MappingProxyType(keys)):
        (weights_T, _), _, _ = mis_ext.compute_mis_weights(given, **lists)
        assert weights_T.tolist() == pytest.approx([1.5, math.exp(-1.0)])
        assert mis_ext.correct_padded(given, **batch).weights[0].tolist() == weights_T.tolist()
        assert Session(given).config == config
    for call in (
        lambda given: mis_ext.compute_mis_weights(given, **lists),
        lambda given: mis_ext.correct_padded(given, **batch),
        Session,
    ):
        with pytest.raises(TypeError, match=r"a CorrectionConfig or a mapping of keys, got Namespace; .* vars\(args\)"):
            call(argparse.Namespace(**keys))
        with pytest.raises(TypeError, match=r"a CorrectionConfig or a mapping of keys, got str$"):
            call("mis")
        with pytest.raises(ValueError, match="did you mean 'tis_upper_bound'"):
            call({"tis_uper_bound": 1.5})
        with pytest.raises(ValueError, match="mis_loss_mode='bypass': no effect, because a correction alone"):
            call(keys | {"mis_loss_mode": "bypass"})


def test_metric_lists_keep_the_order_of_emission() -> None:
    config = CorrectionConfig(metrics=("mis_kept_seq_fraction", "mis_kl"))
    assert config.metric_names == ("mis_kl", "mis_kept_seq_fraction")


def test_a_configuration_is_frozen_and_checked_again_when_changed() -> None:
    config = CorrectionConfig()
    with pytest.raises(AttributeError):
        config.scope = "micro_batch"  # type: ignore[misc]
    with pytest.raises(ValueError, match="scope"):
        config.replace(scope="everything")
