# SPDX-License-Identifier: Apache-2.0
"""The demonstration with Megatron-Core's own inference as its engine."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from grpo.distributed import Ranks
    from grpo.pretrained import load_pretrained
    from megatron.core import parallel_state
    from onpolicy.demonstration import SEED, WORKLOADS, Experiment, Setting
    from onpolicy.pieces import ALL, Piece
    from onpolicy.static_context import StaticContext
    from onpolicy.trainer import Trainer
    from tiny_checkpoint import write_tiny_checkpoint

SHORT = WORKLOADS["short"]
PROMPTS = SHORT.prompts
DTYPES = [torch.bfloat16, torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"),
]


@pytest.fixture(scope="module")
def device():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks.start(context_parallel_size=1, seed=0).device
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.whole_run
@pytest.mark.parametrize("dtype", DTYPES)
def test_once_everything_is_aligned_every_token_agrees_until_a_weight_sync_is_forgotten(dtype, device):
    with Experiment(Setting(engine="megatron", dtype=dtype, pieces=ALL), SHORT, device) as experiment:
        reports = [step.report for step in experiment.steps(2, forgotten_sync=2)]
    assert [report.verdict for report in reports] == ["EXACT", "EXACT", "DIFFERENT"]
    assert {report.num_active_tokens for report in reports} == {32}
    assert "stale weights" in reports[-1].hint


def test_the_audit_has_the_weight_version_that_the_completions_carry(device):
    """Not the one that the demonstration handed over: an engine may have dropped it."""
    pieces = ALL - {Piece.ENGINE_ATTENTION}
    with Experiment(Setting(engine="megatron", dtype=torch.bfloat16, pieces=pieces), SHORT, device) as experiment:
        own = experiment._engine.generate
        experiment._engine.generate = lambda *args, **kwargs: [
            replace(completion, weight_version=7) for completion in own(*args, **kwargs)
        ]
        (step,) = experiment.steps(0)
    assert "sampled with other weights" in str(step.report)


def test_a_pretrained_model_agrees_in_chats_and_its_k3_says_so(device, tmp_path):
    write_tiny_checkpoint(tmp_path)
    found = load_pretrained(tmp_path)
    workload = SHORT.pretrained(found)
    assert [len(prompt) for prompt in workload.prompts] != [len(prompt) for prompt in SHORT.prompts]
    with Experiment(Setting(engine="megatron", dtype=torch.bfloat16, pieces=ALL), workload, device) as experiment:
        exported = experiment._trainer.export_weights()
        assert all(torch.equal(exported[name], weight.float()) for name, weight in found.weights.items())
        assert [(step.report.verdict, step.k3) for step in experiment.steps(0)] == [("EXACT", 0)]
    setting = Setting(engine="megatron", dtype=torch.bfloat16, pieces=ALL - {Piece.ENGINE_ATTENTION})
    with Experiment(setting, workload, device) as experiment:
        (step,) = experiment.steps(0)
        assert step.report.verdict == "DIFFERENT"
        # About half of the mean square, as differences are small.
        assert 0 < step.k3 < step.report.max_abs_diff**2
        assert experiment.culprit() == "decoder.layers.0.self_attention"


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU) for dtype in DTYPES])
def test_cuda_graphs_sample_what_forwards_do_at_every_weight_update_and_in_every_batch(dtype, device, monkeypatch):
    trainer = Trainer(SHORT.policy, ALL, dtype=dtype, device=device, seed=SEED, lr=1e-3)
    replaying, calling = (StaticContext(SHORT.policy, ALL, dtype=dtype, device=device, seed=SEED) for _ in range(2))
    calling.cuda_graphs = False
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(replay(graph)))
    # Each rollout meets graphs that were captured for other weights and prompts.
    for version, prompts in enumerate((PROMPTS, PROMPTS[::-1], PROMPTS[1:3] + PROMPTS[:1])):
        for parameter in trainer.model.parameters():
            parameter.data.mul_(1.01)
        for engine in (replaying, calling):
            engine.update_weights(trainer, version=version)
        assert replaying.generate(prompts, max_new_tokens=12) == calling.generate(prompts, max_new_tokens=12)
    assert len(replays) > 2 * 11
