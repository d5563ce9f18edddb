# SPDX-License-Identifier: Apache-2.0
"""Our numbers are those that verl's own code gave, recorded by ``lab/peers/verl/record.py``."""

import argparse
import functools
import json
import lzma
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_cases
import yaml
from flat_keys import keys_of

import mis_ext
from mis_ext.hosts import own_trainer
from mis_ext.hosts.verl import register, whole_loss
from mis_ext.hosts.verl_options import convert_verl
from mis_ext.keys.reading import read_keys
from mis_ext.tools.cli import main

with lzma.open(Path(__file__).parents[1] / "data" / "verl" / "numbers.json.xz", "rt") as file:
    RECORD = json.load(file)
BATCHES = {
    name: {key: torch.tensor(values) for key, values in batch.items()} for name, batch in RECORD["batches"].items()
}
CORRECTIONS = RECORD["corrections"]
# float32: sums of 60 tokens in another order.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-6}
pytestmark = pytest.mark.filterwarnings("ignore:rejected")


def own_loss(*, follows: bool):
    """Stands for a policy loss of verl's, which itself ran in ``record.py``: it is told how to aggregate."""

    def loss(*, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config) -> tuple:
        terms = -advantages * (log_prob - old_log_prob).exp() * response_mask
        is_of_tokens = follows and loss_agg_mode == "token-mean"
        rows = terms.sum(1) / response_mask.sum(1)
        return terms.sum() / response_mask.sum() if is_of_tokens else rows.mean(), {}

    return loss


def loss_of(
    keys: dict, batch: dict, *, info: dict, mode: str, is_bypass: bool, behavior: bool = True, own: Any = None
) -> dict:
    current = batch["log_prob"].clone().requires_grad_()
    old = batch["rollout_log_prob" if is_bypass and behavior else "old_log_prob"]
    loss, metrics = whole_loss(keys, is_bypass=is_bypass, own=own)(
        config=argparse.Namespace(global_batch_info=info),
        loss_agg_mode=mode,
        old_log_prob=old,
        log_prob=current,
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        rollout_is_weights=batch["rollout_log_prob"],
    )
    loss.backward()
    # Under these names docs/reference/metrics.md finds them on a dashboard.
    assert all(isinstance(metrics[f"actor/{name}"], float) for name in ("loss", "pg_loss"))
    return {"loss": loss.detach(), "gradient": current.grad}


def assert_close(found: dict, wanted: dict, *, factor: float = 1.0) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value * factor, torch.tensor(wanted[name]), **TOLERANCE)


def is_decoupled(name: str) -> bool:
    return not CORRECTIONS[name]["options"].get("bypass_mode", False)


@pytest.mark.parametrize("name", [*filter(is_decoupled, CORRECTIONS)])
def test_converted_options_give_the_weights_and_masks_of_verl(name) -> None:
    keys = convert_verl(CORRECTIONS[name]["options"]).keys
    for each, wanted in CORRECTIONS[name]["batches"].items():
        batch = BATCHES[each]
        found = mis_ext.correct_padded(
            keys,
            proximal_logprobs=batch["old_log_prob"],
            behavior_logprobs=batch["rollout_log_prob"],
            response_mask=batch["response_mask"],
        )
        mask = torch.tensor(wanted["mask"]) != 0
        assert torch.equal(found.keep_mask & batch["response_mask"], mask)
        torch.testing.assert_close(torch.where(mask, found.weights, 0.0), torch.tensor(wanted["weights"]), **TOLERANCE)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_whole_loss_with_converted_options_is_the_loss_of_verl(name) -> None:
    options = CORRECTIONS[name]["options"]
    is_bypass = options.get("bypass_mode", False)
    mode = "decoupled" if not is_bypass else "reinforce" if options["loss_type"] == "reinforce" else "bypass"
    keys = {"mis_loss_mode": mode, "use_tis": True} | convert_verl(options).keys
    keys |= {"eps_clip_c": 3.0} if mode != "reinforce" else {}
    if not keys["use_tis"] and mode == "decoupled":
        # That mode wants a correction.
        keys["mis_loss_mode"] = "baseline"
    for each, wanted in CORRECTIONS[name]["batches"].items():
        found = loss_of(keys, BATCHES[each], info=verl_cases.GLOBAL, mode="token-mean", is_bypass=is_bypass)
        assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:loss_agg_mode")
