# SPDX-License-Identifier: Apache-2.0
"""Every preset loads, says what it is for, and is explained in the pages."""

import re
from pathlib import Path

import pytest
from flat_keys import from_yaml

from mis_ext import list_presets, load_config, preset
from mis_ext.tools.cli import main

REPOSITORY = Path(__file__).parents[2]
METHODS = sorted((REPOSITORY / "yaml").glob("*.yaml"))


def test_the_compatible_preset_can_lose_its_veto() -> None:
    text = (REPOSITORY / "yaml" / "miles_compat.yaml").read_text()
    without = from_yaml(text.replace("rs_veto_threshold: 1.0e-4", "rs_veto_threshold: null"))
    assert without == preset("miles_compat").replace(gates=preset("miles_compat").gates[:1])


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_every_preset_loads_and_says_what_when_and_where_from(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 17
    assert [re.match(r"# (\w+):", line)[1] for line in lines[:3]] == ["What", "When", "Source"]
    assert load_config(path) == preset(path.stem)
    if path.stem != "metrics_only":
        assert not preset(path.stem).metrics_only


def test_the_command_lists_what_each_preset_says_of_itself(capsys) -> None:
    assert main(["presets"]) == 0
    # In lines of 80 columns; here, in one.
    listed = re.sub(r"\n {8}", " ", capsys.readouterr().out)
    for path in METHODS:
        what, when, source = (line.removeprefix("# ") for line in path.read_text().splitlines()[:3])
        assert f"{path.stem}\n  {what}\n  {when}\n" in listed
        assert source not in listed


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_the_command_prints_a_file_that_loads_as_the_preset(path: Path, capsys, tmp_path) -> None:
    assert main(["presets", path.stem]) == 0
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    assert copy.read_bytes() == path.read_bytes()
    assert load_config(copy) == preset(path.stem)


def test_presets_show_the_core_metrics_but_where_one_compares_or_measures() -> None:
    shown = {name: preset(name).metrics for name in list_presets()}
    assert {name for name, metrics in shown.items() if metrics == "all"} == {"miles_compat", "metrics_only"}
    assert set(shown.values()) == {"all", "core"}


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
    }
    with pytest.raises(ValueError, match="did you mean 'icepop'"):
        preset("icepops")


def test_the_default_preset_rejects_nothing_until_the_evidence_says_otherwise() -> None:
    assert not preset("mis").gates
