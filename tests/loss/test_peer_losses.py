# SPDX-License-Identifier: Apache-2.0
"""Our losses are those of prime-rl, NeMo-RL and RLinf, of their own code: ``peer_losses/record.py`` of 16a265ec."""

import json
import lzma
import pickle
import sys
import types
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import peer_cases
import pytest
import torch
from synchronization import READERS

from mis_ext.hosts.nemo_rl import MisLoss
from mis_ext.hosts.prime_rl import loss

with lzma.open(Path(__file__).parents[1] / "data" / "peer_losses" / "numbers.json.xz", "rt") as file:
    RECORD = json.load(file)
BATCHES = {
    name: {key: torch.tensor(values) for key, values in batch.items()} for name, batch in RECORD["batches"].items()
}
# float32: sums of 60 tokens in another order.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-6}
pytestmark = pytest.mark.filterwarnings("ignore::mis_ext.MismatchWarning")


class LossInputs(NamedTuple):
    """Has the fields of prime-rl's own."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None


class LossOutputs(NamedTuple):
    """Has those of prime-rl's own."""

    loss: torch.Tensor
    metrics: dict


class LossType(Enum):
    """NeMo-RL's own has the same values."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class HostLoss:
    """Stands for NeMo-RL's loss, which runs in ``record.py``: what of it we look at."""

    input_type = "logprob"

    def __init__(self, settings: dict) -> None:
        self.loss_type = LossType.TOKEN_LEVEL if settings.get("token_level_loss", True) else LossType.SEQUENCE_LEVEL
        self.force_on_policy_ratio = settings.get("force_on_policy_ratio", False)
        self.reference_policy_kl_penalty = settings.get("reference_policy_kl_penalty", 0.0)
        self.positive_example_nll_weight = settings.get("positive_example_nll_weight", 0.0)

    def __call__(self, *_: object) -> tuple[None, dict]:
        return None, {"gen_kl_error": 0.25}


@pytest.fixture
def prime_rl(monkeypatch):
    """Stands for the module of prime-rl that is touched; prime-rl itself runs in ``record.py``."""
    module = types.SimpleNamespace(LossOutputs=LossOutputs)
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss"):
        monkeypatch.setitem(sys.modules, name, module)


def assert_close(found: tuple, wanted: dict) -> None:
    for value, name in zip(found, ("loss", "gradient"), strict=True):
        torch.testing.assert_close(value, torch.tensor(wanted[name]), **TOLERANCE)


@pytest.mark.parametrize("name", peer_cases.RLINF)
def test_the_loss_of_a_batch_is_that_of_rlinf(name) -> None:
    *_, keys = peer_cases.RLINF[name]
    for each, wanted in RECORD["losses"]["rlinf"][name].items():
        batch = BATCHES[each]
        current = batch["log_prob"].clone().requires_grad_()
        loss, _ = peer_cases.rlinf_loss(
            keys=keys,
            logprobs=current,
            old_logprobs=batch["rollout_log_prob"],
            proximal_logprobs=batch["old_log_prob"],
            advantages=batch["advantages"],
            loss_mask=batch["response_mask"].bool(),
        )
        loss.backward()
        assert_close((loss.detach(), current.grad), wanted)


@pytest.mark.parametrize("name", peer_cases.PRIME_RL)
def test_the_loss_of_samples_is_that_of_prime_rl(name, prime_rl) -> None:
    _, keys = peer_cases.PRIME_RL[name]
    for each, wanted in RECORD["losses"]["prime_rl"][name].items():
        batch = BATCHES[each.partition(",")[0]]
        current = batch["log_prob"].clone().requires_grad_()
        weights = peer_cases.weights_of(batch) if "weights" in each else [None] * len(current)
        streams = current, batch["rollout_log_prob"], batch["advantages"], batch["response_mask"], weights
        outputs = [
            loss(LossInputs(policy, behavior, None, advantages, mask, weight), keys=keys)
            for policy, behavior, advantages, mask, weight in zip(*streams, strict=True)
        ]
        total = sum(output.loss for output in outputs) / peer_cases.RL_SCALE
        total.backward()
        assert_close((total.detach(), current.grad), wanted)
        assert all(value.dim() == 0 for output in outputs for value in output.metrics.values())
        # prime-rl has a "loss" of its own in the same lists, of which it takes means: one NaN would blank them.
        assert not any("loss" in output.metrics for output in outputs)
        assert ["pg_loss" in output.metrics for output in outputs] == batch["response_mask"].any(1).tolist()
        assert all(value.isfinite() for output in outputs for value in output.metrics.values())


def test_prime_rl_has_no_proximal_policy_and_a_method_that_looks_at_it_is_refused(prime_rl) -> None:
    row = torch.zeros(2)
    with pytest.raises(ValueError, match="compares with the proximal policy"):
        loss(LossInputs(row, row, None, row, row == 0, None), keys={"mis_loss_method": "icepop"})


def test_a_negative_weight_of_prime_rl_is_refused_by_its_range(prime_rl) -> None:
    row = torch.zeros(2)
    weighted = LossInputs(row, row, None, row, row == 0, torch.tensor([1.0, -0.5]))
    with pytest.raises(ValueError, match=r"values from -0\.5 to 1: .* must be finite and at least 0"):
        loss(weighted, keys={"mis_loss_method": "prime_rl"})


