# SPDX-License-Identifier: Apache-2.0
"""Ours are the corrections of five frameworks' own code.

Recorded by ``lab/peers/peer_corrections/record.py`` of 16a265ec.

Their modules stand in here by what of them we look at.
"""

import functools
import json
import lzma
import math
import pickle
import sys
import types
from pathlib import Path

import peer_correction_cases as cases
import pytest
import torch
from flat_keys import keys_of
from process_ranks import run_checks

from mis_ext.hosts import areal, ms_swift, roll, skyrl
from mis_ext.hosts.openrlhf import MisLoss
from mis_ext.hosts.own_trainer import correct_padded, scalars

with lzma.open(Path(__file__).parents[1] / "data" / "peer_corrections" / "numbers.json.xz", "rt") as file:
    RECORD = json.load(file)
BATCHES = {
    name: {key: torch.tensor(values) for key, values in batch.items()} for name, batch in RECORD["batches"].items()
}
# float32: sums of 60 tokens in another order.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-6}
pytestmark = pytest.mark.filterwarnings("ignore::mis_ext.MismatchWarning")


class Registry:
    """Stands for SkyRL's ``PolicyLossRegistry``, which refuses a name that it has."""

    losses: dict

    @classmethod
    def list_available(cls) -> list[str]:
        return [*cls.losses]

    @classmethod
    def unregister(cls, name: str) -> None:
        del cls.losses[name]

    @classmethod
    def register(cls, name: str):
        assert name not in cls.losses
        return lambda loss: cls.losses.setdefault(name, loss)


OPENRLHF = {"openrlhf": cases.OPENRLHF, "openrlhf_0_11_2": cases.OPENRLHF_0_11_2}


class PolicyLoss:
    """Stands for OpenRLHF's."""

    def __init__(self, settings: dict) -> None:
        self.token_level_loss = settings.get("token_level_loss", True) and settings.get("policy_loss_type") != "gspo"

    def __call__(self, *_: object, **__: object) -> tuple:
        assert not torch.is_grad_enabled()
        return None, "clip ratio", "kl", "vllm kl"


@pytest.fixture
def registered(monkeypatch):
    """What a host's module holds after registration, by host; the modules are stand-ins."""

    def put(path: str, **content: object) -> types.ModuleType:
        names = path.split(".")
        for end in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:end]), types.ModuleType(names[end - 1]))
        module = sys.modules[path]
        vars(module).update(content)
        if len(names) > 1:
            setattr(sys.modules[".".join(names[:-1])], names[-1], module)
        return module

    Registry.losses = {}
    path = "skyrl.backends.skyrl_train.utils.ppo_utils"
    put(path, PolicyLossRegistry=Registry, register_policy_loss=Registry.register)
    corrections = put("roll.utils.train_infer_corrections")

    def register(host: str, keys: dict):
        if host == "skyrl":
            skyrl.register(keys)
            return Registry.losses["mis_ext"]
        roll.register(keys)
        return corrections.compute_train_infer_correction

    return register


def assert_loss(loss_fn, batch: dict, wanted: dict, *rest: object, **sizes: object) -> tuple:
    current = batch["log_prob"].clone().requires_grad_()
    loss, *rest = loss_fn(current, *rest, **sizes)
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(wanted["loss"]), **TOLERANCE)
    torch.testing.assert_close(current.grad, torch.tensor(wanted["gradient"]), **TOLERANCE)
    return tuple(rest)


@pytest.mark.parametrize("name", cases.SKYRL)
def test_the_loss_is_that_of_skyrl(name, registered) -> None:
    loss_fn = registered("skyrl", cases.SKYRL[name][1])
    for each, wanted in RECORD["numbers"]["skyrl"][name].items():
        batch = BATCHES[each]
        rest = batch["old_log_prob"], batch["advantages"], None, batch["response_mask"].float()
        (metrics,) = assert_loss(loss_fn, batch, wanted, *rest, batch["rollout_log_prob"])
        assert all(isinstance(value, float) for value in metrics.values())
        # Under this name docs/reference/metrics.md finds it on a dashboard.
        assert "pg_clipfrac" in metrics
        # SkyRL would add these up over micro-batches.
        assert not any(key.endswith("loss") for key in metrics)


def reduced(micro_batches: list[dict]) -> dict[str, float]:
    """What a rank of SkyRL makes of the metrics of its micro-batches: its ``reduce_metrics``."""
    found = {}
    for name in micro_batches[0]:
        values = [metrics[name] for metrics in micro_batches]
        assert all(isinstance(value, float) for value in values)
        if name.endswith(("_max", "_min")):
            found[name] = float(max(values) if name.endswith("_max") else min(values))
        else:
            found[name] = sum(values) / len(values)
    return found


