"""The recorder: it changes nothing, leaves nothing behind, and puts every value under its token."""

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_decoder import SEQUENCES, VOCABULARY, TinyDecoder, packed, padded, recording_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mis_ext.onpolicy.recording.comparison import compare
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows, place_rows

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


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


def test_layouts_padding_and_packing_align_token_by_token() -> None:
    plain = recording_of(TinyDecoder(), padded())
    num_tokens = sum(map(len, SEQUENCES))
    others = {
        "[s, b, h]": recording_of(TinyDecoder(transposed=True), padded()),
        "left padding": recording_of(TinyDecoder(), padded(left=True)),
        "longer padding": recording_of(TinyDecoder(), padded(length=12)),
        "packed [1, T, h]": recording_of(TinyDecoder(), packed()),
        "packed [T, 1, h]": recording_of(TinyDecoder(transposed=True), packed()),
    }
    for name, other in others.items():
        result = compare(plain, other)
        assert result.passed, (name, result.summary())
        assert result.num_rows == num_tokens * len(result.modules)
        assert len(result.modules) == len([*TinyDecoder().modules()]) - 1  # A ModuleList is never called.
        assert all(module.inputs_equal for module in result.modules)


def test_chunked_prefill_and_decode_align_with_the_whole_forward() -> None:
    sequences = SEQUENCES[:2]
    forwards = [
        (torch.tensor([[3, 1, 4, 9]]), Rows.packed([3, 1])),
        (torch.tensor([[2, 1]]), Rows.packed([1, 1], sequences=[1, 0], starts=[1, 3])),
        (torch.tensor([[5]]), Rows.packed([1], starts=[4])),
    ]
    whole, pieces = recording_of(TinyDecoder(), padded(sequences)), recording_of(TinyDecoder(), *forwards)
    result = compare(whole, pieces)
    assert result.passed, result.summary()
    assert {module.num_rows for module in result.modules} == {7}
    # Batched decode: the grid is [b, 1].
    ids, rows = padded([[3, 1, 4, 1], [9]])
    decode = Rows(sequence=torch.tensor([[0], [1]]), position=torch.tensor([[4], [1]]))
    decoded = recording_of(TinyDecoder(), (ids, rows), (torch.tensor([[5], [2]]), decode))
    assert compare(whole, decoded).passed


def test_a_row_lies_where_the_rows_say() -> None:
    rows = Rows(sequence=torch.tensor([[0], [4]]), position=torch.tensor([[2, 0, -1], [1, -5, 7]]))
    values = torch.arange(12).view(2, 3, 2).float()
    expected = [[0, 1], [2, 3], [6, 7], [10, 11]]
    for tensor in (values, values.transpose(0, 1)):
        placed = place_rows(tensor, rows, where="x")
        assert placed is not None
        by_token = sorted(
            zip(placed.sequence_N.tolist(), placed.position_N.tolist(), placed.values.tolist(), strict=True)
        )
        assert by_token == [(0, 0, expected[1]), (0, 2, expected[0]), (4, 1, expected[2]), (4, 7, expected[3])]


def test_a_layout_that_fits_twice_is_an_error_that_names_the_module() -> None:
    batch = padded([[3, 1, 4], [9, 2], [6, 5, 3]])
    with pytest.raises(ValueError, match=r"embedding outputs: \[3, 3, 8\] can be read in more than one way"):
        recording_of(TinyDecoder(transposed=True), batch)
    expected = recording_of(TinyDecoder(), packed([[3, 1, 4], [9, 2], [6, 5, 3]]))
    assert compare(recording_of(TinyDecoder(), batch, layout="bsh"), expected).passed
    # Ids are [b, s] in any engine; the embedding and the logits of this model are [b, s, ...] too.
    layouts = {"": "bsh", "embedding": "bsh"}
    assert compare(recording_of(TinyDecoder(transposed=True), batch, layout="sbh", layouts=layouts), expected).passed
    wrong = recording_of(TinyDecoder(transposed=True), batch, layout="sbh")
    assert {module.name for module in compare(wrong, expected).modules if module.num_differing} == {
        "embedding",
        "(model)",
    }


def test_flattened_tokens_need_an_order_to_be_told() -> None:
    rows = Rows.padded(torch.ones(2, 3))
    values = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match="more than one way"):
        place_rows(values.flatten(0, 1), rows, where="experts")
    for layout, flat in (("bsh", values.flatten(0, 1)), ("sbh", values.transpose(0, 1).flatten(0, 1))):
        placed = place_rows(flat, rows, where="experts", layout=layout)
        assert placed is not None
        assert torch.equal(placed.values[(placed.sequence_N * 3 + placed.position_N).argsort()], values.flatten(0, 1))


