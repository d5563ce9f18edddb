# SPDX-License-Identifier: Apache-2.0
"""Ours are the ratios and losses of TRL's own ``GRPOTrainer``, recorded by ``lab/peers/trl/record.py``.

The trainer stands in here by what of it we look at.
"""

import json
import lzma
import os
import re
import subprocess
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl_cases as cases
import yaml
from flat_keys import keys_of

from mis_ext.correction.metrics import GroupNumber, Mean
from mis_ext.hosts.trl import MisTrainer, log_metrics
from mis_ext.keys.reading import config_given
from mis_ext.tools.dumps import Dumps

with lzma.open(Path(__file__).parents[1] / "data" / "trl" / "numbers.json.xz", "rt") as file:
    RECORD = json.load(file)
BATCHES = {
    name: {key: torch.tensor(values) for key, values in batch.items()} for name, batch in RECORD["batches"].items()
}
# float32: sums of 60 tokens in another order.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-6}
RATIO = keys_of(weight={"level": "token", "mode": "truncate", "high": 1.2})
WHOLE = {"mis_loss_method": "decoupled_token_tis"}
ROOT = Path(__file__).parents[2]
VENV = ROOT / os.environ.get("TRL_VENV", ".venv-trl")
in_trl = pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(),
    reason="no environment with TRL: run examples/trl/run.sh once, or set TRL_VENV",
)


class Host:
    """Stands for TRL's ``GRPOTrainer`` of a batch, with its defaults."""

    aux_loss_enabled = False
    off_policy_mask_threshold = None
    top_entropy_quantile = 1.0
    entropy_coef = 0.0
    use_adaptive_entropy = False
    importance_sampling_level = "token"
    use_vllm = True
    vllm_importance_sampling_correction = True
    rollout_func = None
    loss_type = "dapo"
    beta = 0.0
    built = 0

    def __init__(self, batch: dict, *, is_training: bool = True, **settings: object) -> None:
        Host.built += 1
        arguments = {"delta": None, "generation_kwargs": None, "use_bias_correction_kl": True, **cases.STEPS}
        self.args = SimpleNamespace(**arguments | {name: settings[name] for name in arguments if name in settings})
        for name, value in settings.items():
            setattr(self, name, value)
        self.max_completion_length = cases.STEPS["max_completion_length"]
        self.current_gradient_accumulation_steps = cases.STEPS["gradient_accumulation_steps"]
        self.accelerator = SimpleNamespace(num_processes=1, reduce=lambda numbers, _: numbers)
        self.model = SimpleNamespace(training=is_training)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.batch, self.current = batch, batch["log_prob"].clone().requires_grad_()

    def _generate_and_score_completions(self, inputs: object) -> dict:
        not_ours = {"importance_sampling_ratio": None, "advantages": self.batch["advantages"][:, 0]}
        reference = {"ref_per_token_logps": self.batch["old_per_token_logps"] - 0.1} if self.beta else {}
        return self.batch | not_ours | reference

    def _get_per_token_logps_and_entropies(self, model: object) -> tuple:
        return self.current, torch.zeros_like(self.current), None

    def compute_loss(self, model: object, inputs: dict) -> torch.Tensor:
        return self._compute_loss(model, inputs)

    def _compute_loss(self, model: object, inputs: dict) -> torch.Tensor:
        self._get_per_token_logps_and_entropies(model)
        return "of TRL"


class Trainer(MisTrainer, Host):
    pass


def ratio_of(trainer: Trainer) -> torch.Tensor:
    return trainer._generate_and_score_completions([])["importance_sampling_ratio"]


@pytest.mark.parametrize("name", cases.RATIOS)
def test_the_ratio_is_that_of_trl_and_one_where_the_policy_sampled_nothing(name) -> None:
    for each, wanted in RECORD["numbers"]["ratios"][name].items():
        batch = BATCHES[each]
        trainer = Trainer(batch, mis_keys=cases.RATIOS[name][1])
        torch.testing.assert_close(ratio_of(trainer), torch.tensor(wanted), **TOLERANCE)
        assert (ratio_of(trainer)[~batch["response_mask"]] == 1.0).all()
        assert trainer.compute_loss(None, {}) == "of TRL"
        logged = trainer._metrics["train"]
        assert logged
        assert all(key.startswith("mis_") and isinstance(values[0], float) for key, values in logged.items())


