# SPDX-License-Identifier: Apache-2.0
"""TRL and verl with vLLM, and rLLM, as recorded: ours has the gradients of their own correction."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import peer_training  # noqa: E402
import peer_training_cases as cases  # noqa: E402
from trl_cases import faults_of_steps  # noqa: E402


def runs_of(name: str) -> dict:
    return json.loads((ROOT / "lab" / "real_stack" / f"{name}.json").read_text())["runs"]


@pytest.mark.parametrize("name", ["trl_vllm", "trl_vllm_gpu"])
def test_ours_has_the_gradients_of_trls_own_correction_and_not_those_of_none(name: str) -> None:
    runs = runs_of(name)
    logged = {name: run["logged"] for name, run in runs.items()}
    assert faults_of_steps(logged) == []
    # The engine computed in bfloat16: there was a mismatch to correct.
    assert {run["engine"]["dtype"] for run in runs.values()} == {"torch.bfloat16"}
    # The second rollout is as near as the first: the engine got new weights.
    assert all(1e-3 < value < 3e-2 for value in logged["TRL's own"]["sampling/sampling_logp_difference/mean"])
    # The first rollout is of the same weights and the same seed in all runs.
    assert len({run["reward"][0] for run in logged.values()}) == 1


def test_ours_has_the_gradients_of_verls_own_correction_and_not_those_of_none() -> None:
    runs = runs_of("verl_vllm")
    assert peer_training.faults(runs, cases.VERL_VLLM) == []
    k3 = [steps for run in runs.values() for key, steps in run["steps"].items() if key.endswith("k3_kl")]
    # The engine got new weights: its samples stay as near to the trainer as they were, and the first are the same.
    assert len(k3) == 3
    assert all(1e-4 < each < 3e-3 for steps in k3 for each in steps)
    assert max(steps[0] for steps in k3) - min(steps[0] for steps in k3) < 1e-8


def test_in_rllm_ours_has_the_gradients_of_verls_own_loss_and_what_cannot_work_is_refused() -> None:
    runs = runs_of("verl_rllm")
    assert set(runs) == set(cases.VERL_RLLM)
    assert peer_training.faults(runs, cases.VERL_RLLM) == []
    own, ours = runs["rllm own bypass clip"]["steps"], runs["rllm our bypass whole"]["steps"]
    # The log-probs of the engine reach the loss. Later steps are means over micro-batches of other rows in each run.
    own_k3, our_k3 = own["rollout_corr/k3_kl"], ours["actor/mis_k3_kl"]
    assert own_k3[0] == pytest.approx(our_k3[0], rel=1e-6)
    assert own_k3 == pytest.approx(our_k3, rel=2e-2)
    refused = [name for name, case in cases.VERL_RLLM.items() if "refused" in case]
    assert len(refused) == 2
    for name in refused:
        for run in (runs["rllm none"], {"error": "?"}):
            assert peer_training.faults(runs | {name: run}, cases.VERL_RLLM) == [f"{name}: not refused"]
