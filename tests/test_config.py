"""Configuration: what is legal, what is refused, and that both spellings mean the same."""

import argparse
import math
import re
from pathlib import Path

import pytest
import yaml

import mis_ext
from mis_ext import Band, CorrectionConfig, GateFactor, WeightFactor, list_presets, load_config, preset
from mis_ext.config import GUARD_NAMES
from mis_ext.flat_keys import FLAT_KEYS

REPOSITORY = Path(__file__).parents[1]
PRESETS = sorted((REPOSITORY / "yaml").glob("*.yaml"))


def from_yaml(text: str) -> CorrectionConfig:
    return CorrectionConfig.from_mapping(yaml.safe_load(text))


def test_defaults_are_those_that_users_know() -> None:
    config = CorrectionConfig.from_mapping({"use_tis": True})
    assert config == CorrectionConfig()
    assert config.weight == WeightFactor(level="token", mode="truncate", band=Band(high=2.0))
    assert config.gates == ()
    assert config.normalize_over is None
    assert config.denominator == "fixed"


def test_an_existing_file_that_only_says_batch_normalize_gets_data_parallel_over_kept() -> None:
    config = from_yaml("{use_tis: true, tis_batch_normalize: true}")
    assert (config.scope, config.normalize_over) == ("data_parallel", "kept")


def test_unset_bounds_are_inherited_as_in_the_reference() -> None:
    config = from_yaml("{use_tis: true, tis_mode: clip, tis_upper_bound: 4.0, use_rs: true, rs_level: sequence}")
    assert config.weight is not None
    assert config.weight.band == Band(low=0.25, high=4.0)
    assert config.gates == (GateFactor(level="sequence", band=Band(low=0.25, high=4.0)),)


def test_a_cap_of_one_is_legal_for_truncation() -> None:
    config = from_yaml("{use_tis: true, tis_upper_bound: 1.0}")
    assert config.weight is not None
    assert config.weight.band == Band(high=1.0)


def test_null_means_unset() -> None:
    assert from_yaml("{use_tis: true, tis_upper_bound: null, rs_lower_bound: null}") == CorrectionConfig()


NATIVE_AND_FLAT = {
    "token truncation": (
        "mis: {weight: {level: token, mode: truncate, high: 2.0}}",
        "{use_tis: true, tis_level: token, tis_mode: truncate, tis_upper_bound: 2.0}",
    ),
    "recommended default": (
        """mis:
             weight: {level: token, high: 2.0}
             gates: [{level: geometric, low: 0.99, high: 1.01}, {level: sequence_min, low: 1.0e-4}]
             normalize_over: kept
             metrics: core""",
        (REPOSITORY / "yaml" / "mis.yaml").read_text(),
    ),
    "every veto, no weight": (
        """mis:
             gates:
               - {level: sequence, low: 0.5, high: 2.0}
               - {level: sequence_min, low: 1.0e-4}
               - {level: sequence_max, high: 100.0}
               - {level: sequence_min, low: 1.0e-6, statistic: proximal_probability}
             denominator: kept
             scope: micro_batch
             guard: {shifted_log_probs: warn}
             max_reject_fraction: 0.2""",
        """{use_tis: true, tis_level: none, use_rs: true, rs_level: sequence, rs_lower_bound: 0.5, rs_upper_bound: 2.0,
            rs_veto_threshold: 1.0e-4, rs_veto_upper_threshold: 100.0, rs_veto_probability: 1.0e-6,
            mis_denominator: kept, tis_normalize_scope: micro_batch, mis_guard: {shifted_log_probs: warn},
            mis_max_reject_fraction: 0.2}""",
    ),
    "mask": (
        "mis: {weight: {level: sequence, mode: mask, low: 0.5, high: 2.0}}",
        "{use_tis: true, tis_level: sequence, tis_mode: mask, tis_lower_bound: 0.5, tis_upper_bound: 2.0}",
    ),
    "measure": ("{use_tis: false, mis: {metrics: core}}", "{use_tis: false, mis_metrics: core}"),
}


@pytest.mark.parametrize(("native", "flat"), NATIVE_AND_FLAT.values(), ids=NATIVE_AND_FLAT)
def test_native_and_flat_spellings_give_the_same_object(native: str, flat: str) -> None:
    assert from_yaml(native) == from_yaml(flat)
    assert hash(from_yaml(native)) == hash(from_yaml(flat))


