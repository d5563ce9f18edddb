# SPDX-License-Identifier: Apache-2.0
"""What-if of published methods on a dump: the hook's numbers where it can do them, refusals, and the ranking."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from commands import json_of
from method_cases import HOOK
from method_cases import HOOK_PARAMETERS as FIRING
from rows import for_each

from mis_ext import CorrectionConfig, Gate, Weight
from mis_ext.methods import METHODS
from mis_ext.methods.first_update import as_correction, looks_at_advantages
from mis_ext.tools.cli import main
from mis_ext.tools.configuration_files import NO_CORRECTION, method_yaml
from mis_ext.tools.report import Collector, Part, WhatIf
from mis_ext.tools.report.recommendation import file_candidate, method_candidate, preset_candidates, recommend
from mis_ext.tools.report.what_if import Outcome

pytest.importorskip("jinja2")
pytest.importorskip("rich")
ROUNDING = {"rel": 1e-5, "abs": 1e-7, "nan_ok": True}


def drawn(*, advantages: bool = True, seed: int = 0, spread: float = 0.3) -> Part:
    """Responses of several lengths, some masked through, with large differences, and one missing log-prob."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (60,), generator=generator).tolist()
    behavior = [-0.05 - 2.0 * torch.rand(length, generator=generator) for length in lengths]
    proximal = [(each + spread * torch.randn(len(each), generator=generator)).clamp_max(-1e-3) for each in behavior]
    proximal[3][0] = math.nan
    signs = [(-1.0) ** number * torch.ones(length) for number, length in enumerate(lengths)]
    return Part.of_lists(
        proximal=proximal,
        behavior=behavior,
        masks=[torch.rand(length, generator=generator) < 0.8 for length in lengths],
        advantages=signs if advantages else None,
    )


def outcome_of(config: CorrectionConfig, part: Part, method=None) -> Outcome:
    what_if = WhatIf(config, method)
    what_if.add(part)
    return what_if.outcome()


def candidate_of(folder: Path, text: str):
    path = folder / "own.yaml"
    path.write_text(text)
    return file_candidate(path)


def as_key(name: str) -> str:
    return json.dumps({"mis_loss_method": {"name": name} | FIRING.get(name, {})})


@pytest.mark.parametrize("name", HOOK)
def test_a_key_that_the_hook_could_do_has_exactly_the_numbers_of_its_configuration(name, tmp_path) -> None:
    candidate = candidate_of(tmp_path, as_key(name))
    config = as_correction(METHODS[name](**FIRING.get(name, {}))).config
    found = outcome_of(candidate.config, drawn(), candidate.method)
    assert str(found) == str(outcome_of(config, drawn()))
    by_name = method_candidate(name)
    assert by_name.config == as_correction(METHODS[name].method).config
    assert by_name.yaml == method_yaml(METHODS[name])


