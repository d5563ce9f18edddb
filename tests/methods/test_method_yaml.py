# SPDX-License-Identifier: Apache-2.0
"""A method's file: the hook does with it what the row says, and refuses what it cannot do alone."""

import dataclasses
import json
import math
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import yaml
from drawn_configs import draw_file_config
from method_cases import HOOK, HOOK_PARAMETERS, apply, make_data
from rows import for_each

import mis_ext
from mis_ext.keys.reading import flat_keys, read_config
from mis_ext.methods import METHODS, Method, PairGate, PairWeight, Ratio
from mis_ext.methods.batch import MISMATCH
from mis_ext.methods.catalogue import choose_method
from mis_ext.methods.first_update import as_correction
from mis_ext.methods.published import published
from mis_ext.tools.cli import main
from mis_ext.tools.configuration_files import method_yaml

# The presets of the hook that are a row of the methods, under their flat keys.
SAME = {
    "mis": "decoupled_token_tis",
    "icepop": "icepop",
    "sequence_mis": "sequence_mis",
    "geometric_gate_token_weight": "sequence_mask_tis",
}


def can(name: str) -> bool:
    try:
        as_correction(METHODS[name].method)
    except ValueError:
        return False
    return True


def corrected(config: mis_ext.CorrectionConfig, data, mask, layout) -> tuple[torch.Tensor, torch.Tensor]:
    """What the hook multiplies the host's loss by, 0 where it rejects; and its mask."""
    correction = mis_ext.compute_correction(
        proximal_logprobs_T=data.proximal,
        behavior_logprobs_T=data.behavior,
        response_mask_R=mask,
        layout=layout,
        config=config.replace(metrics=()),
    )
    kept_T = correction.keep_mask_T
    return torch.where(kept_T, correction.weights_T, 0.0).double(), kept_T


def test_the_rows_that_the_hook_can_do_are_these() -> None:
    assert [name for name in METHODS if can(name)] == HOOK


@for_each("name", HOOK)
def test_the_hook_times_the_hosts_ppo_is_the_method(name) -> None:
    method = METHODS[name](**HOOK_PARAMETERS.get(name, {}))
    data, mask, layout = make_data()
    found = as_correction(method)
    host = Method(surrogate=Ratio(low=1.0 - found.low, high=1.0 + found.high, dual=found.dual))
    ppo = apply(host, data, mask, layout).coefficient_T
    factor, kept = corrected(found.config, data, mask, layout)
    ours = ppo * factor
    wanted = apply(method, data, mask, layout)
    torch.testing.assert_close(ours, wanted.coefficient_T, rtol=1e-5, atol=1e-6)
    # What has no weight stays in the mask, what is rejected does not.
    assert torch.equal(kept, wanted.kept_T)
    assert not torch.allclose(ours, ppo, rtol=1e-3)
    assert (ours != 0).any()


@for_each("name", HOOK)
def test_the_file_is_a_configuration_of_the_hook(name) -> None:
    text = method_yaml(METHODS[name])
    found = mis_ext.config_from_mapping(yaml.safe_load(text))
    assert found == as_correction(METHODS[name].method).config
    assert METHODS[name].paper.partition(",")[0] in text
    assert all(line.startswith("# ") for line in text.partition("use_tis")[0].splitlines())


@pytest.mark.parametrize(("preset", "name"), SAME.items())
def test_presets_of_the_hook_that_a_row_stands_behind_do_what_it_says(preset, name) -> None:
    data, mask, layout = make_data()
    pair = mis_ext.preset(preset), as_correction(METHODS[name].method).config
    found, wanted = (corrected(config, data, mask, layout)[0] for config in pair)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ppo", "it corrects nothing"),
        ("gspo", "its surrogate .geometric ratio current / proximal. is not the framework's"),
        ("reinforce", "its surrogate .no clipped ratio. is not the framework's"),
        ("kimi_k2_5", "its surrogate .token ratio current / behavior. is not the framework's"),
        ("dcpo", "its clip is not the framework's"),
        ("grpo_k3", "it has an additive term"),
        ("opsm", "it compares current with behavior"),
        ("decoupled_tempered", "power must be 1, got 0.5"),
        ("decoupled_mixed", "the hook has no Mixture"),
        ("maspo", "its clip is not the framework's"),
    ],
)
def test_what_the_hook_cannot_do_alone_is_refused_with_the_reason(method, message) -> None:
    with pytest.raises(ValueError, match=message):
        as_correction(METHODS[method].method)