def computed(name: str, each: str) -> tuple:
    settings, keys = peer_cases.NEMO_RL[name]
    loss_fn = pickle.loads(pickle.dumps(MisLoss(HostLoss(settings), keys)))
    current = BATCHES[each]["log_prob"].clone().requires_grad_()
    data = peer_cases.nemo_data(BATCHES[each])
    if settings.get("force_on_policy_ratio"):
        # NeMo-RL puts zeros there, for it does not score then.
        data["prev_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    value, metrics = loss_fn(next_token_logprobs=current, data=data, **peer_cases.SIZES)
    value.backward()
    return (value.detach(), current.grad), metrics


@pytest.mark.parametrize("name", peer_cases.NEMO_RL)
def test_the_loss_is_that_of_nemo_rl(name) -> None:
    for each, wanted in RECORD["losses"]["nemo_rl"][name].items():
        found, metrics = computed(name, each)
        assert_close(found, wanted)
        # NeMo-RL does not divide these by the number of its mini-batches.
        assert not any("_max" in key or "_min" in key for key in metrics)


def test_a_maximum_has_another_name_in_nemo_rl() -> None:
    loss_fn = MisLoss(HostLoss({}), {"mis_loss_method": "ppo", "use_tis": True})
    batch = BATCHES["close"]
    _, metrics = loss_fn(batch["log_prob"], peer_cases.nemo_data(batch), **peer_cases.SIZES)
    assert metrics["mis_ratio_highest"] > 0.0
    assert "mis_ratio_max" not in metrics


@pytest.mark.parametrize("name", ["ppo", "ppo, sequences"])
def test_metrics_add_up_over_micro_batches_as_the_loss_does(name) -> None:
    found = [computed(name, each) for each in BATCHES]
    total = sum(float(value) for (value, _), _ in found)
    assert sum(metrics["loss"] for _, metrics in found) == pytest.approx(total, rel=1e-5)
    assert all(metrics["gen_kl_error"] == 0.25 for _, metrics in found)


def test_a_sample_that_nemo_rl_leaves_out_adds_nothing_to_a_metric() -> None:
    loss_fn = MisLoss(HostLoss({}), {"mis_loss_method": "ppo", "use_tis": True})
    data = peer_cases.nemo_data(BATCHES["close"])
    (left_out,) = (data["sample_mask"] == 0.0).nonzero().flatten().tolist()
    row = slice(left_out, left_out + 1)
    # With sequence packing, NeMo-RL calls the loss of each sample, and adds up.
    one = {name: values[row] for name, values in data.items()}
    _, metrics = loss_fn(BATCHES["close"]["log_prob"][row], one, **peer_cases.SIZES)
    del metrics["gen_kl_error"]
    assert {"pg_loss", "mis_k3_kl", "mis_ess_ratio_token"} <= metrics.keys()
    assert {*metrics.values()} == {0.0}


@pytest.mark.parametrize("host", ["prime-rl", "NeMo-RL"])
def test_a_term_compares_each_token_with_its_own_reference(host, prime_rl) -> None:
    keys = {"mis_loss_method": "reinforce", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}
    batch, own = BATCHES["close"], BATCHES["close"]["log_prob"]

    def term(reference: torch.Tensor) -> float:
        if host == "NeMo-RL":
            data = peer_cases.nemo_data(batch)
            data["reference_policy_logprobs"] = torch.nn.functional.pad(reference, (1, 0))
            return MisLoss(HostLoss({}), keys)(own, data, **peer_cases.SIZES)[1]["kl_loss"]
        rows = [values.flatten() for values in (own, own, reference, batch["advantages"], batch["response_mask"])]
        return float(loss(LossInputs(*rows, None), keys=keys).metrics["kl_loss"])

    assert term(own) == 0.0 < term(batch["old_log_prob"])


@pytest.mark.parametrize("host", ["prime-rl", "NeMo-RL"])
def test_a_call_reads_the_device_once(host, prime_rl, monkeypatch) -> None:
    batch, keys, reads = BATCHES["close"], {"mis_loss_method": "reinforce", "get_mismatch_metrics": True}, []
    loss_fn = MisLoss(HostLoss({}), keys)
    names = ("log_prob", "rollout_log_prob", "advantages", "response_mask")
    current, behavior, advantages, mask = (batch[name].flatten() for name in names)

    def call() -> dict:
        if host == "NeMo-RL":
            return loss_fn(batch["log_prob"], peer_cases.nemo_data(batch), **peer_cases.SIZES)[1]
        return loss(LossInputs(current, behavior, None, advantages, mask, None), keys=keys).metrics

    def counted(read):
        return lambda *given: reads.append(read.__name__) or read(*given)

    # On a CPU the guards read the first ones too.
    for _ in range(5):
        call()
    for name in READERS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    assert "mis_k3_kl" in call()
    assert reads == ["tolist"]


@pytest.mark.parametrize("name", ["reference_policy_kl_penalty", "positive_example_nll_weight"])
def test_a_term_of_nemo_rl_that_would_be_lost_is_refused(name) -> None:
    with pytest.raises(ValueError, match=rf"loss_fn\.{name}=0\.01: .* set it to 0"):
        MisLoss(HostLoss({name: 0.01}), {"mis_loss_method": "ppo"})


def test_a_key_that_the_host_decides_is_refused(prime_rl) -> None:
    with pytest.raises(ValueError, match="calculate_per_token_loss=False: no effect, because NeMo-RL sets it"):
        MisLoss(HostLoss({}), {"mis_loss_method": "ppo", "calculate_per_token_loss": False})
    row = torch.zeros(2)
    with pytest.raises(ValueError, match="use_rollout_logprobs=False: no effect, because prime-rl sets it"):
        loss(LossInputs(row, row, None, row, row == 0, None), keys={"use_rollout_logprobs": False})


def test_what_nemo_rl_asks_of_its_loss_is_answered_by_its_loss() -> None:
    loss_fn = MisLoss(HostLoss({}), {"mis_loss_method": "ppo"})
    assert (loss_fn.input_type, loss_fn.loss_type) == ("logprob", LossType.TOKEN_LEVEL)
    assert not hasattr(loss_fn, "use_fused_linear_logprobs")