@pytest.mark.parametrize("name", cases.WHOLE)
def test_the_whole_loss_is_that_of_trl(name) -> None:
    _, keys, settings = cases.WHOLE[name]
    for each, wanted in RECORD["numbers"]["whole"][name].items():
        said, mode = each.split(", ")
        trainer = Trainer(BATCHES[said], mis_keys=keys, is_training=mode == "train", **settings)
        loss = trainer._compute_loss(None, trainer._generate_and_score_completions([]))
        loss.backward()
        torch.testing.assert_close(loss.detach(), torch.tensor(wanted["loss"]), **TOLERANCE)
        torch.testing.assert_close(trainer.current.grad, torch.tensor(wanted["gradient"]), **TOLERANCE)
        # TRL's log has a `loss` and a `kl` of its own.
        assert trainer._metrics[mode]["mis_loss/pg_loss"]
        assert all(key.startswith("mis_") for key in trainer._metrics[mode])
        assert trainer._mis_scores is None


@pytest.mark.parametrize("name", cases.RATIOS)
def test_a_token_without_a_log_prob_is_rejected_where_trl_gives_it_the_ratio_one(name) -> None:
    batch = BATCHES["close"]
    engine = batch["sampling_per_token_logps"].clone()
    engine[0, cases.UNSCORED] = torch.nan
    found = ratio_of(Trainer(batch | {"sampling_per_token_logps": engine}, mis_keys=cases.RATIOS[name][1]))
    wanted = torch.tensor(RECORD["numbers"]["unscored"][name])
    if name.startswith("token"):
        assert wanted[0, cases.UNSCORED] == 1.0
    assert found[0, cases.UNSCORED] == 0.0
    assert torch.isfinite(found).all()


def test_with_kept_denominators_the_mean_that_trl_takes_of_the_ratio_is_one() -> None:
    gate = {"reduce": "token", "low": 0.9, "high": 1.2}
    keys = keys_of(gates=[gate], denominator="kept")
    batch = BATCHES["apart"]
    mask = batch["response_mask"]
    of_tokens, of_rows = (ratio_of(Trainer(batch, mis_keys=keys, loss_type=name)) for name in ("dapo", "sapo"))
    assert 0 < (of_tokens[mask] > 0).sum() < mask.sum()
    torch.testing.assert_close(of_tokens[mask].mean(), torch.tensor(1.0))
    torch.testing.assert_close(((of_rows * mask).sum(1) / mask.sum(1)).mean(), torch.tensor(1.0))


def test_in_four_steps_of_trl_ours_has_the_gradients_of_its_own_correction() -> None:
    assert cases.faults_of_steps(RECORD["steps"]) == []


def test_a_metric_is_a_mean_over_all_ranks() -> None:
    other = torch.tensor([[6.0, 4.0], [3.0, 1.0]])
    trainer = Host(BATCHES["close"])
    trainer.accelerator.reduce = lambda numbers, how: numbers + other
    two = {"mis_a": Mean(torch.tensor(2.0), torch.tensor(4.0)), "mis_b": GroupNumber(torch.tensor(3.0))}
    log_metrics(trainer, two)
    log_metrics(trainer, {})
    assert trainer._metrics["train"] == {"mis_a": [1.0], "mis_b": [3.0]}


def test_wrong_keys_are_refused_before_the_trainer_is_built() -> None:
    before = Host.built
    for keys in ({"use_tis": True, "tis_upper_bond": 2.0}, {"mis_loss_method": "ppoo"}):
        with pytest.raises(ValueError, match=r"tis_upper_bond|ppoo"):
            Trainer(BATCHES["close"], mis_keys=keys)
    assert Host.built == before


