# SPDX-License-Identifier: Apache-2.0
"""`mis-ext explain`: every preset, the law against the correction itself, and each trap where it belongs."""

import dataclasses
import itertools
import json
import math
from typing import get_args

import pytest
import torch

import mis_ext
from mis_ext import CorrectionConfig, Gate, Weight
from mis_ext.tools.cli import main
from mis_ext.tools.explain import Circumstances, GaussianLaw, TrapName, effect_of, explain_config, traps_of
from mis_ext.tools.report import Part, WhatIf, summarize
from mis_ext.tools.report.recommendation import circumstances_of
from mis_ext.tools.report.what_if import Outcome

pytest.importorskip("rich")
NUM_SEQUENCES = 4000
CASES = [(8e-4, 64), (5e-3, 40), (5e-2, 96)]


def gaussian(k3: float, length: int, *, count: int = NUM_SEQUENCES) -> Part:
    generator = torch.Generator().manual_seed(7)
    behavior = -3.0 * torch.rand(count, length, generator=generator)
    difference = torch.randn(count, length, generator=generator) * math.sqrt(2.0 * k3) - k3
    return Part.of_lists(proximal=[*(behavior + difference)], behavior=[*behavior])


@pytest.fixture(scope="module")
def parts() -> dict[tuple[float, int], Part]:
    return {case: gaussian(*case) for case in CASES}


@pytest.fixture(scope="module")
def outcomes(parts) -> dict[tuple[str, tuple[float, int]], Outcome]:
    """What each preset does with them."""
    found = {}
    for name, (case, part) in itertools.product(mis_ext.list_presets(), parts.items()):
        what_if = WhatIf(mis_ext.preset(name))
        what_if.add(part)
        found[name, case] = what_if.outcome()
    return found


def sampling_error(share: float, count: int = NUM_SEQUENCES) -> float:
    return 5.0 * math.sqrt(max(share * (1.0 - share), 1.0 / count) / count)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", mis_ext.list_presets())
def test_the_law_predicts_what_the_correction_does_with_each_preset(outcomes, name, case) -> None:
    config, found = mis_ext.preset(name), outcomes[name, case]
    effect = effect_of(config, k3=case[0], length=case[1])
    error = sampling_error(effect.kept_sequences)
    assert found.kept_sequences == pytest.approx(effect.kept_sequences, abs=error)
    assert found.kept_tokens == pytest.approx(effect.kept_tokens, abs=error)


GATES = [
    {"statistic": "ratio", "reduce": "token", "high": 1.15},
    {"statistic": "ratio", "reduce": "sum", "high": 1.5},
    {"statistic": "ratio", "reduce": "mean", "high": 1.01},
    {"statistic": "ratio", "reduce": "max", "high": 1.35},
    {"statistic": "ratio", "reduce": "min", "low": 0.75},
    {"statistic": "ratio", "reduce": "max", "low": 1.2, "high": 1.3},
]


