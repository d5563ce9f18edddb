# SPDX-License-Identifier: Apache-2.0
"""`mis-ext explain` of published methods: draws under the law against its closed form, and what is said of a method."""

import json
import math

import pytest
from method_cases import HOOK
from rows import for_each

import mis_ext
from mis_ext import CorrectionConfig, Gate, Weight
from mis_ext.correction.formula import bounded_exp
from mis_ext.keys.presets import NO_CORRECTION, method_yaml
from mis_ext.loss.settings import LossSettings
from mis_ext.methods import METHODS
from mis_ext.methods.catalogue import choose_method
from mis_ext.methods.first_update import equivalent_correction
from mis_ext.tools.cli import main
from mis_ext.tools.explain import Circumstances, GaussianLaw, effect_of, effect_of_method, explain_config, traps_of
from mis_ext.tools.explain.effect import NUM_RESPONSES, NUM_TOKENS

pytest.importorskip("rich")
K3, LENGTH = 5e-3, 40
# Bounds within a standard deviation or two of what they bound there: 0.1 of a token, 0.63 of a product.
ACTING = {
    "decoupled_token_tis": {"high": 1.1},
    "decoupled_sequence_tis": {"high": 1.5},
    "decoupled_token_clip": {"low": 0.9, "high": 1.1},
    "icepop": {"low": 0.9, "high": 1.1},
    "glm_5_reasoning": {"beta": 1.1},
    "token_mis": {"low": 0.9, "high": 1.1},
    "sequence_mis": {"low": 0.7, "high": 1.4},
    "geometric_rs": {"low": 0.98, "high": 1.01},
    "geometric_rs_token_tis": {"low": 0.98, "high": 1.01, "bound": 1.1},
    "sequence_mask_tis": {"low": 0.98, "high": 1.01},
    "veto": {"low": 0.78},
    "trm": {"high_max": 0.2, "high_mean": 5.5e-3},
    "sequence_error": {"high": 1.085},
}
NUMBERS = ("kept_tokens", "live_tokens", "kept_sequences", "learning_rate", "ess")


def by_draws(name: str, *, k3: float = K3, length: float = LENGTH, config=NO_CORRECTION, **given):
    return effect_of_method(config, METHODS[name](**given), k3=k3, length=length)


def as_loss(**chosen) -> LossSettings:
    return LossSettings(method=choose_method("mis_loss_method", chosen))


def margin(share: float, *, draws: int) -> float:
    """Five standard errors of a share, or of the mean of a weight of about its size."""
    return 5.0 * math.sqrt(max(share * (1.0 - share), 1.0 / draws) / draws)


@pytest.mark.filterwarnings("ignore:a geometric gate")
@pytest.mark.parametrize("name", [name for name in HOOK if name != "segment_rs"])
def test_draws_have_the_laws_own_numbers_for_every_method_that_the_hook_can_do(name) -> None:
    given = ACTING.get(name, {})
    found = by_draws(name, **given)
    wanted = effect_of(equivalent_correction(NO_CORRECTION, METHODS[name](**given)), k3=K3, length=LENGTH)
    # Two halves of 8,192 responses. Sums of k3 and of |d| over 40 tokens are not gamma variables yet.
    approximate = 0.02 if name in ("trm", "sequence_error") else 0.0
    for number in NUMBERS:
        expected = getattr(wanted, number)
        error = margin(min(expected, 1.0), draws=2 * NUM_RESPONSES) + approximate
        assert getattr(found, number) == pytest.approx(expected, abs=error), number
    assert found.live_tokens < 0.99 or found.learning_rate < 0.999 or name in ("decoupled", "decoupled_token_clip")


def test_a_band_on_geometric_means_is_right_to_the_width_of_a_stratum() -> None:
    # Means of responses are spread evenly over their distribution: at either edge of a half one of them is in doubt.
    expected = GaussianLaw(K3, LENGTH).acceptance(Gate(reduce="mean", low=0.98, high=1.01))
    assert by_draws("geometric_rs", low=0.98, high=1.01).kept_tokens == pytest.approx(expected, abs=2 / NUM_RESPONSES)