def test_parts_that_no_row_has_are_refused_too() -> None:
    ppo = METHODS["ppo"].method
    weight = PairWeight(pair=MISMATCH)
    for factors, message in {
        (weight, PairWeight(pair=MISMATCH, level="sequence")): "two weights",
        (PairWeight(pair=MISMATCH, low=0.5, high=math.inf),): r"high must be in \(0, inf\)",
        (PairWeight(pair=MISMATCH, level="prefix"),): "level must be one of .*, got 'prefix'",
        (PairGate(pair=MISMATCH, when="positive", high=2.0),): "when must be always, got positive",
        (PairGate(pair=MISMATCH, high=math.inf),): "without bounds it rejects nothing",
        (PairGate(pair=MISMATCH, reduce="batch_mean", high=1.1),): "reduce must be one of .*, got 'batch_mean'",
    }.items():
        with pytest.raises(ValueError, match=message):
            as_correction(dataclasses.replace(ppo, factors=factors))
    with pytest.raises(ValueError, match="normalizes"):
        as_correction(dataclasses.replace(ppo, factors=(weight,), normalize_over="tokens"))


def test_the_command_prints_the_file(capsys) -> None:
    assert main(["methods", "trm", "--yaml"]) == 0
    assert capsys.readouterr().out == method_yaml(METHODS["trm"])
    with pytest.raises(SystemExit) as caught:
        main(["methods", "--yaml"])
    assert caught.value.code == 2
    assert "--yaml needs the NAME" in capsys.readouterr().err


def test_the_list_names_every_method_with_its_objective(capsys) -> None:
    assert main(["methods"]) == 0
    lines = re.sub(r"\n {10,}", " ", capsys.readouterr().out).splitlines()
    for name, row in METHODS.items():
        assert any(line.split()[:1] == [name] and line.endswith(row.formula) for line in lines)


