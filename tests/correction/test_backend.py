# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen, and what each of them can be put into: a compiled graph, a CUDA graph."""

import sys
from argparse import Namespace

import pytest
import torch
import triton_support
from cases import correction_keys, random_samples
from reference import Samples

import mis_ext
from mis_ext.correction import pipeline
from mis_ext.correction.eager import EagerBackend
from mis_ext.correction.pipeline import choose_backend
from mis_ext.correction.plan import plan_of
from mis_ext.correction.triton import _can_run_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_triton = pytest.mark.skipif(triton_support.OBSTACLE is not None, reason=str(triton_support.OBSTACLE))


@pytest.fixture(autouse=True)
def choose_anew(monkeypatch):
    monkeypatch.delenv("MIS_EXT_BACKEND", raising=False)
    _can_run_triton.cache_clear()
    yield
    _can_run_triton.cache_clear()


@needs_triton
def test_triton_is_chosen_on_a_gpu_and_eager_on_a_cpu() -> None:
    from mis_ext.correction.triton.fused import TritonBackend

    assert choose_backend(CUDA) is TritonBackend
    assert choose_backend(CPU) is EagerBackend


@needs_triton
def test_the_variable_decides(monkeypatch) -> None:
    from mis_ext.correction.triton.fused import TritonBackend

    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    assert choose_backend(CUDA) is EagerBackend
    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")
    assert choose_backend(CUDA) is TritonBackend


def test_a_misspelt_backend_is_an_error_that_names_the_choices(monkeypatch) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "tritn")
    with pytest.raises(ValueError, match=r"MIS_EXT_BACKEND must be one of eager \| triton, got 'tritn' .*'triton'"):
        choose_backend(CPU)


@needs_triton
def test_triton_on_a_cpu_without_its_interpreter_is_an_error(monkeypatch) -> None:
    import triton

    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="MIS_EXT_BACKEND=triton: the tensors are on cpu"):
        choose_backend(CPU)


def test_without_triton_a_gpu_gets_eager_and_asking_for_triton_is_an_error(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_backend(CUDA) is EagerBackend
    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")
    with pytest.raises(ValueError, match="MIS_EXT_BACKEND=triton: Triton does not import"):
        choose_backend(CUDA)


@needs_triton
def test_an_old_triton_counts_as_none(monkeypatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.3.1")
    assert choose_backend(CUDA) is EagerBackend
    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")
    with pytest.raises(ValueError, match=r"Triton 3\.3\.1 is older than 3\.4"):
        choose_backend(CUDA)


SEGMENTS = [{"reduce": "segment_mean", "low": 0.9, "high": 1.1}]
CORRECTION = correction_keys(
    ("sequence", "clip"), gate="token gate", normalizer="valid", mis_denominator="kept", rs_gates=SEGMENTS
)
METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_metrics": "all"}


# Dynamo takes 20 s for all metrics.
LONG = (pytest.mark.whole_run, pytest.mark.long_run)


@pytest.mark.parametrize(
    ("keys", "cp_rank", "backend"),
    [
        pytest.param(
            CORRECTION | {"mis_metrics": "core"}, 1, "aot_eager", id="part of sequences, traced", marks=LONG[:1]
        ),
        pytest.param(METRICS_ONLY, None, "eager", id="all metrics, and nothing else", marks=LONG),
    ],
)
def test_the_eager_pipeline_is_one_graph_to_torch_compile(keys, cp_rank, backend, monkeypatch) -> None:
    samples = random_samples([5, 40, 3], seed=4)
    totals, lengths = [9, 44, 7], [5, 40, 3]
    if cp_rank is None:
        layout = mis_ext.PackedLayout.whole(lengths)
    else:
        layout = mis_ext.PackedLayout.context_parallel(lengths, total_lengths=totals, cp_rank=cp_rank, cp_size=2)
        # The other rank has nothing to say.
        monkeypatch.setattr(pipeline, "group_size", lambda _: 2)
    plan = plan_of(mis_ext.config_from_mapping(keys))

    def correct(proximal_T, behavior_T, mask_R) -> list[torch.Tensor]:
        correction = mis_ext.compute_correction(
            proximal_logprobs_T=proximal_T,
            behavior_logprobs_T=behavior_T,
            response_mask_R=mask_R,
            layout=layout,
            config=plan,
            token_metrics=True,
        )
        metrics = [metric.value() for metric in correction.metrics.values()]
        outputs = [correction.weights_T, correction.keep_mask_R, correction.totals_A, *metrics]
        return [*outputs, *correction.token_metrics.values()]

    local = layout.index.local_part
    inputs = local(torch.cat(samples.train)), local(torch.cat(samples.rollout)), torch.cat(samples.masks)
    compiled = torch.compile(correct, fullgraph=True, backend=backend)(*inputs)
    for ours, theirs in zip(compiled, correct(*inputs), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_the_whole_call_can_be_captured_in_a_cuda_graph(name, monkeypatch) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", name)
    first, second = (random_samples([50, 1, 2000, 7], seed=seed) for seed in (1, 2))
    static = Samples(*([x.cuda() for x in column] for column in (first.train, first.rollout, first.masks)))
    pg_loss = torch.linspace(-1.0, 2.0, 2058).cuda()
    args = Namespace(**CORRECTION, mis_max_reject_fraction=1.0)

    def call() -> list[torch.Tensor]:
        loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(
            args,
            pg_loss=pg_loss,
            train_log_probs=static.train,
            rollout_log_probs=static.rollout,
            loss_masks=static.masks,
            total_lengths=[53, 4, 2003, 10],
            response_lengths=[50, 1, 2000, 7],
        )
        return [loss, *masks, *metrics.values()]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for column, new in zip(static.__dict__.values(), second.__dict__.values(), strict=True):
        for target, source in zip(column, new, strict=True):
            target.copy_(source)
    graph.replay()
    for ours, theirs in zip(captured, call(), strict=True):
        assert torch.equal(ours, theirs)