@pytest.mark.parametrize(
    ("keys", "settings", "message"),
    [
        (WHOLE, {"use_vllm": False}, "behavior log-probs are missing"),
        (WHOLE, {"loss_type": "vespo"}, "loss_type=vespo with keys of the full policy loss"),
        (WHOLE, {"aux_loss_enabled": True}, "set router_aux_loss_coef=0"),
        (WHOLE, {"importance_sampling_level": "sequence"}, "importance_sampling_level=sequence.*'token'"),
        (WHOLE, {"delta": 4.0}, "delta=4.0.*delta=None"),
        (WHOLE, {"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold=0.1"),
        (WHOLE, {"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
        (WHOLE, {"entropy_coef": 0.01}, "entropy_coef=0.01"),
        (WHOLE, {"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
        (
            WHOLE | {"kl_loss_coef": 0.1},
            {"beta": 0.04},
            "kl_loss_coef=0.1: no effect, because TRL sets it to 0.04",
        ),
        (WHOLE | {"calculate_per_token_loss": True}, {"loss_type": "grpo"}, "calculate_per_token_loss=True: no effect"),
        (RATIO | {"calculate_per_token_loss": True}, {"loss_type": "grpo"}, "calculate_per_token_loss=True: no effect"),
        ({"use_tis": True, "tis_level": "sequence"}, {"loss_type": "vespo"}, "loss_type=vespo multiplies"),
        (
            {"use_tis": True, "tis_level": "token", "tis_batch_normalize": True},
            {"loss_type": "vespo"},
            "loss_type=vespo multiplies",
        ),
    ],
)
def test_what_would_be_lost_is_refused_when_the_trainer_is_built(keys, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(BATCHES["close"], mis_keys=keys, **settings)


@pytest.mark.parametrize(
    ("keys", "settings", "named"),
    [
        (RATIO, {"top_p": 0.9, "top_k": 20}, "top_p=0.9, top_k=20: .* Sample with top_p=1.0, top_k=0$"),
        (WHOLE, {"min_p": 0.05}, "min_p=0.05: .* Sample with min_p=0.0$"),
        (RATIO, {"generation_kwargs": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1: "),
        (RATIO, {"top_p": 1.0, "top_k": -1, "min_p": None, "repetition_penalty": 1.0}, None),
        ({"mis_loss_method": "ppo"}, {"top_p": 0.9}, None),
    ],
)
def test_a_distribution_that_the_trainer_does_not_score_with_is_named(keys, settings, named) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(BATCHES["close"], mis_keys=keys, **settings)
    messages = [str(each.message) for each in caught if "full vocabulary" in str(each.message)]
    assert len(messages) == (named is not None)
    assert all(re.match(named, message) for message in messages)


@pytest.mark.parametrize("setting", ["use_vllm", "vllm_importance_sampling_correction"])
def test_weights_that_trl_would_not_apply_are_refused_before_the_rollout(setting) -> None:
    trainer = Trainer({"log_prob": torch.zeros(1, 1)}, mis_keys=RATIO, **{setting: False})
    with pytest.raises(ValueError, match="importance-sampling ratio is disabled"):
        trainer._generate_and_score_completions([])


def test_a_rollout_without_vllm_has_the_whole_loss() -> None:
    trainer = Trainer(BATCHES["close"], mis_keys=WHOLE, use_vllm=False, rollout_func=print)
    inputs = trainer._generate_and_score_completions([])
    del inputs["old_per_token_logps"]
    assert torch.isfinite(trainer._compute_loss(None, inputs))
    del inputs["sampling_per_token_logps"]
    with pytest.raises(ValueError, match="behavior_logprobs are missing"):
        trainer._compute_loss(None, inputs)
    method = Trainer(BATCHES["close"], mis_keys={"mis_loss_method": "ppo"}, use_vllm=False)
    assert torch.isfinite(method._compute_loss(None, inputs))


class Recorded(Host):
    """With the ids and the places that a dump names."""

    def _generate_and_score_completions(self, inputs: object) -> dict:
        found = super()._generate_and_score_completions(inputs)
        ids = torch.arange(found["completion_mask"].numel()).view(found["completion_mask"].shape) + 100
        prompts = {"prompt_ids": torch.tensor([[0, 7]] * len(ids)), "prompt_mask": torch.tensor([[0, 1]] * len(ids))}
        return found | prompts | {"completion_ids": ids}


def test_the_keys_of_the_page_are_the_modes_of_trl_with_its_default_bounds() -> None:
    page = (ROOT / "docs" / "reference" / "trl.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+_(?:truncate|mask))`.*? \| (`.*?`)[. |].*$", page, re.MULTILINE))
    recorded = {
        "token_truncate": ("token_truncate", 1.2),
        "token_mask": ("token_mask, one bound", 1.2),
        "sequence_truncate": ("sequence_truncate", 1.2),
        "sequence_mask": ("sequence_mask, the default", 3.0),
    }
    assert rows.keys() == recorded.keys()
    for mode, (name, high) in recorded.items():
        keys = "\n".join(re.findall(r"`([^`]+)`", rows[mode])).replace("3.0", str(high))
        assert config_given(yaml.safe_load(keys)) == config_given(cases.RATIOS[name][1])


def test_the_class_of_the_page_writes_dumps_that_the_report_reads(tmp_path) -> None:
    page = (ROOT / "docs" / "reference" / "trl.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "WritesDumps" in block), names)
    batch = BATCHES["apart"]
    trainer = type("Dumping", (names["WritesDumps"], MisTrainer, Recorded), {})(batch, mis_keys=RATIO)
    trainer.args.output_dir, trainer.state = str(tmp_path), SimpleNamespace(global_step=3)
    trainer.accelerator.process_index = 1
    found = trainer._generate_and_score_completions([])
    trainer.model.training = False
    trainer._generate_and_score_completions([])
    # One row each is a response: those without a token are none.
    rows = [row for row, mask in enumerate(found["completion_mask"].bool()) if mask.any()]
    samples = [*Dumps([tmp_path / "dumps" / "rank_1.jsonl"])]
    assert len(samples) == len(rows) > 1
    mask = found["completion_mask"] * found.get("tool_mask", 1)
    for row, sample in zip(rows, samples, strict=True):
        here = found["completion_mask"][row].bool()
        wanted = found["old_per_token_logps"][row][here], found["sampling_per_token_logps"][row][here]
        assert sample.rollout_id == 3
        assert sample.token_ids == [7, *found["completion_ids"][row][here].tolist()]
        assert torch.equal(torch.as_tensor(sample.response_mask), mask[row][here].to(torch.int64))
        assert float(sample.advantages) == pytest.approx(float(found["advantages"][row]))
        torch.testing.assert_close(sample.proximal_log_probs.float(), wanted[0])
        torch.testing.assert_close(sample.behavior_log_probs.float(), wanted[1])


def alone() -> dict[str, str]:
    """The environment without a rank, which other tests of this process may have left: accelerate waits for peers."""
    return {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}


@pytest.mark.whole_run
@in_trl
def test_the_example_trains_and_trl_logs_our_metrics_in_each_step() -> None:
    command = ["bash", "examples/trl/run.sh", "yaml/mis.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=alone() | {"VENV": str(VENV)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = re.findall(r"^{'loss': .*$", done.stdout, re.MULTILINE)
    assert len(steps) == 4
    for step in steps:
        logged = dict(re.findall(r"'([^']+)': '([^']+)'", step))
        assert 0.0 < float(logged["mis_k3_kl"]) < 0.01
        assert float(logged["grad_norm"]) > 0.0


@pytest.mark.whole_run
@in_trl
def test_in_trl_itself_ours_has_the_numbers_of_its_own_correction() -> None:
    command = [str(VENV / "bin" / "python"), "lab/peers/trl/record.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=alone(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "97 cases, 0 differ" in done.stdout


class OwnLoss(Host):
    """Stands for Unsloth's trainer, which computes a loss of its own in the place of TRL's."""

    def compute_loss(self, model: object, inputs: dict) -> torch.Tensor:
        return torch.zeros(())


class OwnTrainer(MisTrainer, OwnLoss):
    pass


@pytest.mark.parametrize(
    ("keys", "liger", "is_lost"), [(RATIO, False, True), (WHOLE, True, True), (RATIO, True, False)]
)
def test_a_trainer_with_a_loss_of_its_own_is_refused(keys, liger, is_lost) -> None:
    trainer = OwnTrainer(BATCHES["apart"], mis_keys=keys, use_liger_kernel=liger)
    if not is_lost:
        assert trainer.compute_loss(None, {}) == 0.0
        return
    with pytest.raises(ValueError, match="OwnTrainer computes its loss without TRL's _compute_loss"):
        trainer.compute_loss(None, {})