def test_only_a_whole_grid_of_integers_is_taken_for_token_ids() -> None:
    rows = Rows.padded(torch.ones(2, 3))
    chosen = torch.arange(6 * 4).view(6, 4) % 3 == 0
    for tensor in (chosen, chosen.long()):
        placed = place_rows(tensor, rows, where="routing map", layout="sbh")
        assert placed is not None
        # Row s * 2 + b holds position s of sequence b.
        assert torch.equal(placed.values, tensor[[0, 2, 4, 1, 3, 5]])
        assert placed.sequence_N.tolist() == [0, 0, 0, 1, 1, 1]
        assert placed.position_N.tolist() == [0, 1, 2, 0, 1, 2]


def test_tensors_of_one_forward_share_what_says_their_tokens() -> None:
    recording = recording_of(TinyDecoder(transposed=True), padded())
    entries = [recording.outputs["layers.0.norm"][""], recording.outputs["layers.1.mlp"][""]]
    assert entries[0].sequence_N is entries[1].sequence_N
    assert entries[0].position_N is entries[1].position_N


def test_an_enforced_layout_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"layers\.0\.norm\[x\] inputs: .* does not hold the tokens .* in layout 'sbh'"
    ):
        recording_of(TinyDecoder(), padded(), layouts={"layers.0.norm": "sbh"})
    # What holds no tokens in any order, such as a mask, is none of the layout's business.
    assert place_rows(torch.ones(3, 1, 7, 7), padded()[1], where="mask", forced="sbh") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["layers.0.nrm"]}, r"no module matches 'layers.0.nrm' \(did you mean 'layers.0.norm'\?\)"),
        ({"layouts": {"heads": "bsh"}}, "no module matches 'heads'"),
        ({"layouts": {"head": "hbs"}}, r"layouts\['head'\] must be one of bsh | sbh, got 'hbs'"),
        ({"layout": "thd"}, "layout must be one of"),
        ({"layout": "none"}, "layout must be one of"),
        ({"repeated": "newest"}, "repeated must be one of"),
    ],
)
def test_a_wrong_option_is_an_error(options: dict, message: str) -> None:
    model = TinyDecoder()
    with pytest.raises(ValueError, match=message), record(model, **options):
        pass
    assert hooks_of(model) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sequence": [0, 0], "position": [3, 3]}, ValueError, r"\(0, 3\) is there twice"),
        ({"sequence": [7, 0, 7, 1], "position": [2, 5, 2, 2]}, ValueError, r"\(7, 2\) is there twice"),
        ({"sequence": [0, -1], "position": [3, 3]}, ValueError, "sequence must be at least 0"),
        ({"sequence": [0, 0], "position": [1, 2, 3]}, ValueError, "must broadcast"),
        ({"sequence": [0, 0], "position": [1.0, 2.0]}, TypeError, "position must hold integers"),
        ({"sequence": [0, 0], "position": [1, 2], "kept": [2]}, ValueError, r"kept must be in \[0, 1\]"),
    ],
)
def test_rows_that_cannot_be_are_an_error(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Rows(**{name: torch.tensor(values) for name, values in arguments.items()})


def test_rows_survive_the_buffers_they_were_made_from() -> None:
    sequence, position, kept = torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1]])
    rows = Rows(sequence=sequence, position=position, kept=kept[0])
    for buffer in (sequence, position, kept):
        buffer.zero_()
    assert [x.tolist() for x in (rows.sequence, rows.position, rows.kept)] == [[[0, 1, 1]], [[0, 1, 2]], [[0, 1]]]


def test_only_chosen_modules_are_recorded_in_order_of_execution() -> None:
    recording = recording_of(TinyDecoder(), packed(), modules=["layers.?.mlp.3", "head", "embedding"])
    assert [*recording.outputs] == ["embedding", "layers.0.mlp.3", "layers.1.mlp.3", "head"]
    assert [entries[""].order for entries in recording.outputs.values()] == [0, 1, 2, 3]


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


def test_recomputation_in_the_backward_pass_is_not_recorded() -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            output = self.inner(x)
            output.register_hook(lambda grad: self.recompute(x))
            return output

        def recompute(self, x: Tensor) -> None:
            self.inner(x)
            self.calls += 1

    model = Recomputing()
    with record(model) as recorder, recorder.rows(Rows.packed([3])):
        model(torch.randn(1, 3, 4, requires_grad=True)).sum().backward()
    assert model.calls == 1
    assert [*recorder.recording().outputs] == ["inner", ""]


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
    assert recording.skipped == {"last outputs": "no activations in a dict"}


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
    with record(model, layouts={"*experts": "none"}) as recorder, recorder.rows(Rows.packed([3])):
        model(torch.zeros(1, 3, 2))
    recording = recorder.recording()
    assert [*recording.outputs] == [*recording.inputs] == [""]
    assert recording.skipped == {
        "experts[input] inputs": "its layout is 'none'",
        "experts outputs": "its layout is 'none'",
    }