def test_a_micro_batch_of_padding_neither_blanks_nor_moves_the_metrics_of_skyrl(registered) -> None:
    loss_fn = registered("skyrl", {"mis_loss_method": "ppo", "use_tis": True, "mis_metrics": "all"})

    def metrics_of(name: str, *, is_padding: bool = False) -> dict:
        batch = BATCHES[name]
        mask = batch["response_mask"] * (not is_padding)
        streams = batch["log_prob"], batch["old_log_prob"], batch["advantages"], None
        loss, metrics = loss_fn(*streams, mask, batch["rollout_log_prob"])
        assert float(loss) == 0.0 or not is_padding
        return metrics

    close, apart, padding = metrics_of("close"), metrics_of("apart"), metrics_of("apart", is_padding=True)
    # Ranks reduce one name after the other.
    assert [*padding] == [*close]
    assert all(math.isnan(value) for value in padding.values())
    wanted = {name: (float(close[name]) + float(apart[name])) / 2 for name in close}
    wanted |= {name: max(close[name], apart[name]) for name in close if name.endswith("_max")}
    wanted |= {name: min(close[name], apart[name]) for name in close if name.endswith("_min")}
    assert {"mis_ratio_max", "mis_ratio_min", "mis_k3_kl", "pg_clipfrac"} <= wanted.keys()
    for order in ([close, apart, padding], [padding, close, padding, apart], [close, apart]):
        assert reduced(order) == pytest.approx(wanted)
        # One of its backends sends them to other ranks.
        assert reduced(pickle.loads(pickle.dumps(order))) == pytest.approx(wanted)
    # A rank that measured nothing has no number to show, whatever it measured before.
    assert all(math.isnan(value) for value in reduced([padding, padding]).values())


def test_skyrl_gets_the_last_keys_and_must_give_a_mask(registered) -> None:
    first, second = (registered("skyrl", {"mis_loss_method": name}) for name in ("ppo", "reinforce"))
    assert first is not second
    with pytest.raises(ValueError, match="loss_mask is missing"):
        second(*[torch.zeros(1, 2)] * 3, None)


@pytest.mark.parametrize(("host", "name"), [(host, name) for host, named in OPENRLHF.items() for name in named])
def test_the_loss_is_that_of_openrlhf_and_its_metrics_stay(host, name) -> None:
    settings, keys = OPENRLHF[host][name]
    loss_fn = MisLoss(PolicyLoss(settings), keys)
    for each, wanted in RECORD["numbers"][host][name].items():
        said, sizes = each.partition(", ")[::2]
        batch = BATCHES[said]
        rest = batch["old_log_prob"], batch["advantages"], batch["response_mask"].float(), batch["rollout_log_prob"]
        found = assert_loss(loss_fn, batch, wanted, *rest, **cases.SIZES[sizes])
        assert found == ("clip ratio", "kl", "vllm kl")
        assert loss_fn.metrics.keys() >= {"pg_loss", "ppo_kl"}
        assert all(value.dim() == 0 for value in loss_fn.metrics.values())


def test_a_rank_without_a_token_does_not_move_the_metrics_of_openrlhf() -> None:
    loss_fn = MisLoss(PolicyLoss({}), {"mis_loss_method": "ppo", "use_tis": True, "mis_guard": "warn"})
    batch = BATCHES["apart"]
    streams = batch["log_prob"], batch["old_log_prob"], batch["advantages"]

    def metrics_of(mask: torch.Tensor, engine: torch.Tensor) -> dict[str, torch.Tensor]:
        loss_fn(*streams, mask, engine)
        return loss_fn.metrics

    mask = batch["response_mask"].float()
    masks = [mask, torch.zeros_like(mask)]
    ranks = [metrics_of(each, batch["rollout_log_prob"]) for each in masks]
    # OpenRLHF's mean over ranks, and over micro-batches.
    for name, value in ranks[0].items():
        total = sum(metrics[name] * each.sum() for metrics, each in zip(ranks, masks, strict=True))
        torch.testing.assert_close(total / mask.sum(), value)
    # No number stands for tokens of which nothing is known.
    assert metrics_of(mask, torch.full_like(mask, torch.nan))["mis_k3_kl"].isnan()


@pytest.mark.parametrize(
    ("keys", "needs"),
    [
        ({"mis_loss_method": "ppo"}, False),
        ({"mis_loss_method": "icepop"}, True),
        ({"mis_loss_mode": "bypass"}, True),
        ({"mis_loss_method": "ppo", "use_tis": True}, True),
    ],
)
def test_keys_that_need_what_openrlhf_did_not_ask_its_engine_for_name_its_options(keys, needs) -> None:
    batch = BATCHES["apart"]
    streams = [batch[name] for name in ("log_prob", "old_log_prob", "advantages")]
    loss_fn = MisLoss(PolicyLoss({}), keys)
    if not needs:
        assert loss_fn(*streams, batch["response_mask"].float())[0].isfinite()
        return
    with pytest.raises(
        ValueError, match=r"is_correction_enable, or in OpenRLHF 0.11.2 and .*is_correction_level token"
    ):
        loss_fn(*streams, batch["response_mask"].float())


