# SPDX-License-Identifier: Apache-2.0
"""Numeric tests once more, with the kernels that torch has for CPUs without AVX-512 and without AVX2.

A product, a mean or an exponential rounds otherwise there: a tolerance that this machine's kernels just meet, and a
difference that only they make, fail here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
ATTENTION = "onpolicy/batch_invariant/test_batch_invariant_attention.py"
# The rest was run once: nothing in it depended on the kernels.
FILES = (
    f"{ATTENTION}::test_decode_chunked_prefill_and_prefill_have_the_same_bits",
    f"{ATTENTION}::test_gradients_of_sequences_in_a_pack_are_those_that_they_have_alone",
    "onpolicy/recording/test_comparison_megatron.py",
    "rollout/definitions/test_definition_scoring.py",
    "loss/test_policy_loss.py",
    "correction/test_toy_policy.py",
    "examples/test_true_on_policy_mixture.py::test_every_sampled_token_has_the_same_bits_once_everything_is_aligned",
)
TESTS = [f"tests/{name}" for name in FILES]


@pytest.mark.whole_run
@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES[:-1])
def test_numbers_agree_with_the_kernels_of_lesser_cpus_too(capability) -> None:
    own = torch.backends.cpu.get_cpu_capability()
    if own not in CAPABILITIES[CAPABILITIES.index(capability) + 1 :]:
        pytest.skip(f"this CPU has the kernels {own}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *TESTS],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability.lower()},
        capture_output=True,
        text=True,
    )
    assert f"kernels of torch: {capability}\n" in done.stdout
    assert done.returncode == 0, done.stdout[-5000:]