def test_token_ratios_alone_have_the_learning_rate_1_and_the_laws_effective_share() -> None:
    found, law = by_draws("reinforce_token_is"), GaussianLaw(K3, LENGTH)
    error = 5.0 * math.sqrt(math.expm1(2 * K3) / (2 * NUM_RESPONSES * LENGTH))
    assert found.learning_rate == pytest.approx(1.0, abs=error)
    assert found.ess == pytest.approx(law.ess("token"), abs=error)
    assert found.ess == pytest.approx(math.exp(-2 * K3), abs=error)
    assert (found.kept_tokens, found.live_tokens, found.kept_sequences) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["ppo", "dapo", "dual_clip", "dcpo", "cispo", "sapo", "gspo", "maspo", "grpo_k3"])
def test_what_compares_with_the_proximal_policy_alone_does_nothing_at_the_first_update(name) -> None:
    found = by_draws(name)
    assert [getattr(found, number) for number in NUMBERS] == [1.0] * 5


def test_a_band_keeps_what_the_law_says() -> None:
    law = GaussianLaw(K3, LENGTH)
    expected = law.token.between(math.log(0.9), math.log(1.15))
    for name, band in (("icepop", {"low": 0.9, "high": 1.15}), ("glm_5", {"low": 0.1, "high": 0.15})):
        found = by_draws(name, **band)
        error = margin(expected, draws=2 * NUM_RESPONSES * LENGTH)
        assert found.live_tokens == pytest.approx(expected, abs=error)
        # Weight 0 is no rejection.
        assert found.kept_tokens == 1.0


def test_methods_by_sign_are_half_of_each_side() -> None:
    law = GaussianLaw(K3, LENGTH)
    stopped = 0.5 * (law.token.between(math.log(1.1), math.inf) + law.token.between(-math.inf, math.log(0.9)))
    found = by_draws("bypass", low=0.1, high=0.1)
    assert found.live_tokens == pytest.approx(1.0 - stopped, abs=margin(stopped, draws=2 * NUM_RESPONSES * LENGTH))
    negative = law.product.moment(lambda log_ratio: bounded_exp(log_ratio.clamp_max(0.0)), 1, kinks=(0.0,))
    assert by_draws("topr").learning_rate == pytest.approx(0.5 * (1.0 + negative), abs=2 / NUM_RESPONSES)


def test_a_ratio_to_a_power_has_its_moment() -> None:
    # E[exp(p d)] = exp(p^2 k3 - p k3).
    found = by_draws("decoupled_tempered", k3=0.05, power=0.5)
    assert found.learning_rate == pytest.approx(math.exp(-0.25 * 0.05), abs=1e-3)


# segment_rs is never known, and the draws of clip_cov do not ask for a mismatch.
@for_each("name", [name for name in METHODS if name not in ("segment_rs", "clip_cov")])
def test_without_a_mismatch_no_method_does_anything(name) -> None:
    found = by_draws(name, k3=0.0, length=3)
    assert [getattr(found, number) for number in NUMBERS] == pytest.approx([1.0] * 5)


CORRECTIONS = {
    "gates": mis_ext.preset("gated_mis"),
    "normalised": CorrectionConfig(
        weight=Weight(level="sequence", high=1.5),
        gates=(Gate(reduce="sum", low=0.6, high=2.0),),
        normalize_over="kept",
        scope="rollout",
        denominator="kept",
    ),
    "two gates": CorrectionConfig(weight=None, gates=(Gate(low=0.9, high=1.1), Gate(reduce="mean", low=0.98))),
}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_beside_ppo_is_the_correction(kind) -> None:
    config = CORRECTIONS[kind]
    found, wanted = by_draws("ppo", config=config), effect_of(config, k3=K3, length=LENGTH)
    for number in NUMBERS:
        expected = getattr(wanted, number)
        error = margin(min(expected, 1.0), draws=2 * NUM_RESPONSES)
        assert getattr(found, number) == pytest.approx(expected, abs=error), number
    assert found.accepted == wanted.accepted
    assert found.weight_mean == wanted.weight_mean or config.weight is None