@pytest.mark.parametrize("kind", ["plain", "global"])
@pytest.mark.parametrize("name", verl_cases.LOSSES)
def test_a_published_method_is_the_loss_of_verl_of_that_name(name, kind) -> None:
    _, keys, mode = verl_cases.LOSSES[name]
    info = verl_cases.GLOBAL if kind == "global" else {}
    name_of_verl = name.partition(",")[0]
    is_bypass = name_of_verl in verl_cases.OF_BYPASS
    own = own_loss(follows=False) if name_of_verl in verl_cases.OF_SEQUENCES else None
    for each, wanted in RECORD["losses"][name][kind].items():
        batch, factor = BATCHES[each], 1.0
        if name_of_verl in verl_cases.DIVIDES_BY_ROWS:
            rows = batch["response_mask"].any(1).float()
            factor = float(rows.mean()) if kind == "plain" else 14 / 2 / len(rows)
        found = loss_of(keys, batch, info=info, mode=mode, is_bypass=is_bypass, behavior=False, own=own)
        assert_close(found, wanted, factor=factor)


def test_where_verls_own_loss_follows_its_setting_ours_does_and_says_so_where_not() -> None:
    keys = {"mis_loss_method": {"name": "gspo", "low": 0.2, "high": 0.2}}
    of_sequences, of_tokens = (RECORD["losses"][f"gspo{words}"]["plain"]["apart"]["loss"] for words in ("", ", tokens"))
    assert of_tokens == of_sequences
    given = {"info": {}, "is_bypass": False}
    with pytest.warns(mis_ext.MismatchWarning, match="loss_agg_mode=token-mean affects entropy .*seq-mean-token-mean"):
        found = loss_of(keys, BATCHES["apart"], mode="token-mean", own=own_loss(follows=False), **given)
    assert float(found["loss"]) == pytest.approx(of_sequences, rel=1e-5)
    # Version 0.9.1 of verl has a gspo that follows.
    found = loss_of(keys, BATCHES["apart"], mode="token-mean", own=own_loss(follows=True), **given)
    assert torch.equal(found["loss"], loss_of(keys, BATCHES["apart"], mode="token-mean", **given)["loss"])
    assert abs(float(found["loss"]) - of_sequences) > 0.01
    with pytest.raises(ValueError, match=r"loss_agg_mode must be one of .*, got 'token_mean'"):
        loss_of(keys, BATCHES["apart"], mode="token_mean", **given)


@pytest.mark.parametrize(("method", "own"), [("gspo", "gspo"), ({"name": "gmpo"}, "geo_mean"), ("ppo", None)])
def test_the_loss_of_verl_that_is_asked_is_that_of_the_method(method, own, verl, monkeypatch) -> None:
    for name in ("gspo", "sapo", "geo_mean"):
        loss = own_loss(follows=name != own)
        monkeypatch.setattr(verl.core_algos, f"compute_policy_loss_{name}", loss, raising=False)
    register({"mis_loss_method": method})
    batch = {name: BATCHES["apart"][name] for name in ("old_log_prob", "log_prob", "advantages", "response_mask")}
    config, losses = argparse.Namespace(global_batch_info={}), verl.core_algos.POLICY_LOSS_REGISTRY
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses["mis_ext"](config=config, loss_agg_mode="token-mean", **batch)
    assert any("loss_agg_mode=token-mean" in str(each.message) for each in caught) == (own is not None)