@pytest.mark.parametrize("host", ["AReaL", "OpenRLHF", "SkyRL"])
def test_a_key_that_the_host_decides_is_refused(host, registered) -> None:
    make = {
        "AReaL": functools.partial(areal.MisLoss, areal_function),
        "OpenRLHF": functools.partial(MisLoss, PolicyLoss({})),
        "SkyRL": functools.partial(registered, "skyrl"),
    }[host]
    make({"mis_loss_method": "ppo", "calculate_per_token_loss": True})
    with pytest.raises(ValueError, match=f"calculate_per_token_loss=False: no effect, because {host} sets it"):
        make({"mis_loss_method": "ppo", "calculate_per_token_loss": False})


@pytest.mark.parametrize("name", cases.ROLL)
def test_weights_and_masks_are_those_of_roll(name, registered) -> None:
    settings, keys = cases.ROLL[name]
    function = registered("roll", keys)
    for each, wanted in RECORD["numbers"]["roll"][name].items():
        batch, mask = BATCHES[each], BATCHES[each]["response_mask"]
        streams = batch["old_log_prob"], batch["rollout_log_prob"]
        weights, kept, metrics = function(cases.roll_config(settings), mask, *streams, global_valid_samples=3)
        torch.testing.assert_close(weights * kept * mask, torch.tensor(wanted["weights"]), **TOLERANCE)
        assert (kept * mask).tolist() == wanted["kept"]
        assert kept.dtype == torch.int64
        assert all(name.startswith("actor/mis_") for name in metrics)


def test_roll_must_not_drop_weights_and_keeps_its_loss(registered) -> None:
    function = registered("roll", cases.ROLL["token"][1])
    with pytest.raises(ValueError, match=r"is_weight\.enabled is False"):
        function(cases.roll_config({}), torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="keys of the full policy loss"):
        registered("roll", {"mis_loss_method": "ppo"})


@pytest.fixture
def logged(monkeypatch) -> dict:
    """What AReaL's tracker of statistics was given; its module stands in."""
    found: dict = {}
    tracker = types.SimpleNamespace(scalar=lambda **values: found.update(values))
    monkeypatch.setitem(sys.modules, "areal", types.ModuleType("areal"))
    monkeypatch.setitem(sys.modules, "areal.utils", types.SimpleNamespace(stats_tracker=tracker))
    return found


def areal_function(**_: object) -> tuple:
    """Stands for AReaL's, whose loss nobody should take."""
    assert not torch.is_grad_enabled()
    return None, "statistics"


def areal_call(loss_fn, batch: dict, *, is_packed: bool, **more: object):
    names = {"proximal_logprobs": "old_log_prob", "old_logprobs": "rollout_log_prob"}
    names |= {"advantages": "advantages", "loss_mask": "response_mask"}
    streams = {theirs: batch[name].flatten() if is_packed else batch[name] for theirs, name in names.items()}
    more = {"cu_seqlens": cases.cu_seqlens(batch) if is_packed else None} | more
    return lambda current: loss_fn(logprobs=current.flatten() if is_packed else current, **streams, **more)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", cases.AREAL)
def test_the_loss_is_that_of_areal_and_its_tracker_gets_what_was_measured(name, is_packed, logged) -> None:
    settings, keys = cases.AREAL[name]
    loss_fn, record = areal.MisLoss(areal_function, keys), RECORD["numbers"]["areal"]
    for each, wanted in record[name].items():
        rows = {**wanted, "gradient": torch.tensor(wanted["gradient"]).view(BATCHES[each]["log_prob"].shape).tolist()}
        call = areal_call(loss_fn, BATCHES[each], is_packed=is_packed, **settings)
        assert assert_loss(call, BATCHES[each], rows) == ("statistics",)
    # No case is one in which nothing acts.
    assert name == "off" or record[name] != record["off"]
    assert all(isinstance(value, float) and value == value for value in logged.values())
    assert ("mis_k3_kl" in logged) == ("use_tis" in keys)
    assert "pg_clipfrac" in logged


def test_packed_tokens_of_areal_without_their_lengths_are_refused(logged) -> None:
    call = areal_call(areal.MisLoss(areal_function, {}), BATCHES["apart"], is_packed=True, cu_seqlens=None)
    with pytest.raises(ValueError, match="cu_seqlens is missing"):
        call(BATCHES["apart"]["log_prob"])