def test_what_depends_on_probabilities_or_on_few_draws_is_no_number() -> None:
    tv = by_draws("dppo_tv", k3=1e-2)
    assert tv.kept_tokens == 1.0
    assert all(map(math.isnan, (tv.live_tokens, tv.learning_rate)))
    # As small a mismatch is within every region, whatever the probability.
    assert by_draws("dppo_tv", k3=1e-4).live_tokens == 1.0
    products = by_draws("reinforce_sequence_snis", k3=1e-3, length=2048)
    assert products.learning_rate == pytest.approx(1.0, abs=1e-6)
    assert math.isnan(products.ess)
    assert math.isnan(by_draws("reinforce_sequence_tis", length=1e6).learning_rate)
    veto = CorrectionConfig(gates=(Gate(statistic="proximal_probability", reduce="min", low=1e-6),))
    assert math.isnan(by_draws("ppo", config=veto).kept_tokens)


def test_segments_and_covariances_are_none_of_the_laws() -> None:
    # The law has no turns, and the covariance of log-prob and advantage is that of the model.
    assert all(math.isnan(getattr(by_draws("segment_rs"), number)) for number in NUMBERS)
    band = {"cov_low": 0.5, "cov_high": 5.0}
    assert math.isnan(by_draws("clip_cov", share=0.3, **band).learning_rate)
    assert by_draws("clip_cov", **band).learning_rate == pytest.approx(1.0, abs=3e-4)


def test_a_method_of_tokens_is_known_at_every_length() -> None:
    # Drawn with 128 tokens each; a response of 200 keeps one of them with a probability of a half.
    band = {"low": 0.9995, "high": 1.0005}
    config = equivalent_correction(NO_CORRECTION, METHODS["token_mis"](**band))
    for length in (200, 1e6):
        found, wanted = by_draws("token_mis", length=length, **band), effect_of(config, k3=K3, length=length)
        assert found.kept_tokens == pytest.approx(wanted.kept_tokens, rel=5.0 / math.sqrt(2 * NUM_TOKENS * 4e-3))
        assert found.kept_sequences == pytest.approx(wanted.kept_sequences, abs=0.03)
    # A veto asks every token of its response.
    assert math.isnan(by_draws("intellect_3", length=1e6).kept_sequences)


def test_the_numbers_of_a_key_that_the_hook_could_do_are_exactly_the_hooks() -> None:
    found = explain_config(NO_CORRECTION, loss=as_loss(name="icepop", high=1.05), k3=K3, length=LENGTH)
    gate = Gate(low=0.5, high=1.05, action="zero")
    wanted = explain_config(CorrectionConfig(weight=Weight(mode="unbounded"), gates=(gate,)), k3=K3, length=LENGTH)
    assert found.effect == wanted.effect
    assert found.at_lengths == wanted.at_lengths
    assert found.traps == wanted.traps
    assert found.effect.live_tokens == GaussianLaw(K3, LENGTH).acceptance(gate)


