# SPDX-License-Identifier: Apache-2.0
"""What routing replay is worth, as `lab/benchmarks/routing_replay.py` measures it."""

import statistics
import warnings

import pytest


@pytest.mark.usefixtures("one_thread")
# Of Megatron-Core itself, at every projection.
@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")
def test_replay_ends_the_disagreement_and_halves_k3() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
        warnings.simplefilter("ignore")
        from routing_replay import measure
        from toy_moe import MoEShape, single_process
    ratios = []
    for seed in range(3):
        with single_process():
            off, on, shifted = measure(MoEShape(num_layers=2), seed=seed)
        assert off.disagreement.differing_choices > 0.005
        assert on.disagreement.differing_choices == 0
        assert on.disagreement.num_compared == off.disagreement.num_compared == 16 * 31 * 2
        assert shifted.k3 > off.k3
        ratios.append(on.k3 / off.k3)
    assert statistics.median(ratios) < 0.5