@pytest.mark.parametrize("name", HOOK)
def test_the_method_itself_gives_the_hooks_numbers_to_rounding(name) -> None:
    method, part = METHODS[name](**FIRING.get(name, {})), drawn()
    found, wanted = outcome_of(NO_CORRECTION, part, method), outcome_of(as_correction(method).config, part)
    # Of rejected tokens the hook has a weight, which the mask takes out; which gate took them is not said.
    ours = ("weight_max", "removed_by")
    for field in dataclasses.fields(Outcome):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if (isinstance(one, dict) and field.name not in ours) or field.name not in ours:
            assert one == pytest.approx(other, **ROUNDING), field.name
    assert found.live_tokens < 1.0 or found.ess < 0.999
    assert sum(found.removed_by.values()) == pytest.approx(1.0 - found.kept_tokens, abs=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_beside_a_method_that_does_nothing_is_the_correction(level) -> None:
    gates = (Gate(low=0.7, high=1.5, name="tokens"), Gate(reduce="mean", low=0.9, name="means"))
    config = CorrectionConfig(weight=Weight(level=level), gates=gates, normalize_over="kept", denominator="kept")
    found, wanted = (outcome_of(config, drawn(), method) for method in (METHODS["cispo"].method, None))
    for number in ("kept_tokens", "live_tokens", "learning_rate", "ess", "residual", "removed_positive"):
        assert getattr(found, number) == pytest.approx(getattr(wanted, number), rel=1e-6), number
    # Nothing that is removed is the method's.
    assert found.removed_by == pytest.approx(wanted.removed_by)
    assert found.learning_rate == pytest.approx(1.0, abs=0.3)


def test_advantages_decide_who_has_a_gradient() -> None:
    # Ratios of 2 and of 1/2, with either sign: PPO against the behavior policy stops the moves away from 1.
    half = math.log(2.0)
    proximal = [torch.tensor([-1.0 + half, -1.0 - half])] * 2
    part = Part.of_lists(
        proximal=proximal,
        behavior=[torch.tensor([-1.0, -1.0])] * 2,
        advantages=[torch.ones(2), -torch.ones(2)],
    )
    found = outcome_of(NO_CORRECTION, part, METHODS["bypass"].method)
    assert (found.kept_tokens, found.live_tokens) == (1.0, 0.5)
    assert (found.removed_positive, found.removed_negative) == (0.5, 0.5)
    # What is left are 1/2 with a positive and 2 with a negative advantage.
    assert found.learning_rate == pytest.approx(2.5 / 4)
    assert found.ess == pytest.approx(2.5**2 / (4 * 4.25))
    assert found.residual == pytest.approx((2.0 + 0.5) / 4)
    # Of a squared weight of 1/4 and 4 with advantages of size 1.
    assert found.variance == pytest.approx(4.25 / 4)
    unlikely = part.of_lists(
        proximal=[torch.tensor([-1.0 - half, -1.0 - half])] * 2,
        behavior=[torch.tensor([-1.0, -1.0])] * 2,
        advantages=[torch.ones(2), -torch.ones(2)],
    )
    dropped = outcome_of(NO_CORRECTION, unlikely, METHODS["opsm"](delta=0.5))
    assert (dropped.removed_positive, dropped.removed_negative) == (0.0, 1.0)
    assert dropped.removed_by == {"the method": 0.5}
    both = outcome_of(CorrectionConfig(weight=None, gates=[Gate(low=0.6)]), unlikely, METHODS["opsm"](delta=0.5))
    assert [*both.removed_by.values()] == [0.5, 0.5]
    assert "two or more gates" in both.removed_by


@for_each("name", [name for name, row in METHODS.items() if "reference" not in row.method.policies])
def test_without_advantages_what_looks_at_them_is_refused_and_nothing_else(name) -> None:
    method = METHODS[name].method
    if method.needs_state_values:
        return
    if looks_at_advantages(method):
        with pytest.raises(ValueError, match=r"needs advantages, but .* tokens of step 0 have none"):
            outcome_of(NO_CORRECTION, drawn(advantages=False), method)
    else:
        found, wanted = (outcome_of(NO_CORRECTION, drawn(advantages=known), method) for known in (False, True))
        assert found.learning_rate == wanted.learning_rate
        assert found.kept_tokens == wanted.kept_tokens


def test_one_trained_token_without_an_advantage_is_enough() -> None:
    values = [torch.full((2,), -1.0)] * 2
    part = Part.of_lists(proximal=values, behavior=values, advantages=[torch.ones(2), None])
    with pytest.raises(ValueError, match="but 2 trained tokens of step 0 have none"):
        outcome_of(NO_CORRECTION, part, METHODS["topr"].method)
    masked = Part.of_lists(
        proximal=values, behavior=values, advantages=[torch.ones(2), None], masks=[torch.ones(2), torch.zeros(2)]
    )
    assert outcome_of(NO_CORRECTION, masked, METHODS["topr"].method).learning_rate == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpo_k3", "method grpo_k3 needs log-probs of the reference policy, which a dump does not have"),
        ("drift_control", "method drift_control needs state values, which a dump does not have"),
        ("dppo_tw", "unknown method 'dppo_tw' (did you mean 'dppo_tv'"),
    ],
)
def test_what_a_dump_does_not_hold_is_refused_by_name(name, message, tmp_path, capsys) -> None:
    dump = tmp_path / "run.jsonl"
    dump.write_text('{"log_probs": [-1.0], "rollout_log_probs": [-1.0]}\n')
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(dump), "--out", str(tmp_path / "out"), "--method", name])
    assert message in capsys.readouterr().err


