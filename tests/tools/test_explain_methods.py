# SPDX-License-Identifier: Apache-2.0
"""`mis-ext explain` of published methods."""

import json
import math

import pytest
from rows import for_each

import mis_ext
from mis_ext import CorrectionConfig, Gate, Weight
from mis_ext.loss.settings import LossSettings
from mis_ext.methods import METHODS
from mis_ext.methods.catalogue import choose_method
from mis_ext.tools.cli import main
from mis_ext.tools.configuration_files import NO_CORRECTION, method_yaml
from mis_ext.tools.explain import Circumstances, GaussianLaw, explain_config, traps_of

pytest.importorskip("rich")
K3, LENGTH = 5e-3, 40
SEQUENCE_LEVEL = CorrectionConfig(weight=Weight(level="sequence"))


def as_loss(**chosen) -> LossSettings:
    return LossSettings(method=choose_method("mis_loss_method", chosen))


def test_the_numbers_of_a_key_that_the_hook_could_do_are_exactly_the_hooks() -> None:
    found = explain_config(NO_CORRECTION, loss=as_loss(name="icepop", high=1.05), k3=K3, length=LENGTH)
    gate = Gate(low=0.5, high=1.05, action="zero")
    wanted = explain_config(CorrectionConfig(weight=Weight(mode="unbounded"), gates=(gate,)), k3=K3, length=LENGTH)
    assert found.effect == wanted.effect
    assert found.at_lengths == wanted.at_lengths
    assert found.traps == wanted.traps
    assert [*found.effect.accepted.values()] == [GaussianLaw(K3, LENGTH).acceptance(gate)]


def test_of_a_method_that_the_hook_cannot_do_the_law_predicts_nothing() -> None:
    found = explain_config(NO_CORRECTION, loss=as_loss(name="dppo_tv"), k3=K3, length=LENGTH)
    unknown = {name for name, value in vars(found.effect).items() if value != value}
    assert unknown == {*vars(found.effect)} - {"k3", "length", "accepted", "ess_token", "ess_sequence", "ess_geometric"}
    assert any("mis-ext report --method" in note for note in found.notes)
    assert not found.is_known


def test_traps_of_a_method_are_those_of_its_kind() -> None:
    def names(name: str, *, k3: float, length: float, is_stale: bool = False) -> list[str]:
        found = Circumstances(
            k3=k3,
            length=length,
            ess_sequence=math.exp(-2 * k3 * length),
            kept_tokens=1.0,
            kept_sequences=1.0,
            is_stale=is_stale,
        )
        return [trap.name for trap in traps_of(NO_CORRECTION, found, METHODS[name].method)]

    assert names("reinforce_sequence_snis", k3=1e-3, length=2048) == ["hopeless_sequences"]
    assert names("reinforce_sequence_snis", k3=1e-4, length=2048) == []
    assert names("aipo", k3=1e-3, length=2048, is_stale=True) == []
    assert names("mis_po", k3=1e-3, length=2048, is_stale=True) == ["stale_gates"]
    assert names("mis_po", k3=1e-3, length=2048) == []


@pytest.mark.parametrize(
    ("config", "name", "advice"),
    [
        (SEQUENCE_LEVEL, "aipo", "use the token or geometric level, or"),
        (NO_CORRECTION, "reinforce_sequence_snis", "use a method of tokens, or"),
        (SEQUENCE_LEVEL, "reinforce_sequence_snis", "use the token or geometric level and a method of tokens, or"),
    ],
)
def test_the_advice_is_for_the_configuration_and_the_method(config, name, advice) -> None:
    found = Circumstances(k3=0.1, length=64, ess_sequence=0.01, kept_tokens=1.0, kept_sequences=1.0)
    (trap,) = traps_of(config, found, METHODS[name].method)
    assert trap.name == "hopeless_sequences"
    assert f"few sequences dominate; {advice} shorter responses" in trap.text


def test_traps_of_a_method_reach_the_explanation() -> None:
    loss = as_loss(name="reinforce_sequence_snis")
    found = explain_config(NO_CORRECTION, loss=loss, k3=0.1, length=16)
    assert "hopeless_sequences" in [trap.name for trap in found.traps]


def explained(capsys, *arguments: str) -> dict:
    assert main(["explain", *arguments, "--json", "--length", "4"]) == 0
    return json.loads(capsys.readouterr().out)


@for_each("name", [name for name in METHODS if name not in mis_ext.list_presets()][::3])
def test_every_method_is_explained_by_its_name_as_its_file_is(name, tmp_path, capsys) -> None:
    found = explained(capsys, name)
    row = METHODS[name]
    assert found["about"]["Formula"] == row.formula
    assert found["about"]["Source"] == row.paper
    assert found["about"]["Log-probs"] == ", ".join(row.method.policies)
    assert " ".join(found["about"]["Flags"].split()) in " ".join(method_yaml(row).replace("\n# ", " ").split())
    path = tmp_path / "method.yaml"
    path.write_text(method_yaml(row))
    file = explained(capsys, str(path))
    for part in ("effect", "steps", "traps", "notes"):
        assert file[part] == found[part], part


def test_a_presets_name_wins(capsys) -> None:
    assert "icepop" in METHODS
    found = explained(capsys, "icepop")
    assert found["about"] == {}
    assert [step["name"] for step in found["steps"]][:2] == ["ratio", "weight, token"]
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert "if no preset has that name" in " ".join(capsys.readouterr().out.split())


def test_a_method_beside_a_correction_is_one_more_step_and_is_shown(tmp_path, capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "mis_loss_method: {name: dppo_tv, delta: 0.1}\nuse_tis: true\ntis_level: none\nrs_veto_threshold: 1.0e-4\n"
    )
    found = explained(capsys, str(path))
    assert [step["name"] for step in found["steps"]] == ["ratio", "veto rs_catastrophic", "method dppo_tv"]
    assert "delta=0.1 cap=20.0" in found["steps"][2]["formula"]
    assert found["about"]["Parameters"] == "delta=0.1 (default 0.15)"
    assert main(["explain", str(path), "--k3", "1e-2", "--length", "16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "Parameters: delta=0.1",
        "│ tokens kept",
        "Pitfalls unknown at",
    ):
        assert words in shown, words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mis_loss_method: aipo\nuse_tis: true\n", "mis_loss_method: aipo already corrects for the behavior policy"),
        ("mis_loss_method: aipp\n", "did you mean 'aipo'"),
        ("mis_loss_method: {name: aipo, high: -1.0}\n", "aipo: high must be in (0, inf), got -1.0"),
    ],
)
def test_what_a_run_refuses_is_refused_with_the_file(text, message, tmp_path, capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["explain", str(path)])
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error


def test_a_misspelt_name_gets_the_nearest_of_both_lists(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "dppo_tw"])
    error = capsys.readouterr().err
    assert "no file, preset, or method 'dppo_tw' (did you mean 'dppo_tv'" in error
    assert "Run mis-ext presets or mis-ext methods to list all" in error


def test_a_folder_or_a_file_of_a_presets_name_hides_no_preset(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = explained(capsys, "mis")
    (tmp_path / "mis").mkdir()
    assert explained(capsys, "mis") == preset
    (tmp_path / "icepop").write_text("use_tis: true\n")
    assert "MIS of tokens" not in str(explained(capsys, "./icepop"))
    assert explained(capsys, "./icepop")["steps"] != explained(capsys, "icepop")["steps"]