@pytest.mark.parametrize("keys", GATES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_law_predicts_what_each_kind_of_gate_keeps(parts, keys) -> None:
    gate = Gate(**keys)
    k3, length = case = CASES[1]
    expected = GaussianLaw(k3, length).acceptance(gate)
    what_if = WhatIf(CorrectionConfig(weight=None, gates=(gate,)))
    what_if.add(parts[case])
    assert 0.02 < expected < 0.98
    assert what_if.outcome().kept_tokens == pytest.approx(expected, abs=sampling_error(expected))


@pytest.mark.parametrize("reduce", ["token", "sum", "mean", "max", "min"])
def test_without_a_mismatch_a_band_about_the_on_policy_value_keeps_everything(reduce) -> None:
    law = GaussianLaw(0.0, 40)
    assert law.acceptance(Gate(reduce=reduce, high=1.005)) == 1.0
    assert math.isnan(law.acceptance(Gate(statistic="k2", reduce=reduce, high=0.005)))


def test_gates_that_meet_on_one_ratio_are_not_independent(parts) -> None:
    k3, length = case = CASES[1]
    gates = (
        Gate(reduce="mean", low=0.98, high=1.005),
        Gate(reduce="sum", low=0.6, high=2.0, name="product"),
        Gate(low=0.85, high=1.2, name="weight"),
    )
    config = CorrectionConfig(weight=Weight(mode="mask", low=0.9, high=1.1), gates=gates, denominator="kept")
    what_if = WhatIf(config)
    what_if.add(parts[case])
    effect, found = effect_of(config, k3=k3, length=length), what_if.outcome()
    assert found.kept_sequences == pytest.approx(effect.kept_sequences, abs=sampling_error(effect.kept_sequences))
    assert found.kept_tokens == pytest.approx(effect.kept_tokens, abs=sampling_error(effect.kept_tokens))


def test_the_law_has_the_numbers_of_theory() -> None:
    law = GaussianLaw(1e-3, 2048)
    assert law.ess("sequence") == pytest.approx(math.exp(-4.096))
    assert law.ess("token") == pytest.approx(math.exp(-2e-3))
    assert law.acceptance(Gate(reduce="sum", low=0.5, high=2.0)) == pytest.approx(0.164, abs=1e-3)
    assert law.of_level("token").between(-1e-3 + 10 * math.sqrt(2e-3), math.inf) == pytest.approx(
        0.5 * math.erfc(10 / 2**0.5), rel=1e-6, abs=0.0
    )
    ratio = math.exp(-1e-3 - 6.0 * math.sqrt(2e-3))
    tail = 0.5 * math.erfc(6.0 / math.sqrt(2.0))
    assert 1.0 - law.acceptance(Gate(reduce="min", low=ratio)) == pytest.approx(2048 * tail, rel=1e-5)


@pytest.mark.parametrize("name", mis_ext.list_presets())
def test_without_a_mismatch_nothing_happens(name) -> None:
    effect = effect_of(mis_ext.preset(name), k3=0.0, length=512)
    assert (effect.kept_tokens, effect.kept_sequences) == pytest.approx((1.0, 1.0))
    assert not explain_config(mis_ext.preset(name), k3=0.0, length=512, num_sequences=64).traps


def test_what_the_law_does_not_know_is_no_number() -> None:
    gates = (
        Gate(statistic="proximal_probability", reduce="min", low=1e-6),
        Gate(high=1.1, name="tokens"),
        Gate(reduce="segment_mean", low=0.99, high=1.01, name="rest"),
    )
    found = explain_config(CorrectionConfig(gates=gates))
    unknown = [name for name, share in found.effect.accepted.items() if math.isnan(share)]
    assert [name.split(":")[0] for name in unknown] == ["rs_veto_probability", "rest"]
    # What passes the known ones would look like an answer.
    effect = found.effect
    assert all(math.isnan(share) for share in (effect.kept_tokens, effect.kept_sequences))
    assert not found.is_known
    zeroing = [dataclasses.replace(gate, action="zero") for gate in (gates[0], gates[2])]
    found = explain_config(CorrectionConfig(gates=(gates[1], *zeroing)))
    # Zeroed is not removed.
    assert 0.9 < found.effect.kept_tokens < 1.0
    assert not found.is_known


@pytest.mark.parametrize("name", mis_ext.list_presets())
def test_every_preset_has_finite_numbers_everywhere(name) -> None:
    for k3, length in itertools.product([1e-5, 1e-3, 1e-1, 5.0], [1, 40, 2048, 1e7]):
        effect = effect_of(mis_ext.preset(name), k3=k3, length=length)
        for share in (effect.kept_tokens, effect.kept_sequences, *effect.accepted.values()):
            assert 0.0 <= share <= 1.0 + 1e-9


BAND = Gate(reduce="mean", low=0.99, high=1.01)
PRODUCT = Gate(reduce="sum", low=0.5, high=2.0)
SEQUENCE = Weight(level="sequence")
FIRES = {
    "hopeless_sequences": (CorrectionConfig(weight=SEQUENCE), {"length": 2048}, {"length": 64}),
    "rejects_much": (CorrectionConfig(gates=(PRODUCT,)), {"length": 512}, {"length": 16}),
    "length_bias": (CorrectionConfig(gates=(PRODUCT,)), {"length": 256}, {"length": 16}),
    "stale_gates": (CorrectionConfig(gates=(BAND,)), {"is_stale": True}, {"is_stale": False}),
    "costly_gates": (CorrectionConfig(gates=(BAND,)), {"k3": 2e-3, "length": 4096}, {"k3": 1e-3, "length": 4096}),
    "single_sequence": (
        CorrectionConfig(weight=SEQUENCE, normalize_over="kept", scope="micro_batch"),
        {},
        {"num_sequences": 8},
    ),
}


@pytest.mark.parametrize("name", FIRES)
def test_a_trap_fires_where_it_belongs_and_not_elsewhere(name) -> None:
    config, there, elsewhere = FIRES[name]
    assert name in [trap.name for trap in explain_config(config, **there).traps]
    assert name not in [trap.name for trap in explain_config(config, **elsewhere).traps]
    assert name not in [trap.name for trap in explain_config(CorrectionConfig(), **there).traps]


def test_a_length_below_one_token_is_none() -> None:
    config = CorrectionConfig(gates=(PRODUCT,))
    (trap,) = [each for each in explain_config(config, k3=0.3, length=1).traps if each.name == "length_bias"]
    assert "of responses at a length of 1 and 26% at 4 tokens" in trap.text


def test_a_gate_that_the_law_does_not_know_leaves_dashes_and_no_all_clear(tmp_path, capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "{tis_level: none, use_rs: true, rs_level: none, rs_gates: [{statistic: proximal_probability, low: 0.9}]}\n"
    )
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    for label in ("tokens kept", "responses kept"):
        (row,) = [line for line in shown.splitlines() if label in line]
        assert row.count(" - ") == 4, row
    assert "No known pitfalls" not in shown
    assert "Pitfalls unknown at 2,048 tokens" in shown
    assert main(["explain", str(path), "--json"]) == 0
    effect = json.loads(capsys.readouterr().out)["effect"]
    assert [effect[name] for name in ("kept_tokens", "kept_sequences")] == [None] * 2


def test_what_was_measured_decides_where_the_law_expects_something_else() -> None:
    def fired(config: CorrectionConfig, **found: float) -> set[str]:
        known = {"kept_tokens": 1.0, "kept_sequences": 1.0, "learning_rate": 1.0}
        return {trap.name for trap in traps_of(config, Circumstances(**(known | found)))}

    weighs, gated = CorrectionConfig(weight=SEQUENCE), CorrectionConfig(gates=(PRODUCT,))
    # The law does not predict the mean of what multiplies the loss.
    assert set(get_args(TrapName)) == {*FIRES, "low_learning_rate"}
    assert fired(weighs, k3=1e-3, length=64, ess_sequence=1.0, learning_rate=0.89) == {"low_learning_rate"}
    assert fired(weighs, k3=1e-3, length=64, ess_sequence=0.19) == {"hopeless_sequences"}
    assert fired(weighs, k3=1e-3, length=4096, ess_sequence=0.21) == set()
    assert fired(CorrectionConfig(), k3=1e-3, length=64, ess_sequence=0.19) == set()
    # The law expects that 0.52 of the responses are accepted.
    assert "length_bias" in fired(gated, k3=1e-3, length=400, ess_sequence=0.5, kept_sequences=0.7)
    assert "length_bias" not in fired(gated, k3=1e-3, length=400, ess_sequence=0.5, kept_sequences=0.8)


def test_the_report_asks_the_traps_with_what_it_measured(parts, outcomes) -> None:
    measured, summary = outcomes["sequence_mis", CASES[1]], summarize([parts[CASES[1]]])
    found = circumstances_of(measured, summary)
    names = ("kept_tokens", "kept_sequences", "learning_rate")
    assert all(getattr(found, name) == getattr(measured, name) < 0.9 for name in names)
    assert (found.k3, found.length) == (summary.overall.k3, summary.overall.mean_length)
    assert (found.ess_sequence, found.k_hat) == (summary.overall.ess_sequence, summary.overall.k_hat)


def test_every_preset_is_explained_in_words_and_as_json(capsys) -> None:
    for name in mis_ext.list_presets():
        config = mis_ext.preset(name)
        assert main(["explain", name, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["config"] == name
        assert found["effect"]["length"] == 2048
        steps = [step["name"] for step in found["steps"]]
        assert steps[0] == "ratio"
        assert (f"weight, {config.weight.level}" in steps) if config.weight is not None else len(steps) == 1
        assert all(any(label in step for step in steps) for label in config.labeled_gates)
        assert ("normalize" in steps) == (config.normalize_over is not None)
        assert main(["explain", name]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "Expected at k3 0.001" in shown


def test_formulas_and_bounds_are_those_of_the_file(tmp_path, capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "{tis_level: geometric, tis_mode: clip, tis_lower_bound: 0.95, tis_upper_bound: 1.04, mis_denominator: kept,\n"
        "use_rs: true, rs_level: none,\n"
        "rs_gates: [{statistic: k3, reduce: mean, high: 0.01, action: zero}, {reduce: sum, low: 0.25}]}\n"
    )
    assert main(["explain", str(path), "--json", "--k3", "2e-3", "--length", "100", "--stale"]) == 0
    found = json.loads(capsys.readouterr().out)
    _, weight, zeroing, product, denominator = found["steps"]
    assert weight["formula"] == "x = (prod_t rho_t)^(1/T); w = clamp(x, 0.95, 1.04)"
    assert zeroing["formula"] == "mean_t (rho_t - 1 - d_t) <= 0.01; else w = 0"
    assert product["formula"] == "0.25 <= prod_t rho_t"
    assert denominator["name"] == "denominator"
    assert "stale_gates" in [trap["name"] for trap in found["traps"]]
    assert [each["length"] for each in found["at_lengths"]] == [6.25, 25, 100, 400]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["miss"], "'miss' (did you mean 'mis'"),
        (["nothing.yaml"], "nothing.yaml"),
        (["mis", "--k3", "-1"], "k3 must be in [0, 10], got -1.0"),
        (["mis", "--k3", "small"], "argument --k3: invalid float value: 'small'"),
        (["mis", "--length", "0"], "length must be in [1, 1e+07], got 0.0"),
        (["mis", "--length", "nan"], "length must be in [1, 1e+07], got nan"),
        (["mis", "--sequences", "0"], "num_sequences must be in [1, inf), got 0"),
    ],
)
def test_wrong_usage_names_key_value_and_range(capsys, arguments, message) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *arguments])
    assert message in capsys.readouterr().err