def test_no_list_is_wider_than_a_terminal(capsys) -> None:
    for command in ("methods", "presets"):
        assert main([command]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@for_each("name", [name for name in METHODS if name not in HOOK])
def test_what_the_hook_cannot_do_has_a_file_of_the_whole_loss(name) -> None:
    text = method_yaml(METHODS[name])
    settings = read_config(yaml.safe_load(text), whole_loss=True).whole_loss.settings
    assert settings.method.method == METHODS[name].method
    assert dict(settings.method.parameters) == METHODS[name].defaults
    assert "--custom-loss-function-path mis_ext.policy_loss" in text.replace("\n# ", " ")
    assert ("--use-rollout-logprobs" in text) is not settings.uses_proximal
    assert ("--ref-load" in text) is (settings.needs_reference is not None)
    assert ("state_values" in text) is settings.needs_state_values


def test_any_configuration_goes_through_its_keys() -> None:
    choose = random.Random(0).choice
    for _ in range(200):
        config = draw_file_config(choose)
        keys = json.loads(json.dumps(flat_keys(config)))
        assert mis_ext.config_from_mapping(keys) == config
    gate = mis_ext.Gate(low=0.5, high=2.0)
    others = {"metrics": ("mis_k3_kl",), "metric_max": math.inf, "warn_only": {"shifted_log_probs"}}
    config = mis_ext.CorrectionConfig(gates=(gate,), max_reject_fraction=0.3, **others)
    keys = yaml.safe_load(yaml.safe_dump(flat_keys(config)))
    assert mis_ext.config_from_mapping(keys) == config
    with pytest.raises(ValueError, match="metrics_only"):
        flat_keys(mis_ext.CorrectionConfig(weight=None, metrics_only=True))


each_parameter = for_each("name, key", [(name, key) for name, row in METHODS.items() for key in row.defaults])


def ranges(name: str, key: str) -> list[tuple[str, float, float]]:
    """Each range of a parameter as ``mis-ext methods`` prints it, with its ends beside the defaults of the others."""
    values = METHODS[name].defaults
    values["first"] = values[key][0] if isinstance(values[key], tuple) else None
    found = []
    for legal in METHODS[name].legal[key].split(" x "):
        low, high = (values[end] if end in values else float(end) for end in legal.strip("[()]").split(", "))
        found.append((legal, low, high))
    return found


def put(name: str, key: str, i: int, value: object) -> object:
    """The value of a parameter, or its default list with the value at a place."""
    default = METHODS[name].defaults[key]
    return [*default[:i], value, *default[i + 1 :]] if isinstance(default, tuple) else value


def outside(legal: str, low: float, high: float, choose: random.Random) -> Iterator[object]:
    yield from (math.nan, -math.inf, True, "0.5")
    if low > -math.inf:
        yield from (low - max(1.0, abs(low)) * 10.0 ** choose.uniform(-6.0, 6.0) for _ in range(4))
        yield from [low] * legal.startswith("(")
    if high < math.inf:
        yield from (high + max(1.0, abs(high)) * 10.0 ** choose.uniform(-6.0, 6.0) for _ in range(4))
        yield from [high] * legal.endswith(")")


def inside(name: str, key: str, choose: random.Random) -> Iterator[tuple[int, object]]:
    """Places in a list, or 0, and legal values there, up to the default of a parameter whose range begins with it."""
    row = METHODS[name]
    if " | " in row.legal[key]:
        yield from ((0, word) for word in row.legal[key].split(" | "))
        return
    for i, (legal, low, high) in enumerate(ranges(name, key)):
        above = [row.defaults[other] for other, text in row.legal.items() if text[1:].startswith(f"{key},")]
        above += row.defaults[key][1:] if i == 0 and "first" in row.legal[key] else ()
        start, end = max(low, -1e6), min([high, 1e6, *above])
        numbers = [start + (end - start) * 10.0 ** -choose.uniform(0.1, 9.0) for _ in range(4)]
        numbers += [low] * legal.startswith("[") + [high] * legal.endswith("]")
        yield from ((i, int(number) if isinstance(row.defaults[key], int) else number) for number in numbers)


@each_parameter
def test_no_parameter_takes_a_value_outside_of_the_range_that_is_printed(name, key, capsys) -> None:
    row, choose = METHODS[name], random.Random(f"{name} {key}")
    assert main(["methods", name]) == 0
    assert f"in {row.legal[key]}" in " ".join(capsys.readouterr().out.split())
    if " | " in row.legal[key]:
        with pytest.raises(ValueError, match=re.escape(f"{name}: {key} must be one of {row.legal[key]}, got 'none'")):
            row(**{key: "none"})
        return
    for i, (legal, low, high) in enumerate(ranges(name, key)):
        for value in outside(legal, low, high, choose):
            given = {key: put(name, key, i, value)}
            with pytest.raises((ValueError, TypeError)) as by_row:
                row(**given)
            with pytest.raises((ValueError, TypeError)) as by_key:
                choose_method("mis_loss_method", {"name": name, **given})
            assert f"{name}: {key}" in str(by_row.value)
            assert f"{legal[0]}{low:g}, {high:g}{legal[-1]}, got {value!r}" in str(by_row.value)
            assert str(by_key.value) == f"mis_loss_method: {by_row.value}"


@each_parameter
def test_each_value_of_the_range_gives_finite_numbers(name, key) -> None:
    data, mask, layout = make_data(num_sequences=8)
    for i, value in inside(name, key, random.Random(f"{key} {name}")):
        found = apply(METHODS[name](**{key: put(name, key, i, value)}), data, mask, layout)
        assert found.loss_T.isfinite().all(), value
        assert found.coefficient_T.isfinite().all(), value


UNBOUNDED = {"high", "cap", "bound", "dual", "high_max", "high_mean", "high_sequence", "beta", "phi", "delta"}


@each_parameter
def test_no_bound_is_infinity_in_python_and_a_number_in_a_file(name, key) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(f"mis_loss_method: {name}: {key}")):
        choose_method("mis_loss_method", {"name": name, key: put(name, key, 0, math.inf)})
    try:
        method = METHODS[name](**{key: put(name, key, 0, math.inf)})
    except (ValueError, TypeError):
        return
    assert key in UNBOUNDED or (name, key) == ("prime_rl", "low")
    found = apply(method, *make_data(num_sequences=8))
    assert found.loss_T.isfinite().all()
    assert found.coefficient_T.isfinite().all()


def test_bounds_that_are_equal_are_refused() -> None:
    for name in ("cispo", "icepop", "token_mis", "intellect_3"):
        for make in (METHODS[name], lambda name=name, **given: choose_method("key", {"name": name, **given})):
            with pytest.raises(ValueError, match=f"{name}: low must be below high, got 1.0 and 1.0"):
                make(low=1.0, high=1.0)


def test_python_takes_numbers_of_numpy() -> None:
    assert METHODS["ppo"](low=np.float32(0.25), high=np.int64(1)) == METHODS["ppo"](low=0.25, high=1.0)
    for wrong in (np.float32(1.5), np.float64("nan"), np.bool_(True)):
        with pytest.raises((ValueError, TypeError), match="ppo: low must be"):
            METHODS["ppo"](low=wrong)
    assert METHODS["decoupled_token_tis"](high=np.float64("inf")) == METHODS["decoupled_token_tis"](high=math.inf)


def test_a_parameter_without_a_range_is_refused_where_the_method_is_written() -> None:
    for hint in (float, "float", tuple[float, float]):

        def mine(*, low=0.2) -> Method:
            """Mine."""
            return Method(surrogate=Ratio(low=low))

        mine.__annotations__["low"] = hint
        with pytest.raises(TypeError, match=r"^mine: low: annotate it with a Range"):
            published(formula="w A", paper="none")(mine)
