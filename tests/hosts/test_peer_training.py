# SPDX-License-Identifier: Apache-2.0
"""Real updates by the trainers of other frameworks: ours and their own correction take the same steps.

Recorded on a CPU by ``lab/peers/verl/train.py`` and ``lab/peers/peer_training/train.py`` of 16a265ec.
"""

import copy
import json
import lzma
import math
from pathlib import Path
from types import SimpleNamespace as namespace

import peer_training
import peer_training_cases as cases
import pytest

DATA = Path(__file__).parents[1] / "data"
RUNS = {"verl": json.loads(lzma.decompress((DATA / "verl" / "training.json.xz").read_bytes()))["runs"]}
RUNS |= json.loads(lzma.decompress((DATA / "peer_training" / "training.json.xz").read_bytes()))["runs"]


@pytest.mark.parametrize("host", cases.CASES)
def test_ours_takes_the_steps_of_their_own_correction_and_others_do_not(host) -> None:
    assert set(RUNS[host]) == set(cases.CASES[host])
    assert peer_training.faults(RUNS[host], cases.CASES[host]) == []


PPO_ACTOR = """
class ActorPPOTrainer:
    def __init__(self):
        self.actor_loss_fn = PolicyLoss(
            token_level_loss=True,
        )

    def training_step(self, experience):
        loss = self.actor_loss_fn()
        experience.info["ppo_kl"] = 0.25
        return loss
"""
"""The places in OpenRLHF's file, and nothing else of it."""


def test_the_lines_of_the_page_go_into_openrlhfs_file(tmp_path) -> None:
    (tmp_path / "mis.yaml").write_text("use_tis: true\n")
    page = (Path(__file__).parents[2] / "docs" / "guide" / "openrlhf.md").read_text(encoding="utf-8")
    host = namespace(token_level_loss=True)
    names = {"PolicyLoss": lambda **_: host}
    exec(peer_training.with_openrlhf_lines(PPO_ACTOR, page=page, keys=tmp_path / "mis.yaml"), names)
    trainer, experience = names["ActorPPOTrainer"](), namespace(info={})
    assert trainer.actor_loss_fn.host is host
    assert trainer.actor_loss_fn.keys == {"use_tis": True}
    trainer.actor_loss_fn = lambda: 1.5
    trainer.actor_loss_fn.metrics = {"mis_k3_kl": 0.5}
    assert trainer.training_step(experience) == 1.5
    assert experience.info == {"ppo_kl": 0.25, "mis_k3_kl": 0.5}


@pytest.mark.parametrize("host", cases.CASES)
def test_every_run_but_the_first_is_compared(host) -> None:
    first, *others = cases.CASES[host].items()
    assert first[0] == "none"
    assert all(case.get("like") or case.get("unlike") for _, case in others)
    ours = [case for _, case in others if "keys" in case]
    assert all(case.get("logs") for case in ours)
    assert any("like" in case for case in ours)


def faults_with(host: str, name: str, **changed: dict) -> list[str]:
    """After a change of one run."""
    return peer_training.faults(RUNS[host] | {name: RUNS[host][name] | changed}, cases.CASES[host])


@pytest.mark.parametrize("host", cases.CASES)
@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_another_gradient_norm_or_another_weight_is_a_fault(host, factor) -> None:
    for name in (name for name, case in cases.CASES[host].items() if "like" in case):
        run = copy.deepcopy(RUNS[host][name])
        norms = peer_training.norms_of(run)
        norms[-1] *= factor
        assert any(fault.startswith(f"{name}: ") for fault in faults_with(host, name, steps=run["steps"]))
        for weight in ("sum", "norm"):
            key = next(key for key in run["weights"] if key.endswith(f"q_proj.weight: {weight}"))
            weights = RUNS[host][name]["weights"] | {key: RUNS[host][name]["weights"][key] * factor + 0.001}
            assert any(fault.startswith(f"{name}: ") for fault in faults_with(host, name, weights=weights))


@pytest.mark.parametrize("host", cases.CASES)
def test_a_run_that_must_differ_and_does_not_is_a_fault(host) -> None:
    for name, case in cases.CASES[host].items():
        if "unlike" in case:
            found = faults_with(host, name, **RUNS[host][case["unlike"]])
            assert any(fault.startswith(f"{name}: ") for fault in found)


@pytest.mark.parametrize("host", cases.CASES)
def test_a_metric_that_is_not_in_their_log_is_a_fault_and_so_is_an_error(host) -> None:
    for name, case in cases.CASES[host].items():
        for key in case.get("logs", ()):
            steps = {other: values for other, values in RUNS[host][name]["steps"].items() if other != key}
            assert faults_with(host, name, steps=steps) == [f"{name}: no {key} in the log"]
    assert "none: out of memory" in faults_with(host, "none", error="out of memory")


def test_nemo_rls_sums_over_its_mini_batches_are_means() -> None:
    ours, own = (RUNS["nemo_rl"][name]["steps"] for name in ("ours", "own"))
    # NeMo-RL has this one too.
    assert ours["mis_k3_kl"] == pytest.approx(own["gen_kl_error"], rel=1e-5)
    # The first rollout and the model that scores it are those of SkyRL's run, which has the maximum itself.
    maximum = RUNS["skyrl"]["ours"]["steps"]["loss_metrics/mis_ratio_max"][0]
    assert 1.0 < ours["mis_ratio_highest"][0] < maximum
