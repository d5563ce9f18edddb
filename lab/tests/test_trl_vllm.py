# SPDX-License-Identifier: Apache-2.0
"""TRL with vLLM's real engine, as recorded: ours has the gradients of TRL's own correction, from vLLM's own samples."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from trl_cases import faults_of_steps  # noqa: E402

RECORD = json.loads((ROOT / "lab" / "real_stack" / "trl_vllm.json").read_text())


def test_ours_has_the_gradients_of_trls_own_correction_and_not_those_of_none() -> None:
    logged = {name: run["logged"] for name, run in RECORD["runs"].items()}
    assert faults_of_steps(logged) == []
    # The engine computed in bfloat16: there was a mismatch to correct.
    assert {run["engine"]["dtype"] for run in RECORD["runs"].values()} == {"torch.bfloat16"}
    assert all(value > 1e-3 for value in logged["TRL's own"]["sampling/sampling_logp_difference/mean"])
    # The first rollout is of the same weights and the same seed in all runs.
    assert len({run["reward"][0] for run in logged.values()}) == 1