def test_a_band_with_a_mean_is_the_method_that_the_refusal_names() -> None:
    options = {"rollout_is": "token", "rollout_is_threshold": "0.8_1.4", "rollout_is_batch_normalize": True}
    with pytest.raises(ValueError, match=r"rollout_is_batch_normalize .* normalize_over: all_tokens"):
        convert_verl(options)
    batch = BATCHES["apart"]
    mask = batch["response_mask"]
    ratio = (batch["old_log_prob"] - batch["rollout_log_prob"]).exp()
    weights = torch.where((ratio >= 0.8) & (ratio <= 1.4), ratio, 0.0)
    weights = weights / weights[mask].mean()
    update = (batch["log_prob"] - batch["old_log_prob"]).exp()
    gain = torch.minimum(update * batch["advantages"], update.clamp(0.8, 1.2) * batch["advantages"])
    keys = {"mis_loss_method": {"name": "icepop", "low": 0.8, "high": 1.4, "normalize_over": "all_tokens"}}
    found = loss_of(keys, batch, info={}, mode="token-mean", is_bypass=False)
    torch.testing.assert_close(found["loss"], -(weights * gain)[mask].mean(), **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is"),
        ({"rollout_is": "geometric"}, "rollout_is"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_high"}, "rollout_is_threshold='high'"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.0}, "'seq_max_k1'"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=None"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"}, "rollout_rs_threshold='2,3'"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "rollout_rs_threshold of token_k2='0.1_0.2'"),
        ({"rollout_is": "token", "tis_imp_ratio_cap": 2}, "unknown options of verl: 'tis_imp_ratio_cap'"),
        ({"rollout_is": "token", "rollout_is_treshold": 2.0}, "did you mean 'rollout_is_threshold'"),
        ({"bypass_mode": True, "loss_type": "ppo"}, "loss_type"),
        ({"bypass_mode": "false"}, "bypass_mode must be"),
        ({"rollout_is_batch_normalize": "no"}, "rollout_is_batch_normalize must be"),
        ({"rollout_rs": " , ", "rollout_rs_threshold": 2.0}, "rollout_rs=' , ' has no criterion"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(options, message) -> None:
    with pytest.raises((ValueError, TypeError), match=r"rollout|loss_type|bypass") as caught:
        convert_verl(options)
    assert message in str(caught.value)


def test_the_command_finds_the_options_in_a_whole_configuration(tmp_path, capsys) -> None:
    options = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k1"}
    options |= {"rollout_rs_threshold": "0.999_1.002", "bypass_mode": True, "loss_type": "reinforce"}
    file = tmp_path / "config.yaml"
    for content in (options, {"algorithm": {"gamma": 1.0, "rollout_correction": options}, "trainer": {}}):
        file.write_text(yaml.safe_dump(content))
        assert main(["convert", "verl", str(file)]) == 0
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed) == convert_verl(options).keys
        assert "# Keep in verl's configuration: bypass_mode: true, loss_type: reinforce." in printed
        # In verl's own trainers it is so.
        assert "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode" in printed
    file.write_text("trainer: {}\n")
    with pytest.raises(SystemExit):
        main(["convert", "verl", str(file)])
    assert "no rollout correction of verl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollout_rs", "rollout_rs_threshold", "loss_type", "bypass_mode"])
def test_an_option_that_is_null_does_nothing(name) -> None:
    options = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    assert convert_verl(options | {name: None}) == convert_verl(options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "set -x\npython3 -m verl.trainer.main_ppo \\\n  algorithm.rollout_correction.rollout_is=token $@\n"),
        ("overrides.yaml", "- algorithm.rollout_correction.rollout_is=token\n"),
        ("config.yaml", "trainer: {}\n"),
    ],
)
def test_a_file_that_is_no_whole_configuration_is_told_where_one_is(name, text, tmp_path, capsys) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        main(["convert", "verl", str(tmp_path / name)])
    error = capsys.readouterr().err
    assert name in error or "no rollout correction of verl" in error
    assert ".hydra/config.yaml" in error
    assert "--cfg job" in error


def kept_by(keys: dict, batch: dict) -> torch.Tensor:
    streams = {"proximal_logprobs": batch["old_log_prob"], "behavior_logprobs": batch["rollout_log_prob"]}
    return mis_ext.correct_padded(keys, **streams, response_mask=batch["response_mask"]).keep_mask