def test_a_tensor_whose_rows_change_their_size_is_skipped_and_listed() -> None:
    model = nn.Identity()
    with record(model) as recorder:
        for position in range(2):
            with recorder.rows(Rows.packed([1], starts=[position])):
                model(torch.zeros(1, 1, 3 + position))
    recording = recorder.recording()
    assert recording.outputs == {}
    assert recording.skipped["(model) outputs"] == "the size of a row changes between forwards"


def test_a_row_recorded_twice_must_have_the_same_bits_or_a_policy() -> None:
    model = nn.Identity()

    def twice(second: float, **options: str) -> list[float]:
        with record(model, **options) as recorder, recorder.rows(Rows.packed([3], sequences=[5])):
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
    assert twice(2.5, repeated="first") == [1, 2, 3]
    assert twice(2.5, repeated="last") == [1, 2.5, 3]


def test_a_finished_run_can_say_late_which_value_stays_and_be_read_again() -> None:
    model = nn.Identity()
    with record(model) as recorder:
        for value in (1.0, 2.0):
            with recorder.rows(Rows.packed([1])):
                model(torch.tensor([[[value]]]))
    with pytest.raises(ValueError, match="set repeated to first or last"):
        recorder.recording()
    for _ in range(2):
        assert recorder.recording(repeated="last").outputs[""][""].values.tolist() == [[2]]
    assert recorder.recording().outputs[""][""].values.tolist() == [[2]]


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


def test_logits_of_some_tokens_only_get_their_rows() -> None:
    rows = Rows(**{**vars(Rows.packed([2, 3])), "kept": torch.tensor([1, 4])})
    for shape in ((1, 2, 7), (2, 7)):
        placed = place_rows(torch.randn(shape), rows, where="logits")
        assert placed is not None
        assert (placed.sequence_N.tolist(), placed.position_N.tolist()) == ([0, 1], [1, 2])
    last = Rows(sequence=torch.tensor([[0], [1]]), position=torch.arange(4)[None], kept=torch.tensor([[3], [7]]))
    placed = place_rows(torch.randn(2, 1, 9), last, where="logits")
    assert placed is not None
    assert (placed.sequence_N.tolist(), placed.position_N.tolist()) == ([0, 1], [3, 3])


def test_one_kept_token_does_not_make_every_tensor_that_starts_with_1_ambiguous() -> None:
    rows = Rows(**{**vars(Rows.packed([4])), "kept": torch.tensor([3])})
    for shape, positions in (((1, 4, 8), [0, 1, 2, 3]), ((1, 1, 8), [3]), ((1, 8), [3]), ((4, 8), [0, 1, 2, 3])):
        placed = place_rows(torch.randn(shape), rows, where="x")
        assert placed is not None
        assert placed.position_N.tolist() == positions
        assert placed.values.shape == (len(positions), 8)
    assert place_rows(torch.randn(1, 2, 8), rows, where="x") is None
    last = Rows(sequence=torch.tensor([[0], [1]]), position=torch.arange(3)[None], kept=torch.tensor([[2], [5]]))
    ids = place_rows(torch.zeros(2, 3, dtype=torch.long), last, where="ids")
    assert ids is not None
    assert ids.position_N.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_saved_recording_is_the_same_after_loading(tmp_path, dtype: torch.dtype) -> None:
    model = nn.Identity()
    values = torch.tensor([[[1.0, -0.0], [float("inf"), 3.0]]]).nan_to_num(posinf=7).to(dtype)
    with record(model) as recorder, recorder.rows(Rows.packed([2])):
        model((values, torch.zeros(4)))
    recording = recorder.recording()
    recording.save(tmp_path / "a.pt")
    loaded = Recording.load(tmp_path / "a.pt")
    assert loaded.skipped == recording.skipped != {}
    for kind in ("outputs", "inputs"):
        before, after = getattr(recording, kind), getattr(loaded, kind)
        assert [*before] == [*after]
        for module, entries in before.items():
            for label, entry in entries.items():
                other = after[module][label]
                assert entry.dtype == other.dtype == dtype
                assert entry.order == other.order
                assert all(torch.equal(vars(entry)[x], vars(other)[x]) for x in ("values", "sequence_N", "position_N"))
    assert compare(recording, loaded).passed


