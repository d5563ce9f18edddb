# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of the keys: what it refuses, the loader refuses too; what ships, it takes."""

import json
import re
import warnings
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

import mis_ext
from mis_ext.keys.reading import flat_keys
from mis_ext.keys.rows import FLAT_KEYS, GATE_ROWS, PREFIXES, ROWS, json_schema
from mis_ext.methods import METHODS
from mis_ext.tools.cli import main
from mis_ext.tools.configuration_files import method_yaml

fastjsonschema = pytest.importorskip("fastjsonschema")

PRESETS = sorted((Path(__file__).parents[2] / "yaml").glob("*.yaml"))
WHOLE_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss", "use_tis": True}
WORDS = ["token", "sequence", "geometric", "none", "truncate", "clip", "mask", "kept", "valid", "fixed"]
WORDS += ["mean", "sum", "k3", "ratio", "zero", "warn", "core", "all", "bypass", "constant", "current", "fused", "bad"]
NUMBERS = [-1, 0, 1e-4, 0.5, 1, 2.0, 10, 1e9]


@cache
def validator() -> Any:
    return fastjsonschema.compile(json_schema())


def validates(keys: dict[str, Any]) -> bool:
    try:
        validator()(keys)
    except fastjsonschema.JsonSchemaException:
        return False
    return True


def loads(keys: dict[str, Any]) -> bool:
    """Whether a run with the whole loss takes them, whose keys count too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mis_ext.check_setup(Namespace(**WHOLE_LOSS | keys))
    except (TypeError, ValueError):
        return False
    return True


def test_the_file_beside_the_presets_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (named,) = {re.search(r"^# yaml-language-server: \$schema=(.+)$", path.read_text(), re.M)[1] for path in PRESETS}
    text = PRESETS[0].with_name(named).read_text(encoding="utf-8")
    assert main(["schema"]) == 0
    assert text == capsys.readouterr().out, "run mis-ext schema > yaml/mis.schema.json"
    assert json.loads(text) == json_schema()


def test_every_key_is_there_with_what_it_is() -> None:
    keys = json_schema()["properties"]
    assert keys.keys() == {*ROWS}
    assert json_schema()["definitions"]["gate"]["properties"].keys() == {*GATE_ROWS}
    assert all(node["description"] for node in keys.values())
    for name, row in METHODS.items():
        assert json_schema()["definitions"][f"method_{name}"]["properties"].keys() == {"name", *row.defaults}


def test_the_defaults_are_those_of_the_loader() -> None:
    default = {key: node["default"] for key, node in json_schema()["properties"].items() if "default" in node}
    alone = {"mis_loss_unbiased_kl", "mis_loss_kl_tokens", "tis_normalize_over", "tis_normalize_scope"}
    alone |= {"rs_level", "rs_staleness_level", "rs_veto_requires_rs"}
    given = {key: value for key, value in default.items() if key not in alone and not key.startswith("mis_loss_")}
    assert mis_ext.config_from_mapping(given) == mis_ext.config_from_mapping({"use_tis": True})
    gate = json_schema()["definitions"]["gate"]["properties"]
    gate = {key: node["default"] for key, node in gate.items() if "default" in node}
    assert mis_ext.Gate(high=2.0, **gate) == mis_ext.Gate(high=2.0)


@for_each("key", FLAT_KEYS)
def test_a_row_says_what_is_legal_and_the_error_says_the_same(key: str) -> None:
    assert ROWS[key].text
    with pytest.raises((TypeError, ValueError)) as raised:
        ROWS[key].values.check(key, {"a": 1})
    assert key in str(raised.value)
    words = ROWS[key].values.legal
    if " | " in words and "," not in words:
        assert all(word in str(raised.value) for word in words.split(" | "))
    elif words.startswith("number in "):
        assert words.removeprefix("number in ") in str(raised.value)


def test_the_command_describes_a_key_and_refuses_another(capsys) -> None:
    assert main(["keys", "rs_max_staleness"]) == 0
    shown = capsys.readouterr().out
    assert all(
        part in shown for part in ("rs_max_staleness", "number in [0, 1e+06)", "unit: updates", "Needs mis_stal")
    )
    assert main(["keys", "--json"]) == 0
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == [*ROWS]
    with pytest.raises(SystemExit):
        main(["keys", "tis_levl"])
    assert "tis_level" in capsys.readouterr().err


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_validates_as_it_is_and_as_its_keys_are_written(path: Path) -> None:
    assert validates(yaml.safe_load(path.read_text()))
    config = mis_ext.preset(path.stem)
    if not config.metrics_only:
        assert validates(flat_keys(config))


@for_each("name", METHODS)
def test_the_file_of_a_method_validates_and_an_unknown_parameter_does_not(name: str) -> None:
    row = METHODS[name]
    assert validates(yaml.safe_load(method_yaml(row)))
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in row.defaults.items()}
    assert validates({"mis_loss_method": {"name": name, **plain}})
    for key in row.defaults:
        assert not validates({"mis_loss_method": {"name": name, f"{key}_": 1.0}})


def test_bounds_and_name_of_a_filter_may_be_null() -> None:
    keys = {"use_rs": True, "rs_gates": [{"high": 2.0, "low": None, "name": None}]}
    assert mis_ext.config_from_mapping(keys).gates[1] == mis_ext.Gate(high=2.0)
    assert validates(keys)


@for_each("key", FLAT_KEYS)
def test_a_wrong_word_a_wrong_type_and_a_misspelling_are_refused(key: str) -> None:
    for wrong in ({key: "no such word"}, {key: {"a": 1}}):
        assert not validates(wrong)
        assert not loads(wrong)
    assert not loads({f"{key}x": 1})
    # Without a prefix of ours it may be the host's: only the loader looks for near misses.
    assert validates({f"{key}x": 1}) == (not key.startswith(PREFIXES))


@pytest.mark.parametrize(
    "text",
    [
        "{use_rs: true, rs_gates: [{higj: 2.0}]}",
        "{use_rs: true, rs_gates: [{high: '2'}]}",
        "{use_rs: true, rs_gates: {high: 2.0}}",
        "mis_guard: {no_such_guard: warn}",
        "tis_cap: 2.0",
        "tis_upper_bound: 0",
        "tis_upper_bound: 1e-4",
        "tis_level: null",
        "rs_veto_threshold: 1.5",
        "rs_veto_upper_threshold: 0.5",
        "mis_max_reject_fraction: -0.1",
        "mis_guard: maybe",
        "mis_metrics: most",
        "mis_loss_method: icepops",
        "mis_loss_method: {high: 2.0}",
        "mis_loss_method: {name: ctpo, nothing: 1}",
    ],
)
def test_a_wrong_file_is_refused_by_both(text: str) -> None:
    keys = yaml.safe_load(text)
    assert not validates(keys)
    assert not loads(keys)


@pytest.mark.parametrize("text", ["tis_clip: 2.0", "reward_key: score"])
def test_what_is_the_hosts_or_unset_is_taken(text: str) -> None:
    assert validates(yaml.safe_load(text))


VALUES = st.sampled_from([*WORDS, *NUMBERS, True, False, None])
GATES = st.lists(st.dictionaries(st.sampled_from([*GATE_ROWS]), VALUES, min_size=1, max_size=3), max_size=2)


@given(st.dictionaries(st.sampled_from(FLAT_KEYS), VALUES, max_size=3), GATES)
def test_what_a_run_takes_validates(keys: dict[str, Any], gates: list[Any]) -> None:
    drawn = {"use_tis": True, **keys} | ({"use_rs": True, "rs_gates": gates} if gates else {})
    assert validates(drawn) or not loads(drawn)
