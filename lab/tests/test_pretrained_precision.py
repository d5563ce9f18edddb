# SPDX-License-Identifier: Apache-2.0
"""A pretrained model's trainer computes as its study says: in fp16, with rounded weights, as its engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from pretrained_runs import GROUP, MARKS, steps

pytestmark = MARKS

from evidence.engines import EngineSpec  # noqa: E402
from evidence.pretrained import training as training_module  # noqa: E402
from evidence.pretrained.aligned import AlignedTrainer  # noqa: E402
from evidence.pretrained.training import PretrainedTraining  # noqa: E402
from evidence.pretrained.workplace import Workplace  # noqa: E402
from grpo.trainer import Trainer  # noqa: E402

# A CPU without instructions for bfloat16 multiplies float32 ten times as fast.
FLOAT32 = EngineSpec(dtype="float32")


@pytest.mark.whole_run
@pytest.mark.usefixtures("graded")
def test_in_fp16_the_gradient_is_that_of_float32_and_one_that_overflows_is_left_out(workplace: Workplace) -> None:
    norms = {}
    for dtype in ("float32", "float16"):
        group = dataclasses.replace(GROUP, dtype=dtype, engine=FLOAT32)
        training = PretrainedTraining(group, workplace)
        norms[dtype] = steps(training, 1)[0]["grad_norm"]
        assert {weight.dtype for weight in training._trainer.weights().values()} == {getattr(torch, dtype)}
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.05)
    before = {name: weight.clone() for name, weight in training._trainer.weights().items()}
    (optimizer,) = training._trainer._optimizer.chained_optimizers
    optimizer.grad_scaler._scale.fill_(2.0**40)
    row = steps(training, 1)[0]
    assert np.isnan(row["grad_norm"])
    after = training._trainer.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_trainer_rounds_as_the_cache_of_its_engine(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"num_prompts": 4, "response_length": 12, "dtype": "float32", "engine": FLOAT32}
    exact = dataclasses.replace(GROUP, **size)
    # transformers has no cache of 8 bits: the engine is exact, so what differs is what the trainer rounds.
    monkeypatch.setattr(workplace, "engine", lambda _, _own=workplace.engine: _own(exact))
    k3 = {}
    for simulated in ("", "kv", "qkv"):
        group = dataclasses.replace(
            exact, engine=EngineSpec(dtype="float32", cache="fp8_e5m2"), simulated_cache=simulated
        )
        k3[simulated] = steps(PretrainedTraining(group, workplace), 1)[0]["k3"]
    assert k3[""] < 1e-9 < k3["kv"] < k3["qkv"]
    with pytest.raises(ValueError, match="tiny: simulated_cache='kv', and the engine's cache is not rounded"):
        dataclasses.replace(GROUP, simulated_cache="kv")


def test_an_aligned_trainer_gives_an_answer_the_same_bits_in_any_batch(workplace: Workplace) -> None:
    run = PretrainedTraining(dataclasses.replace(GROUP, engine=FLOAT32), workplace)
    run._history.append(run._trainer.weights())
    data, _ = run._rollout(0)
    start = workplace.start(GROUP)
    scored = {}
    for trainer_type, size in ((AlignedTrainer, 16), (AlignedTrainer, 3), (AlignedTrainer, 1), (Trainer, 16)):
        args = training_module._arguments(dataclasses.replace(GROUP, micro_batch_size=size))
        trainer = trainer_type(args, start.shape, workplace.ranks(), start.weights)
        scored[trainer_type, size] = torch.cat(trainer.score(trainer.micro_batches(data)))
    aligned = scored[AlignedTrainer, 16]
    assert all(torch.equal(scored[AlignedTrainer, size], aligned) for size in (3, 1))
    assert 0 < (aligned - scored[Trainer, 16]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [({"engine": EngineSpec()}, "kind='transformers'"), ({"experts": 4}, "experts=4")],
)
def test_what_cannot_be_aligned_is_refused(change: dict[str, Any], named: str) -> None:
    aligned = dataclasses.replace(GROUP, engine=EngineSpec(kind="sglang"), is_aligned=True)
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(aligned, **change)


@pytest.mark.usefixtures("graded")
def test_weights_are_rounded_for_every_pass_and_the_optimizer_keeps_its_own(workplace: Workplace) -> None:
    group = dataclasses.replace(GROUP, dtype="float16", rounded_to="bfloat16", engine=FLOAT32)
    run = PretrainedTraining(dataclasses.replace(group, learning_rate=1e-5, updates=2), workplace)
    copies = [copy for group in run._trainer._optimizer.param_groups for copy in group["params"]]
    before = [copy.clone() for copy in copies]
    loaded = []
    load = run._engine.load
    run._engine.load = lambda weights: (loaded.append(weights), load(weights))[1]  # type: ignore[method-assign]
    assert max(row["grad_norm"] for row in steps(run, 2)) > 0
    loaded.append(run._trainer.weights())
    for weights in loaded:
        assert all(torch.equal(weight, weight.bfloat16().half()) for weight in weights.values())
    assert any(not torch.equal(loaded[0][name], loaded[-1][name]) for name in loaded[0])
    # Rounded, most of them would stay where they were.
    moved = [(copy != old).float().mean() for copy, old in zip(copies, before, strict=True)]
    assert sum(moved) / len(moved) > 0.8


def test_weights_of_other_dtypes_than_float16_are_not_rounded_again() -> None:
    with pytest.raises(ValueError, match="tiny: rounded_to='bfloat16' is for dtype 'float16', got 'bfloat16'"):
        dataclasses.replace(GROUP, rounded_to="bfloat16")
