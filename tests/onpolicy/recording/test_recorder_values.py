# SPDX-License-Identifier: Apache-2.0
"""What the recorder calls a value, which values it takes, and which of two it keeps."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.rows import Rows


def test_calls_of_a_shared_module_and_nested_results_have_names_of_their_own() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, *, table: Tensor) -> dict[str, object]:
            return {"states": (x + 1, None, [x + 2]), "aux": 3, "table": table}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            once = self.inner(x, table=torch.ones(7))["states"][0]
            return self.inner(once, table=torch.ones(7))["states"][0]

    model = Outer()
    with record(model) as recorder, recorder.rows(Rows.packed([3])):
        model(torch.zeros(1, 3, 2))
        with recorder.rows(Rows.packed([3], starts=[3])):
            model(torch.zeros(1, 3, 2))
    recording = recorder.recording()
    assert [*recording.outputs] == ["inner", "inner#1", ""]
    assert [*recording.outputs["inner#1"]] == ["states.0", "states.2.0"]
    assert recording.outputs["inner#1"]["states.2.0"].values.tolist() == [[3, 3]] * 6
    assert recording.outputs["inner"]["states.0"].position_N.tolist() == [0, 1, 2, 3, 4, 5]
    assert [*recording.inputs["inner"]] == ["x"]
    assert recording.skipped["inner[table] outputs"] == "no token dimensions in [7]"
    assert recording.skipped["inner#1[table] inputs"] == "no token dimensions in [7]"


def test_an_input_has_the_name_of_its_parameter_however_it_is_passed() -> None:
    class Core(nn.Module):
        def forward(self, query: Tensor, key: Tensor, *more: Tensor, scale: Tensor) -> Tensor:
            return query + key

    class Model(nn.Module):
        def __init__(self, *, by_name: bool) -> None:
            super().__init__()
            self.core, self.by_name = Core(), by_name

        def forward(self, x: Tensor) -> Tensor:
            return self.core(key=x + 1, query=x, scale=x) if self.by_name else self.core(x, x + 1, x + 2, scale=x)

    def labels(model: nn.Module) -> set[str]:
        with record(model) as recorder, recorder.rows(Rows.packed([3])):
            model(torch.zeros(1, 3, 2))
        return {*recorder.recording().inputs["core"]}

    assert labels(Model(by_name=True)) == {"query", "key", "scale"}
    assert labels(Model(by_name=False)) == {"query", "key", "2", "scale"}


def test_tensors_in_a_dataclass_are_recorded_and_a_result_without_any_is_listed() -> None:
    @dataclass
    class Logits:
        next_token_logits: Tensor
        hidden: tuple[Tensor, None]
        extend: Tensor | None = None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.last, self.none = nn.Identity(), nn.Identity(), nn.Identity()
            self.head.forward = lambda x: Logits(x + 1, (x, None))
            self.last.forward = lambda x, info: {"info": object()}
            self.none.forward = lambda x: None

        def forward(self, x: Tensor) -> Logits:
            found = self.head(x)
            self.last(x, found)
            self.none(x)
            return found

    model = Model()
    with record(model) as recorder, recorder.rows(Rows.packed([3])):
        model(torch.zeros(1, 3, 2))
    recording = recorder.recording()
    assert [*recording.outputs["head"]] == [*recording.outputs[""]] == ["next_token_logits", "hidden.0"]
    assert recording.outputs["head"]["next_token_logits"].values.tolist() == [[1, 1]] * 3
    # What engines hand to modules beside the activations is no input of theirs.
    assert [*recording.inputs["last"]] == ["x"]
    assert recording.skipped == {"last[info] inputs": "a Logits", "last outputs": "no activations in a dict"}


def test_a_module_that_first_runs_in_a_later_forward_has_its_place_in_the_order() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.first, self.adapter, self.last = (nn.Identity() for _ in range(4))

        def forward(self, x: Tensor, *, adapted: bool) -> Tensor:
            x = self.first(self.before(x) if adapted else x)
            return self.last(self.adapter(x) if adapted else x)

    model = Model()
    with record(model) as recorder:
        for start, adapted in ((0, False), (3, True), (6, False)):
            with recorder.rows(Rows.packed([3], starts=[start])):
                model(torch.zeros(1, 3, 2), adapted=adapted)
    recording = recorder.recording()
    assert [*recording.outputs] == ["before", "first", "adapter", "last", ""]
    assert [*recording.inputs] == ["", "before", "first", "adapter", "last"]
    assert [entry.order for labels in recording.outputs.values() for entry in labels.values()] == [0, 1, 2, 3, 4]


def test_modules_of_permuted_tokens_can_be_left_out() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x[0].flip(0)).flip(0)[None]

    model = Mixture()
    with record(model, exclude=["*experts"]) as recorder, recorder.rows(Rows.packed([3])):
        model(torch.zeros(1, 3, 2))
    recording = recorder.recording()
    assert [*recording.outputs] == [*recording.inputs] == [""]
    assert recording.skipped == {}


def test_a_tensor_whose_rows_change_their_size_is_skipped_and_listed() -> None:
    model = nn.Identity()
    with record(model) as recorder:
        for position in range(2):
            with recorder.rows(Rows.packed([1], starts=[position])):
                model(torch.zeros(1, 1, 3 + position))
    recording = recorder.recording()
    assert recording.outputs == {}
    assert recording.skipped["(model) outputs"] == "the size of a row changes between forwards"


def test_a_row_recorded_twice_must_have_the_same_bits() -> None:
    model = nn.Identity()

    def twice(second: float) -> list[float]:
        with record(model) as recorder, recorder.rows(Rows.packed([3], sequences=[5])):
            model(torch.tensor([[[1.0], [2.0], [3.0]]]))
            model(torch.tensor([[[1.0], [second], [3.0]]]))
        entry = recorder.recording().outputs[""][""]
        assert entry.position_N.tolist() == [0, 1, 2]
        return entry.values[:, 0].tolist()

    assert twice(2.0) == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"\(model\) outputs: sequence 5, position 1 was recorded twice with different"
    ):
        twice(2.5)


def test_a_recording_shares_its_memory_with_the_recorder() -> None:
    model = nn.Identity()
    with record(model) as recorder:
        with recorder.rows(Rows.packed([3])):
            model(torch.zeros(1, 3, 2))
        once = recorder.recording().outputs[""][""]
        (piece,) = recorder._builder._pieces["outputs"]["", ""]
        assert once.values.data_ptr() == piece.values.data_ptr()
        with recorder.rows(Rows.packed([2], starts=[3])):
            model(torch.ones(1, 2, 2))
    twice, again = (recorder.recording().outputs[""][""] for _ in range(2))
    assert twice.values[:, 0].tolist() == [0, 0, 0, 1, 1]
    assert twice.values.data_ptr() == again.values.data_ptr()


def test_a_dtype_that_changes_between_forwards_is_an_error() -> None:
    model = nn.Identity()
    with record(model) as recorder:
        for position, dtype in enumerate((torch.float32, torch.bfloat16)):
            with recorder.rows(Rows.packed([1], starts=[position])):
                model(torch.zeros(1, 1, 3, dtype=dtype))
    with pytest.raises(ValueError, match=r"\(model\) outputs: the dtype changes"):
        recorder.recording()