def test_only_a_log_ratio_beyond_twenty_is_another_one_in_a_sum_of_verl() -> None:
    batch = verl_cases.beyond()
    log_ratio = batch["old_log_prob"] - batch["rollout_log_prob"]
    bounded = batch | {"rollout_log_prob": batch["old_log_prob"] - log_ratio.clamp(-20.0, 20.0)}
    other = set()
    for name, wanted in RECORD["beyond"].items():
        keys, mask = convert_verl(CORRECTIONS[name]["options"]).keys, torch.tensor(wanted) != 0
        assert torch.equal(kept_by(keys, bounded), mask)
        kept = kept_by(keys, batch)
        assert torch.equal(kept[1], mask[1])
        other |= set() if torch.equal(kept, mask) else {name}
    assert other == {"seq_sum_k1 0.5_1.5", "seq_mean_k1 0.9_1.2"}


@pytest.fixture
def verl(monkeypatch):
    """Stands for the three modules of verl that are touched; verl itself runs in ``record.py``."""
    losses = {"vanilla": None, "bypass_mode": None}
    core = types.SimpleNamespace(
        POLICY_LOSS_REGISTRY=losses, register_policy_loss=lambda name: lambda loss: losses.__setitem__(name, loss)
    )
    helper = types.SimpleNamespace(compute_rollout_correction_and_rejection_mask=None)
    ppo = types.SimpleNamespace(core_algos=core, rollout_corr_helper=helper)
    proto = types.SimpleNamespace(DataProto=types.SimpleNamespace(from_dict=lambda tensors: tensors))
    for name, module in {"verl": ppo, "verl.protocol": proto, "verl.trainer": ppo, "verl.trainer.ppo": ppo}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return ppo


def corrected(verl, **changes: torch.Tensor) -> tuple:
    batch = BATCHES["apart"] | changes
    streams = batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"]
    return verl.rollout_corr_helper.compute_rollout_correction_and_rejection_mask(*streams, rollout_is="token")


def test_keys_of_a_correction_leave_the_losses_of_verl_alone(verl) -> None:
    before = dict(verl.core_algos.POLICY_LOSS_REGISTRY)
    gate = {"low": 0.8, "high": 1.2}
    register(keys_of(weight={"level": "token", "mode": "truncate", "high": 1.1}, gates=[gate]))
    assert before == verl.core_algos.POLICY_LOSS_REGISTRY
    weights, mask, metrics = corrected(verl)
    assert float(weights["rollout_is_weights"].max()) == pytest.approx(1.1)
    ratio = (BATCHES["apart"]["old_log_prob"] - BATCHES["apart"]["rollout_log_prob"]).exp()
    assert torch.equal(mask, BATCHES["apart"]["response_mask"] & (ratio >= 0.8) & (ratio <= 1.2))
    assert metrics["rollout_corr/mis_k3_kl"] > 0.0
    _, numbers, _ = corrected(verl, response_mask=BATCHES["apart"]["response_mask"].long())
    assert (numbers.dtype, numbers.tolist()) == (torch.int64, mask.long().tolist())


def test_keys_of_the_whole_loss_hand_the_behavior_policy_on_and_stop_losses_that_would_multiply_by_it(verl) -> None:
    register({"mis_loss_method": "icepop"})
    handed, mask, metrics = corrected(verl)
    assert handed["rollout_is_weights"] is BATCHES["apart"]["rollout_log_prob"]
    assert mask is BATCHES["apart"]["response_mask"]
    assert metrics == {}
    losses = verl.core_algos.POLICY_LOSS_REGISTRY
    with pytest.raises(ValueError, match=r"loss_mode: vanilla .* use loss_mode=mis_ext"):
        losses["vanilla"](log_prob=None)
    assert set(losses) == {"vanilla", "bypass_mode", "mis_ext"}


@pytest.mark.parametrize("keys", [{"use_tis": True}, {"mis_loss_method": "icepop"}])
def test_a_trainer_that_asks_verl_for_weights_alone_is_refused(keys, verl) -> None:
    register(keys)
    ask = verl.rollout_corr_helper.compute_rollout_correction_weights
    with pytest.raises(ValueError, match=r"tis_mode: null, bypass_mode: true"):
        ask(log_ratio=torch.zeros(1, 2), response_mask=torch.ones(1, 2), rollout_is="token", rollout_is_threshold=2.0)