def test_traps_of_a_method_are_those_of_its_kind() -> None:
    def names(name: str, *, k3: float, length: float, is_stale: bool = False) -> list[str]:
        found = Circumstances(
            k3=k3,
            length=length,
            ess_sequence=math.exp(-2 * k3 * length),
            kept_tokens=1.0,
            kept_sequences=1.0,
            learning_rate=1.0,
            is_stale=is_stale,
        )
        return [trap.name for trap in traps_of(NO_CORRECTION, found, METHODS[name].method)]

    assert names("reinforce_sequence_snis", k3=1e-3, length=2048) == ["hopeless_sequences"]
    assert names("reinforce_sequence_snis", k3=1e-4, length=2048) == []
    assert names("aipo", k3=1e-3, length=2048, is_stale=True) == []
    assert names("mis_po", k3=1e-3, length=2048, is_stale=True) == ["stale_gates"]
    assert names("mis_po", k3=1e-3, length=2048) == []


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
    for part in ("effect", "steps", "gradient", "denominator", "traps", "notes"):
        assert file[part] == found[part], part
    penalty = [note for note in found["notes"] if "penalty of the method is left out" in note]
    assert len(penalty) == bool(row.method.terms)


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
    assert [step["name"] for step in found["steps"]] == ["ratio", "veto rs_catastrophic", "method dppo_tv", "result"]
    assert "delta=0.1 cap=20.0" in found["steps"][2]["formula"]
    assert found["about"]["Parameters"] == "delta=0.1 (default 0.15)"
    gradient = " ".join(found["gradient"])
    assert "method dppo_tv: loss_t = -(sg(min(w, cap)) A log pi" in gradient
    assert "log pi of the token alone" in gradient
    assert "Rejected" in gradient
    assert "Zeroed" in gradient
    assert main(["explain", str(path), "--k3", "1e-2", "--length", "16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "Parameters: delta=0.1",
        "│ tokens with a policy gradient",
        "Not known: what speaks against it",
    ):
        assert words in shown, words
    assert "ratios above the high bound" not in shown


def test_what_carries_gradient_follows_from_the_surrogate() -> None:
    def gradient(name: str) -> str:
        return " ".join(explain_config(NO_CORRECTION, loss=as_loss(name=name), k3=0.0, length=2).gradient)

    assert "the ratio current / proximal of the token" in gradient("ppo")
    assert "the ratio current / behavior of the token" in gradient("kpop")
    assert "the ratio current / proximal of a sequence" in gradient("gspo")
    assert "the mean of their gradients" in gradient("gspo")
    assert "the mean of their gradients" not in gradient("luspo")
    assert "penalty has its own gradient" in gradient("kimi_k2_5")
    assert "penalty has its own gradient" not in gradient("ppo")


def test_a_correction_that_would_not_act_is_said_and_not_counted(tmp_path, capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("mis_loss_method: gspo\nrs_veto_threshold: 1.0e-4\n")
    found = explained(capsys, str(path))
    assert any("without use_tis: true" in note for note in found["notes"])
    assert [step["name"] for step in found["steps"]] == ["method gspo"]
    assert found["effect"]["accepted"] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mis_loss_method: aipo\nuse_tis: true\n", "mis_loss_method: aipo already corrects for the behavior policy"),
        ("mis_loss_method: aipp\n", "the nearest is aipo; "),
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


def test_a_double_weight_that_a_file_only_warns_of_is_a_note(tmp_path, capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("mis_loss_method: aipo\nuse_tis: true\nmis_guard: {double_correction: warn}\n")
    assert any("counts the mismatch twice" in note for note in explained(capsys, str(path))["notes"])


def test_a_misspelt_name_gets_the_nearest_of_both_lists(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "dppo_tw"])
    error = capsys.readouterr().err
    assert "no preset and no method 'dppo_tw': the nearest are dppo_tv, " in error
    assert "mis-ext presets and mis-ext methods list all" in error


def test_a_folder_or_a_file_of_a_presets_name_hides_no_preset(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = explained(capsys, "mis")
    (tmp_path / "mis").mkdir()
    assert explained(capsys, "mis") == preset
    (tmp_path / "icepop").write_text("use_tis: true\n")
    assert "MIS of tokens" not in str(explained(capsys, "./icepop"))
    assert explained(capsys, "./icepop")["steps"] != explained(capsys, "icepop")["steps"]
