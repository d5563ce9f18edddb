# SPDX-License-Identifier: Apache-2.0
"""The recorder puts every value under its token, however the tokens came."""

import pytest
import torch
from tiny_decoder import SEQUENCES, TinyDecoder, packed, padded, recording_of

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.rows import Rows, place_rows


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
        # Where the tokens lie is an input too, which is not by token and differs.
        assert all(
            module.inputs_equal or module.uncompared_inputs in (("tokens",), ("rows",)) for module in result.modules
        )
        assert not any(module.inputs_equal is False for module in result.modules)


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
    wrong = recording_of(TinyDecoder(transposed=True), batch, layout="sbh")
    assert {module.name for module in compare(wrong, expected).modules if module.num_differing} == {
        "embedding",
        "(model)",
    }


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sequence": [0, 0], "position": [3, 3]}, ValueError, r"\(0, 3\) occurs twice"),
        ({"sequence": [7, 0, 7, 1], "position": [2, 5, 2, 2]}, ValueError, r"\(7, 2\) occurs twice"),
        ({"sequence": [0, -1], "position": [3, 3]}, ValueError, "sequence must be at least 0"),
        ({"sequence": [0, 0], "position": [1, 2, 3]}, ValueError, "must broadcast"),
        ({"sequence": [0, 0], "position": [[[1, 2]]]}, ValueError, "position must have one or two dimensions"),
        ({"sequence": [0, 0], "position": [1.0, 2.0]}, TypeError, "position must hold integers"),
        ({"sequence": [0, 0], "position": [1, 2], "kept": [0, 2]}, ValueError, r"kept must be in \[0, 1\]"),
    ],
)
def test_rows_that_cannot_be_are_an_error(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Rows(**{name: torch.tensor(values) for name, values in arguments.items()})


def test_what_has_another_type_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="sequence must be a tensor, got list"):
        Rows(sequence=[0, 0], position=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="mask must be a tensor, got list"):
        Rows.padded([[1, 1]])
    with pytest.raises(TypeError, match="a must be a Recording, got"):
        compare("a.pt", "b.pt")


def test_rows_survive_the_buffers_they_were_made_from() -> None:
    sequence, position, kept = torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1]])
    rows = Rows(sequence=sequence, position=position, kept=kept[0])
    for buffer in (sequence, position, kept):
        buffer.zero_()
    assert [x.tolist() for x in (rows.sequence, rows.position, rows.kept)] == [[[0, 1, 1]], [[0, 1, 2]], [[0, 1]]]


def test_what_holds_for_each_sequence_is_by_token() -> None:
    """As tables of positions: [1, s, ...] beside [b, s, h], and [s, 1, ...] beside Megatron's [s, b, h]."""
    table = torch.randn(4, 5)
    left = Rows.padded(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]))
    columns = [1, 2, 3, 0, 1, 2, 3, 3]
    for tensor, layout in ((table[None], "bsh"), (table[:, None], "sbh")):
        for given in (None, layout):
            placed = place_rows(tensor, left, where="table", layout=given)
            assert placed is not None
            assert torch.equal(placed.values, table[columns])
            assert placed.sequence_N.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
            assert placed.position_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    # Of another layout it is none.
    assert place_rows(table[None], left, where="table", layout="sbh") is None
    assert place_rows(table, left, where="table") is None
    # As many sequences as tokens: a mask [b, 1, s, keys] is no table, and [s, 1, ...] none of [b, s, h].
    square = Rows.padded(torch.ones(3, 3))
    for keys in (3, 5):
        assert place_rows(torch.ones(3, 1, 3, keys), square, where="mask") is None
    assert place_rows(torch.randn(3, 1, 8), square, where="table", layout="bsh") is None
    assert place_rows(torch.randn(3, 1, 1, 8), square, where="table", layout="sbh") is not None
    # One token of each sequence: a number for all.
    step = Rows(sequence=torch.arange(3)[:, None], position=torch.tensor([[7], [7], [5]]))
    placed = place_rows(torch.tensor([[7]]), step, where="position ids")
    assert placed is not None
    assert (placed.values.tolist(), placed.position_N.tolist()) == ([7, 7, 7], [7, 7, 5])


def test_only_chosen_modules_are_recorded_in_order_of_execution() -> None:
    recording = recording_of(TinyDecoder(), packed(), modules=["layers.?.mlp.3", "head", "embedding"])
    assert [*recording.outputs] == ["embedding", "layers.0.mlp.3", "layers.1.mlp.3", "head"]
    assert [entries[""].order for entries in recording.outputs.values()] == [0, 1, 2, 3]


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