def test_an_interrupted_save_keeps_what_was_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    recording_of(TinyDecoder(), packed(), modules=["head"]).save(path)
    before, save = path.read_bytes(), torch.save

    def interrupted(content: object, target: object) -> None:
        save(content, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recording_of(TinyDecoder(seed=1), packed(), modules=["head"]).save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_is_no_recording_is_an_error(tmp_path) -> None:
    (tmp_path / "text.pt").write_text("not a tensor")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    for name in ("text.pt", "weights.pt"):
        with pytest.raises(ValueError, match=rf"{name} is not a (recording|file of tensors)"):
            Recording.load(tmp_path / name)


def qwen3(attention: str = "sdpa"):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, attn_implementation=attention).eval()


def assert_aligned(whole: Recording, pieces: Recording, *, num_rows: int, last_only: tuple[str, ...] = ()) -> None:
    """Every token of every module is there, ids are equal, and numbers differ by float32 rounding only."""
    result = compare(whole, pieces, allow_rows=last_only, allow_missing=("*rotary*",))
    assert result.problems == ()
    compared = {module.name: module for module in result.modules}
    assert {"model.embed_tokens", "model.layers.1.self_attn.o_proj", "model.norm", "lm_head", "(model)"} <= {*compared}
    assert {module.num_rows for name, module in compared.items() if name not in ("lm_head", "(model)")} == {num_rows}
    assert compared["model.embed_tokens"].num_differing == 0
    assert compared["model.embed_tokens"].inputs_equal
    # Values are of size 1, and sums of 16 numbers.
    assert max(module.max_abs for module in result.modules) < 1e-5


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_prefill_and_decode_of_transformers_with_a_cache_align_with_the_whole_forward() -> None:
    from transformers import DynamicCache

    model = qwen3()
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    sequence = torch.arange(2)[:, None]
    with record(model) as recorder, recorder.rows(Rows(sequence=sequence, position=torch.arange(9))):
        model(ids)
    whole, cache = recorder.recording(), DynamicCache(config=model.config)
    with record(model) as recorder:
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9)):
            with recorder.rows(Rows(sequence=sequence, position=torch.arange(start, stop))):
                model(ids[:, start:stop], past_key_values=cache)
    assert_aligned(whole, recorder.recording(), num_rows=18)


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_continuous_batching_aligns_with_the_whole_forward() -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, prompts, new = qwen3("paged|sdpa"), [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]], 4
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        **{"page_size": 16, "num_blocks": 8, "max_batch_tokens": 8, "max_requests_per_batch": 2},
        **{"use_cuda_graph": False, "allow_block_sharing": False},
    )
    manager = model.init_continuous_batching(config, batching)
    manager.start()
    sizes, sequence_of = [], {}

    def rows_of(_: nn.Module, __: tuple, kwargs: dict) -> Rows:
        requests = [x.state.request_id for x in manager.batch_processor.inputs_and_outputs.requests_in_batch]
        lengths = kwargs["cu_seq_lens_q"].diff()
        sizes.append(lengths.tolist())
        sequence = torch.tensor([sequence_of[request] for request in requests]).repeat_interleave(lengths)
        return Rows(sequence=sequence, position=kwargs["position_ids"], kept=kwargs.get("logits_to_keep"))

    try:
        with record(model, rows_of=rows_of) as recorder:
            with manager.pause():
                requests = manager.add_requests(prompts, max_new_tokens=new)
                sequence_of = {request: index for index, request in enumerate(requests)}
            outputs = {}
            while len(outputs) < 2 and manager.is_running():
                output = manager.get_result(timeout=5)
                if output is not None and output.is_finished():
                    outputs[output.request_id] = output.generated_tokens
    finally:
        manager.destroy()
    # Several requests in a forward, a prompt in several forwards, and decoding beside a prefill.
    assert len(sizes) > new
    assert any(len(lengths) == 2 and 1 in lengths and max(lengths) > 1 for lengths in sizes)

    # The last token is sampled, but never goes in.
    sequences = [prompt + outputs[request][:-1] for prompt, request in zip(prompts, requests, strict=True)]
    model.set_attn_implementation("sdpa")
    ids, rows = padded(sequences)
    with record(model) as whole, whole.rows(rows):
        model(ids)
    num_rows = sum(map(len, sequences))
    assert_aligned(whole.recording(), recorder.recording(), num_rows=num_rows, last_only=("lm_head", ""))
    logits = recorder.recording().outputs["lm_head"][""]
    first_sampled = [len(prompt) - 1 for prompt in prompts]
    assert [(logits.position_N[logits.sequence_N == s] >= p).sum() for s, p in enumerate(first_sampled)] == [new, new]
    assert logits.values.shape[1:] == (32,)
