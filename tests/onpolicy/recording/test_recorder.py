# SPDX-License-Identifier: Apache-2.0
"""The recorder: it changes nothing, and leaves nothing behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_decoder import VOCABULARY, TinyDecoder, packed, padded, recording_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.rows import Rows


def hooks_of(model: nn.Module) -> list[object]:
    kinds = [name for name in vars(model) if "hooks" in name]
    assert "_forward_hooks" in kinds
    return [hook for module in model.modules() for kind in kinds for hook in (vars(module)[kind] or {}).values()]


class Regularised(nn.Module):
    """Dropout, so that a random number drawn by the recorder would show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.layers(x)}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_recording_changes_no_output_bit_and_no_gradient(training: bool) -> None:
    torch.manual_seed(0)
    model, x = Regularised().train(training), torch.randn(2, 5, 6)

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        output = model(x)["out"]
        output.square().sum().backward()
        return [output.detach(), *(weight.grad.clone() for weight in model.parameters())]

    plain = run()
    rows = Rows.padded(torch.ones(2, 5))
    with record(model) as recorder, recorder.rows(rows):
        recorded = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    recording = recorder.recording()
    assert torch.equal(recording.outputs[""]["out"].values, plain[0].flatten(0, 1))
    every = [*recording.outputs.values(), *recording.inputs.values()]
    assert len(every) == 2 * len([*model.modules()])
    assert not any(entry.values.requires_grad for entries in every for entry in entries.values())


def test_no_hook_stays_behind_also_after_an_exception() -> None:
    model = TinyDecoder()
    ids, rows = padded()
    with record(model) as recorder:
        assert hooks_of(model)
        with recorder.rows(rows):
            model(ids, rows)
    assert hooks_of(model) == []
    with pytest.raises(KeyError, match="mine"), record(model):
        raise KeyError("mine")
    assert hooks_of(model) == []
    with record(model) as recorder, recorder.rows(rows):
        with pytest.raises(IndexError):
            model(ids + VOCABULARY, rows)
        # The forward that failed does not count as running.
        model.embedding(ids)
    assert hooks_of(model) == []
    assert recorder.recording().outputs == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["layers.0.nrm"]}, r"no module matches 'layers.0.nrm' \(did you mean 'layers.0.norm'"),
        ({"exclude": ["heads"]}, "no module matches 'heads'"),
        ({"layout": "thd"}, "layout must be one of"),
        ({"layout": "none"}, "layout must be one of"),
    ],
)
def test_a_wrong_option_is_an_error(options: dict, message: str) -> None:
    model = TinyDecoder()
    with pytest.raises(ValueError, match=message), record(model, **options):
        pass
    assert hooks_of(model) == []


def test_a_forward_without_rows_is_an_error() -> None:
    model, (ids, rows) = TinyDecoder(), padded()
    with record(model) as recorder:
        with pytest.raises(ValueError, match="a forward without rows"):
            model(ids, rows)
        with recorder.rows(rows):
            model(ids, rows)
        with pytest.raises(ValueError, match="a forward without rows"):
            model(ids, rows)


def in_thread(function: Callable[[], object]) -> list[Exception]:
    """Run it in another thread; what an engine would do with its errors: keep them to itself."""
    errors: list[Exception] = []

    def swallow() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=swallow)
    thread.start()
    thread.join()
    return errors


def test_rows_can_be_read_from_the_call_in_the_thread_of_the_engine() -> None:
    model, (ids, rows) = TinyDecoder(), packed()
    calls: list[int] = []

    def rows_of(module: nn.Module, args: tuple, kwargs: dict) -> Rows | None:
        assert module is model
        calls.append(threading.get_ident())
        return kwargs["rows"] if args[0].numel() > 1 else None

    def engine() -> None:
        with torch.no_grad():
            model(torch.tensor([[1]]), rows=Rows.packed([1], sequences=[99]))  # A warm-up.
            model(ids, rows=rows)

    with record(model, rows_of=rows_of) as recorder:
        assert in_thread(engine) == []
    assert len(calls) == 2
    assert threading.get_ident() not in calls
    assert compare(recorder.recording(), recording_of(TinyDecoder(), packed())).passed


def test_an_error_that_an_engine_swallows_is_raised_at_the_end() -> None:
    model, (ids, rows) = TinyDecoder(), packed()
    with pytest.raises(ValueError, match="a forward without rows"), record(model):
        assert len(in_thread(lambda: model(ids, rows))) == 1
    assert hooks_of(model) == []


def test_a_recorded_model_that_is_recomputed_is_recorded_once() -> None:
    model, first, second = nn.Linear(4, 4), *torch.randn(2, 1, 3, 4)
    first.requires_grad_()
    with record(model) as recorder:
        with recorder.rows(Rows.packed([3])):
            output = checkpoint(model, first, use_reentrant=False)
        # The backward pass of one micro-batch, when the next is on.
        with recorder.rows(Rows.packed([3], sequences=[1])):
            output.sum().backward()
            model(second)
    entry = recorder.recording().inputs[""]["input"]
    assert torch.equal(entry.values, torch.cat([first.detach()[0], second[0]]))


def test_compilation_sees_no_hook() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(1, 3, 4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), record(model) as recorder, recorder.rows(Rows.packed([3])):
        assert torch.equal(compiled(x), model[1](model[0](x)))
    assert len(graphs) == 1
    assert recorder.recording().outputs == {}


def test_what_is_recorded_is_a_copy_from_the_time_of_the_call() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    model = nn.Sequential(InPlace(), InPlace())
    x = torch.zeros(1, 2, 3)
    with record(model) as recorder, recorder.rows(Rows.packed([2])):
        model(x)
    inputs, outputs = recorder.recording().inputs, recorder.recording().outputs
    found = [inputs["0"]["x"], outputs["0"][""], inputs["1"]["x"], outputs["1"][""]]
    assert [entry.values.unique().tolist() for entry in found] == [[0], [1], [1], [2]]