def with_row(row: torch.Tensor, group: object, *, number: float) -> torch.Tensor:
    """The rows of two ranks, of which the other one has this number everywhere."""
    return torch.stack([row, torch.full_like(row, number)])


@pytest.mark.parametrize("others_measured", [False, True])
@pytest.mark.parametrize("keys", [{"use_tis": True}, {"mis_loss_method": "ppo", "use_tis": True}])
def test_a_micro_batch_of_padding_has_the_metrics_of_the_other_ranks(keys, others_measured, verl, monkeypatch) -> None:
    batch = BATCHES["apart"] | {"response_mask": torch.zeros_like(BATCHES["apart"]["response_mask"])}
    monkeypatch.setitem(BATCHES, "apart", batch)
    gather = functools.partial(with_row, number=2.0 if others_measured else float("nan"))
    monkeypatch.setattr(own_trainer, "gather_rows", gather)
    register(keys)
    metrics = corrected(verl)[2]
    if "mis_loss_method" in keys:
        names = ("old_log_prob", "log_prob", "advantages", "response_mask")
        loss, metrics = verl.core_algos.POLICY_LOSS_REGISTRY["mis_ext"](
            config=argparse.Namespace(global_batch_info=verl_cases.GLOBAL),
            loss_agg_mode="token-mean",
            rollout_is_weights=batch["rollout_log_prob"],
            **{name: batch[name] for name in names},
        )
        assert float(loss) == 0.0
    # verl takes their mean over micro-batches and ranks, which a NaN would be.
    assert {*metrics.values()} == ({2.0} if others_measured else set())


def test_bypass_mode_refuses_a_method_that_looks_at_the_proximal_policy() -> None:
    with pytest.raises(ValueError, match="compares with the proximal policy"):
        loss_of({"mis_loss_method": "icepop"}, BATCHES["apart"], info={}, mode="token-mean", is_bypass=True)


def test_a_key_that_the_aggregation_of_verl_decides_is_refused() -> None:
    keys = {"mis_loss_method": "ppo", "calculate_per_token_loss": False}
    assert loss_of(keys, BATCHES["apart"], info={}, mode="seq-mean-token-mean", is_bypass=False)["loss"].isfinite()
    with pytest.raises(ValueError, match="calculate_per_token_loss=False: no effect, because verl sets it"):
        loss_of(keys, BATCHES["apart"], info={}, mode="token-mean", is_bypass=False)


def test_keys_are_a_mapping_or_a_file(tmp_path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("use_tis: true\n")
    assert read_keys(file) == read_keys(str(file)) == read_keys({"use_tis": True}) == {"use_tis": True}
    file.write_text("- use_tis\n")
    with pytest.raises(ValueError, match=r"keys\.yaml: expected a mapping of keys to values, got list"):
        read_keys(file)


@pytest.mark.parametrize(
    ("engine", "trainer", "rollout", "is_named"),
    [
        ("fsdp_config", "float16", "bfloat16", True),
        ("megatron", "fp16", "bfloat16", True),
        ("fsdp_config", "float16", "float16", False),
        ("fsdp_config", "float16", "float32", False),
        ("fsdp_config", "bfloat16", "float16", False),
        ("megatron", "bfloat16", "bfloat16", False),
        ("fsdp_config", "float16", None, False),
    ],
)
def test_the_command_says_where_the_engine_would_stay_behind_a_trainer_in_fp16(
    engine, trainer, rollout, is_named, tmp_path, capsys
) -> None:
    sides = {"actor": {engine: {"dtype": trainer}}, "rollout": {} if rollout is None else {"dtype": rollout}}
    content = {"algorithm": {"rollout_correction": {"rollout_is": "token"}}, "actor_rollout_ref": sides}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    assert main(["convert", "verl", str(file)]) == 0
    printed = capsys.readouterr().out
    remark = f"# actor_rollout_ref.actor.{engine}.dtype is {trainer}, and actor_rollout_ref.rollout.dtype is {rollout}"
    assert (remark in printed) == is_named
    assert ("Use the same dtype" in printed) == is_named