def test_a_method_is_tried_part_by_part_as_the_command_does() -> None:
    both = Collector({"m": NO_CORRECTION}, methods={"m": METHODS["dppo_tv"].method})
    for seed in range(2):
        both.add(drawn(seed=seed))
    outcomes = [outcome_of(NO_CORRECTION, drawn(seed=seed), METHODS["dppo_tv"].method) for seed in range(2)]
    sizes = [float(drawn(seed=seed).tokens.generated.sum()) for seed in range(2)]
    wanted = sum(size * each.learning_rate for size, each in zip(sizes, outcomes, strict=True)) / sum(sizes)
    assert both.outcomes()["m"].learning_rate == pytest.approx(wanted)
    assert wanted != 1.0


def rows(*, advantages: bool) -> str:
    part = drawn(spread=0.7)
    lengths = part.streams.layout.response_lengths
    columns = (part.streams.proximal_logprobs_T, part.streams.behavior_logprobs_T, part.advantages_T)
    samples = zip(*(each.nan_to_num(-1.0).split(lengths) for each in columns), strict=True)
    return "".join(
        json.dumps(
            {"log_probs": proximal.tolist(), "rollout_log_probs": behavior.tolist()}
            | ({"advantages": sample.tolist()} if advantages else {})
        )
        + "\n"
        for proximal, behavior, sample in samples
    )


def test_methods_are_ranked_beside_configurations_with_their_traps_and_notes(tmp_path) -> None:
    dump, own = tmp_path / "run.jsonl", tmp_path / "own.yaml"
    dump.write_text(rows(advantages=True))
    own.write_text(
        "mis_loss_method: {name: dppo_tv, delta: 0.05}\nuse_tis: true\ntis_level: none\nrs_veto_threshold: 0.1\n"
    )
    arguments = ["--config", own, "--preset", "mis"]
    methods = ["aipo", "icepop", "kimi_k2_5", "reinforce_sequence_snis", "m2po", "ppo"]
    code, document = json_of("report", dump, *arguments, *(f"--method={name}" for name in methods))
    assert code == 0
    found = document["recommendation"]
    ranking = {each["name"]: each for each in found["ranking"]}
    assert {*ranking} == {"none", "mis", str(own), *(f"method {name}" for name in methods)}
    assert any("penalty" in note for note in ranking["method kimi_k2_5"]["notes"])
    assert any("statistics of the batch" in note for note in ranking["method m2po"]["notes"])
    assert not any("penalty" in note for note in ranking["method aipo"]["notes"])
    # As measured, whatever the Gaussian law expects at this k3.
    is_hopeless = document["summary"]["overall"]["ess_sequence"] < 0.2
    assert ("hopeless_sequences" in ranking["method reinforce_sequence_snis"]["traps"]) == is_hopeless
    assert 0.0 < ranking[str(own)]["outcome"]["live_tokens"] < 1.0
    # PPO alone leaves all of the mismatch, as no correction does.
    none, ppo = (ranking[name]["outcome"] for name in ("none", "method ppo"))
    assert ppo["residual"] == none["residual"] > 0.0
    names = [each["name"] for each in found["ranking"]]
    assert names.index("mis") < names.index("method reinforce_sequence_snis")


def test_among_equally_good_ones_the_ranking_goes_from_tokens_to_sequences() -> None:
    """What training runs said: weights of tokens, gates of tokens, no correction, weights of sequences, their gates."""
    names = ["opsm", "vespo", "ppo", "aipo"]
    candidates = [*map(method_candidate, names), *preset_candidates(["mis"])]
    collector = Collector(
        {each.name: each.config for each in candidates}, methods={each.name: each.method for each in candidates}
    )
    collector.add(drawn(spread=0.1))
    ranking = recommend(candidates, collector.outcomes(), collector.summary(), []).ranking
    assert [each.name for each in ranking if not each.warnings] == [
        "mis",
        *(f"method {name}" for name in ("aipo", "ppo", "vespo", "opsm")),
    ]