@pytest.mark.parametrize(("method", "warns"), [("icepop", True), ("ppo", False)])
def test_one_stream_of_areal_that_stands_for_two_is_said_once(method, warns, logged, recwarn) -> None:
    batch = BATCHES["close"] | {"rollout_log_prob": BATCHES["close"]["old_log_prob"]}
    call = areal_call(areal.MisLoss(areal_function, {"mis_loss_method": method}), batch, is_packed=True)
    for _ in range(2):
        call(batch["log_prob"])
    assert sum("use_decoupled_loss" in str(each.message) for each in recwarn) == warns


class SwiftTrainer:
    """Stands for ms-swift's ``GRPOTrainer``."""


SWIFT_MODULES = ("swift", "swift.rlhf_trainers", "swift.rlhf_trainers.grpo_trainer")


def weights_in_swift(keys: dict, trainer: SwiftTrainer, batch: dict) -> tuple:
    ms_swift.register(keys)
    streams = batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"]
    return trainer._get_rollout_is_correction(*streams)


@pytest.fixture
def swift_weights(monkeypatch):
    """Its correction after registration; the module stands in."""
    module = types.SimpleNamespace(GRPOTrainer=SwiftTrainer)
    for name in SWIFT_MODULES:
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(SwiftTrainer, "_get_rollout_is_correction", None, raising=False)
    return weights_in_swift


def check_all_ranks(rank: int) -> None:
    sys.modules.update(dict.fromkeys(SWIFT_MODULES, types.SimpleNamespace(GRPOTrainer=SwiftTrainer)))
    keys, batch = {"use_tis": True, "tis_batch_normalize": True, "mis_guard": "warn"}, BATCHES["apart"]
    own = {name: values[rank::2] for name, values in batch.items()}
    trainer = cases.swift_trainer(SwiftTrainer(), "token_truncate")
    _, weights = weights_in_swift(keys, trainer, own)
    found = {name: value for name, (value,) in trainer._metrics["train"].items()}
    whole = correct_padded(
        keys,
        proximal_logprobs=batch["old_log_prob"],
        behavior_logprobs=batch["rollout_log_prob"],
        response_mask=batch["response_mask"],
    )
    torch.testing.assert_close(weights, whole.weights[rank::2], **TOLERANCE)
    assert found == pytest.approx(scalars(whole.metrics, prefix=""), rel=1e-5)


@pytest.mark.distributed
def test_weights_and_metrics_in_ms_swift_are_those_of_all_ranks(tmp_path) -> None:
    for report in run_checks({"ranks": check_all_ranks}, folder=tmp_path, world_size=2, seconds=60):
        assert report["ranks"] == ""


@pytest.mark.parametrize("mode", cases.MS_SWIFT)
def test_weights_are_those_of_ms_swift(mode, swift_weights) -> None:
    for each, wanted in RECORD["numbers"]["ms_swift"][mode].items():
        batch, trainer = BATCHES[each], cases.swift_trainer(SwiftTrainer(), mode)
        log_ratio, weights = swift_weights(cases.MS_SWIFT[mode][1], trainer, batch)
        found = torch.where(batch["response_mask"] > 0, weights, 0.0)
        torch.testing.assert_close(found, torch.tensor(wanted["weights"]), **TOLERANCE)
        assert torch.equal(log_ratio, batch["old_log_prob"] - batch["rollout_log_prob"])
        assert trainer._metrics["train"]["mis_k3_kl"][0] > 0.0
        trainer.disable_rollout_importance_sampling = True
        assert swift_weights(cases.MS_SWIFT[mode][1], trainer, batch) == (None, None)


def test_a_token_that_a_gate_rejects_has_no_weight_in_ms_swift(swift_weights) -> None:
    rejecting = keys_of(weight={"level": "token", "mode": "unbounded"}, gates=[{"reduce": "token", "high": 1.2}])
    batch, trainer = BATCHES["apart"], cases.swift_trainer(SwiftTrainer(), "token_mask")
    _, weights = swift_weights(rejecting, trainer, batch)
    wanted = torch.tensor(RECORD["numbers"]["ms_swift"]["token_mask"]["apart"]["weights"])
    torch.testing.assert_close(weights, wanted, **TOLERANCE)


def test_ms_swift_must_not_drop_weights_and_keeps_its_loss(swift_weights) -> None:
    with pytest.raises(ValueError, match="rollout_importance_sampling_mode is None"):
        swift_weights({"use_tis": True}, cases.swift_trainer(SwiftTrainer(), None), BATCHES["close"])
    with pytest.raises(ValueError, match="keys of the full policy loss"):
        ms_swift.register({"mis_loss_method": "ppo"})