REFUSED = {
    "{use_tis: true, tis_uper_bound: 2.0}": r"tis_uper_bound.*did you mean 'tis_upper_bound'",
    "{use_tis: true, mis_metric: all}": r"mis_metric.*did you mean 'mis_metric",
    "{use_tis: true, tis_level: tokn}": r"tis_level must be one of token \| sequence .*'tokn'.*did you mean 'token'",
    "{use_tis: false, tis_level: tokn}": r"tis_level",
    "{use_tis: true, rs_level: mean}": r"rs_level",
    "{use_tis: true, tis_mode: cap}": r"tis_mode must be one of truncate \| clip",
    "{use_tis: true, tis_upper_bound: 0.5}": r"tis_upper_bound must be in \[1, inf\], got 0.5",
    "{use_tis: true, tis_upper_bound: .inf}": r"mode: unbounded",
    "{use_tis: true, tis_mode: clip, tis_lower_bound: 1.5}": r"tis_lower_bound must be in \[0, 1\], got 1.5",
    "{use_tis: true, tis_mode: mask, tis_upper_bound: 1.0}": r"tis_lower_bound must be below tis_upper_bound",
    "{use_tis: true, use_rs: true, rs_upper_bound: 1.0, rs_lower_bound: 1.0}": r"rs_lower_bound must be below",
    "{use_tis: true, rs_veto_threshold: 0.0}": r"rs_veto_threshold",
    "{use_tis: true, rs_veto_upper_threshold: 0.5}": r"rs_veto_upper_threshold",
    "{use_tis: true, rs_veto_probability: 2.0}": r"rs_veto_probability",
    "{use_tis: true, tis_batch_normalize: true, tis_normalize_scope: batch}": r"tis_normalize_scope",
    "{use_tis: true, tis_batch_normalize: true, tis_normalize_over: all}": r"tis_normalize_over",
    "{use_tis: true, mis_denominator: survivors}": r"mis_denominator",
    "{use_tis: true, mis_max_reject_fraction: 1.5}": r"mis_max_reject_fraction must be in \[0, 1\]",
    "{use_tis: true, mis_guard: off}": r"mis_guard",
    "{use_tis: true, mis_guard: {shifted_logprobs: warn}}": r"did you mean 'shifted_log_probs'",
    "{use_tis: true, mis_metrics: most}": r"metrics must be all, core or a list",
    "{use_tis: true, mis_metrics: [mis_k4_kl]}": r"'mis_k4_kl'.*did you mean 'mis_k3_kl'",
    "{use_tis: true, mis_metrics: [mis_tis_clip_fraction_low]}": r"not emitted by this configuration",
    # Keys without effect.
    "{use_tis: true, rs_level: geometric}": r"rs_level='geometric': no effect, because use_rs is not set",
    "{use_tis: true, rs_lower_bound: 0.9}": r"rs_lower_bound=0.9: no effect",
    "{use_tis: true, tis_normalize_scope: rollout}": r"no effect, because tis_batch_normalize is not set",
    "{use_tis: true, tis_normalize_over: valid}": r"no effect, because tis_batch_normalize is not set",
    "{use_tis: true, tis_level: none, use_rs: true, tis_mode: clip}": r"no effect, because tis_level is none",
    "{use_tis: true, tis_mode: unbounded, tis_upper_bound: 3.0}": r"no effect, because tis_mode is unbounded",
    "{use_tis: true, tis_level: none, use_rs: true, tis_batch_normalize: true}": r"tis_batch_normalize: true has no",
    "{use_tis: true, rs_veto_requires_rs: true}": r"no effect, because no veto is set",
    "{use_tis: true, tis_level: none}": r"neither a weight nor a gate",
    # The native form.
    "mis: {wight: {level: token}}": r"'wight' \(did you mean 'weight'\?\)",
    "mis: {weight: {level: token}, scope: rollout}": r"scope='rollout': no effect",
    "mis: {weight: {levle: token}}": r"did you mean 'level'",
    "mis: {gates: [{level: token}]}": r"gates\[0\]\.a gate needs low or high",
    "mis: {gates: [{low: 0.5}]}": r"gates\[0\] needs a level",
    "mis: {gates: [{level: sequence_min, high: 2.0}]}": r"sequence_min needs low",
    "mis: {gates: [{level: sequence_max, low: 0.5}]}": r"sequence_max needs a finite high",
    "mis: {gates: [{level: token, low: 0.5, statistic: proximal_probability}]}": r"needs level: sequence_min",
    "mis: {weight: {mode: unbounded, high: 3.0}}": r"unbounded takes no bounds",
    "mis: {weight: {mode: truncate, low: 0.5}}": r"truncate has no low bound",
    "{mis: {weight: {level: token}}, tis_level: token}": r"two spellings",
    "mis: {gates: [{level: sequence_min, low: 0.1}, {level: sequence_min, low: 0.2}]}": r"two vetoes of the same kind",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_legal_is_refused_with_key_and_range(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_yaml(text)


WRONG_TYPES = {
    "{use_tis: true, rs_veto_threshold: 1e-4}": r"rs_veto_threshold .* write 1\.0e-4, not 1e-4",
    "{use_tis: true, rs_veto_upper_threshold: 1e4}": r"write 1\.0e\+4, not 1e4",
    "{use_tis: true, tis_upper_bound: '2.0'}": r"tis_upper_bound must be a number.*remove the quotes",
    "{use_tis: true, tis_upper_bound: inf}": r"YAML writes infinity as \.inf",
    "{use_tis: true, tis_upper_bound: true}": r"tis_upper_bound must be a number",
    "{use_tis: 1}": r"use_tis must be true or false, got 1",
    "{use_tis: true, use_rs: 'yes'}": r"use_rs must be true or false",
    "{use_tis: true, tis_batch_normalize: 1}": r"tis_batch_normalize must be true or false",
    "{use_tis: true, use_rs: true, rs_gates: {level: token}}": r"rs_gates must be a list",
    "mis: [weight]": r"mis must be a mapping",
    "mis: {gates: [{level: token, high: '2'}]}": r"gates\[0\]\.high must be a number",
}


@pytest.mark.parametrize(("text", "message"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_wrong_types_are_refused_and_the_message_names_the_fix(text: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_yaml(text)


def test_nan_is_never_a_legal_bound() -> None:
    with pytest.raises(ValueError, match="tis_upper_bound"):
        CorrectionConfig.from_mapping({"use_tis": True, "tis_upper_bound": math.nan})


def test_flags_of_the_hosts_are_not_taken_for_ours() -> None:
    args = argparse.Namespace(use_tis=True, tis_clip=2.0, tis_clip_low=0, lr=1e-6, custom_tis_function_path="x")
    assert CorrectionConfig.from_mapping(vars(args)) == CorrectionConfig()


def test_an_explicit_use_rs_false_switches_its_keys_off_without_complaint() -> None:
    text = "{use_tis: true, use_rs: false, rs_level: geometric, rs_lower_bound: 0.9, rs_upper_bound: 1.1}"
    assert from_yaml(text) == CorrectionConfig()


def test_the_veto_needs_rejection_only_in_the_compatible_form() -> None:
    veto = GateFactor(level="sequence_min", band=Band(low=1e-4))
    assert from_yaml("{use_tis: true, rs_veto_threshold: 1.0e-4}").gates == (veto,)
    assert from_yaml("{use_tis: true, rs_veto_threshold: 1.0e-4, rs_veto_requires_rs: true}").gates == ()


WARNED = {
    "{use_tis: true, tis_lower_bound: 0.5}": "tis_lower_bound=0.5 has no effect with tis_mode: truncate",
    "{use_tis: true, use_rs: true, rs_level: geometric}": "come from the token-level",
    "{use_tis: true, use_rs: true, rs_level: geometric, rs_lower_bound: 0.5, rs_upper_bound: 1.01}": "almost never",
    "{use_tis: true, tis_level: geometric, tis_mode: mask, tis_upper_bound: 2.0}": "almost never fires",
}


@pytest.mark.parametrize(("text", "message"), WARNED.items(), ids=WARNED)
@pytest.mark.filterwarnings("ignore")
def test_legal_but_doubtful_settings_warn(text: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        from_yaml(text)


def test_metric_lists_keep_the_order_of_emission() -> None:
    config = CorrectionConfig(metrics=("mis_kept_seq_fraction", "mis_kl"))
    assert config.selected_metrics == ("kl", "kept_seq_fraction")


def test_a_configuration_is_frozen_and_checked_again_when_changed() -> None:
    config = CorrectionConfig()
    with pytest.raises(AttributeError):
        config.scope = "rollout"  # type: ignore[misc]
    with pytest.raises(ValueError, match="scope"):
        config.replace(scope="everything")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_and_says_what_when_and_where_from(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 15
    assert [re.match(r"# (\w+):", line)[1] for line in lines[:3]] == ["What", "When", "Source"]
    assert load_config(path) == preset(path.stem)
    if path.stem != "metrics_only":
        assert not preset(path.stem).metrics_only


def test_the_presets_that_the_readme_names_exist() -> None:
    assert set(list_presets()) == {
        "geometric_gate_token_weight",
        "geometric_mis",
        "icepop",
        "metrics_only",
        "miles_compat",
        "mis",
        "sequence_mis",
        "sequence_tis",
        "token_tis",
    }
    with pytest.raises(ValueError, match="did you mean 'token_tis'"):
        preset("token_tiss")


def test_a_file_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("use_tis: true\ntis_level: tokn\n")
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*tis_level"):
        load_config(path)
    path.write_text("- use_tis\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_config(path)


def test_the_public_names_are_there() -> None:
    assert all(hasattr(mis_ext, name) for name in mis_ext.__all__)


def test_the_readme_explains_every_key_guard_and_preset() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    names = [*FLAT_KEYS, *GUARD_NAMES, *list_presets()]
    assert [name for name in names if f"`{name}`" not in readme] == []


def test_the_readme_explains_every_metric() -> None:
    glossary = (REPOSITORY / "README.md").read_text().split("## Metrics")[1].split("**What they cost.**")[0]
    explained = {name for row in re.findall(r"^\| (.*?) \|", glossary, re.MULTILINE) for name in row.split("`")[1::2]}
    spelled = {name.replace("low/high", edge) for name in explained for edge in ("low", "high")}
    gates = GateFactor(level="token", band=Band(high=3.0)), GateFactor(level="sequence_min", band=Band(low=0.1))
    configs = [
        CorrectionConfig(weight=WeightFactor(mode=mode), normalize_over="kept", denominator="kept", gates=gates)
        for mode in ("truncate", "clip", "mask")
    ]
    emitted = {name for config in configs for name in config.selected_metrics}
    assert emitted - spelled == set()
