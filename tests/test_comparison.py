"""The comparator: planted differences are found exactly, and nothing that was not compared counts as equal."""

import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import HIDDEN, SEQUENCES, TinyDecoder, packed, padded, planted, recording_of
from torch import Tensor, nn

from mis_ext.onpolicy.audit.log_probs import audit_logprobs
from mis_ext.onpolicy.recording import row_difference
from mis_ext.onpolicy.recording.comparison import compare
from mis_ext.onpolicy.recording.name_map import NameMap
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording, RecordingBuilder
from mis_ext.onpolicy.recording.row_difference import Row
from mis_ext.onpolicy.recording.rows import PlacedRows, Rows

KINDS = ["norm", "attention.qkv", "attention.core", "attention.out", "mlp.1", "mlp.3", "mlp.0"]
TOKENS = [(sequence, position) for sequence, ids in enumerate(SEQUENCES) for position in range(len(ids))]


@pytest.fixture(scope="module")
def whole() -> Recording:
    return recording_of(TinyDecoder(), packed())


@settings(max_examples=16, deadline=None)
@given(
    layer=st.integers(0, 1),
    kind=st.sampled_from(KINDS),
    token=st.sampled_from(TOKENS),
    element=st.integers(0, HIDDEN - 1),
)
def test_one_ulp_planted_anywhere_is_found_exactly(whole, layer, kind, token, element) -> None:
    model, name = TinyDecoder(transposed=True), f"layers.{layer}.{kind}"
    sequence, position = token
    with planted(model.get_submodule(name), (position, sequence, element)):
        changed = recording_of(model, padded())
    result = compare(whole, changed)
    first = result.first_divergent
    assert first is not None
    assert (first.name, first.first, first.num_differing, first.max_ulp) == (name, Row(sequence, position), 1, 1)
    assert [module.name for module in result.culprits] == [name]
    assert result.verdict == "DIFFERENT"
    assert (
        f"first divergence: {name} (sequence {sequence}, position {position}): inputs equal, output differs, max 1 ULP"
        in (result.summary())
    )
    equal = [module.name for module in result.modules[: first.order]]
    assert equal == [*whole.outputs][: first.order]


def test_a_changed_weight_makes_its_module_the_culprit(whole) -> None:
    model = TinyDecoder()
    with torch.no_grad():
        model.layers[1].mlp[1].weight[2, 3] *= 1.001
    result = compare(whole, recording_of(model, packed()))
    assert [module.name for module in result.culprits] == ["layers.1.mlp.1"]
    assert result.first_divergent is result.culprits[0]


def test_two_causes_are_two_culprits_and_the_first_to_run_comes_first(whole) -> None:
    model = TinyDecoder()
    # In another sequence, and after the first cause has changed the inputs in its own.
    first, second = (0, 4, 0), (0, len(SEQUENCES[0]) + 1, 0)
    with planted(model.layers[0].mlp[1], first, by=5.0), planted(model.layers[1].mlp[1], second):
        result = compare(whole, recording_of(model, packed()))
    assert [module.name for module in result.culprits] == ["layers.0.mlp.1", "layers.1.mlp.1"]
    assert result.first_divergent.first == Row(0, 4)
    second = result.culprits[1]
    assert (second.first, second.inputs_equal, second.culprit_row) == (Row(0, 4), False, Row(1, 1))
    assert "culprit: layers.1.mlp.1 (sequence 1, position 1): inputs equal" in result.summary()


def test_the_order_of_execution_counts_and_not_the_order_in_the_mapping(whole) -> None:
    model = TinyDecoder()
    with planted(model.layers[0].norm, (0, 4, 0), by=1.0):
        changed = recording_of(model, packed())
    backwards = Recording(outputs=dict(reversed(whole.outputs.items())), inputs=whole.inputs)
    assert compare(backwards, changed).first_divergent.name == "layers.0.norm"


def test_a_difference_between_modules_blames_the_smallest_module_around_it(whole) -> None:
    model = TinyDecoder()

    def change(_: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        hidden = args[0].clone()
        hidden[0, 3] += 0.5
        return (hidden,), kwargs

    # A change of the input on its way into the attention: no module's own.
    model.layers[1].attention.register_forward_pre_hook(change, with_kwargs=True)
    result = compare(whole, recording_of(model, packed()))
    assert result.first_divergent.name == "layers.1.attention.qkv"
    assert result.first_divergent.inputs_equal is False
    assert [module.name for module in result.culprits] == ["layers.1"]
    assert "inputs differ, output differs" in result.summary()
    assert "culprit: layers.1 (sequence 0, position 3)" in result.summary()


def entry_of(values: Tensor, tokens: list[tuple[int, int]]) -> PlacedRows:
    sequence, position = torch.tensor(tokens, dtype=torch.long).reshape(-1, 2).unbind(1)
    return PlacedRows(values, sequence, position)


def made(**outputs: tuple[Tensor, list[tuple[int, int]]]) -> Recording:
    builder = RecordingBuilder()
    for name, (values, tokens) in outputs.items():
        builder.add("outputs", name, "", entry_of(values, tokens))
    return builder.build()


THREE = [(0, 0), (0, 1), (2, 0)]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
X = made(x=(VALUES, THREE))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (made(), made()),
        (X, made()),
        (made(), X),
        (made(x=(VALUES[:0], [])), made(x=(VALUES[:0], []))),
        (X, made(x=(VALUES[:0], []))),
        (X, made(x=(VALUES, [(5, 0), (5, 1), (5, 2)]))),
    ],
    ids=["both empty", "b empty", "a empty", "no rows", "no rows in b", "no row in common"],
)
@pytest.mark.parametrize("allow", [(), ("*",)])
def test_nothing_compared_is_never_a_pass(a: Recording, b: Recording, allow: tuple[str, ...]) -> None:
    result = compare(a, b, allow_missing=allow, allow_rows=allow, allow_dtype=allow, allow_shape=allow)
    assert (result.verdict, result.passed, result.num_rows) == ("INVALID", False, 0)
    assert result.summary().startswith("INVALID: 0 rows")


def test_a_missing_module_fails_unless_allowed_by_name() -> None:
    both = made(x=(VALUES, THREE), y=(VALUES, THREE))
    for a, b, side in ((both, X, "b"), (X, both, "a")):
        assert compare(a, b).problems == (f"y: missing in {side}",)
        assert compare(a, b).verdict == "INVALID"
        assert not compare(a, b, allow_missing=("x",)).passed
        allowed = compare(a, b, allow_missing=("y*",))
        assert allowed.passed
        assert allowed.allowed == (f"y: missing in {side}",)


def test_a_module_that_was_skipped_on_one_side_says_why() -> None:
    b = Recording(outputs=X.outputs, skipped={"y outputs": "no token dimensions in [7]", "y[0] inputs": "other"})
    result = compare(made(x=(VALUES, THREE), y=(VALUES, THREE)), b)
    assert result.problems == ("y: missing in b (no token dimensions in [7])",)
    both = compare(b, b)
    assert both.passed
    assert both.skipped == ("y outputs",)
    assert "not compared: y outputs" in both.summary()


def test_rows_on_one_side_are_counted_and_fail_unless_allowed() -> None:
    more = made(x=(torch.cat([VALUES, VALUES]), [*THREE, (2, 1), (3, 0), (3, 7)]))
    for a, b, counts in ((X, more, (0, 3)), (more, X, (3, 0))):
        result = compare(a, b)
        assert (result.modules[0].num_only_a, result.modules[0].num_only_b) == counts
        assert result.modules[0].num_rows == 3
        assert result.problems == (f"x: {counts[0]} rows only in a, {counts[1]} only in b",)
        assert result.verdict == "INVALID"
        assert compare(a, b, allow_rows=("x",)).passed
        assert not compare(a, b, allow_rows=("y",), allow_missing=("*",)).passed


@pytest.mark.parametrize("rows", [(THREE, [(5, 0), (5, 1), (5, 2)]), ([], []), (THREE, [])])
def test_one_module_without_common_rows_fails_although_others_have_some(rows) -> None:
    a, b = (made(x=(VALUES, THREE), y=(VALUES[: len(tokens)], tokens)) for tokens in rows)
    result = compare(a, b, allow_rows=("*",), allow_missing=("x",))
    assert result.problems == ("y: no row in common",)
    assert (result.verdict, result.num_rows) == ("INVALID", 3)
    assert compare(a, b, allow_missing=("y",)).passed


def test_rows_are_matched_by_token_and_not_by_place() -> None:
    b = made(x=(VALUES[[2, 0, 1]], [THREE[2], THREE[0], THREE[1]]))
    assert compare(X, b).passed
    swapped = made(x=(VALUES, [(0, 1), (0, 0), (2, 0)]))
    assert compare(X, swapped).modules[0].num_differing == 2
    # (0, 2) and (1, 0) must not be one key, whatever the longest position.
    assert compare(X, made(x=(VALUES, [(0, 0), (0, 1), (1, 0)]))).modules[0].num_rows == 2
    far, near = made(x=(VALUES[:2], [(0, 0), (0, 2)])), made(x=(VALUES[:2], [(0, 0), (1, 0)]))
    assert compare(far, near).modules[0].num_rows == 1


def test_rows_that_differ_in_shape_only_are_compared_flat_and_other_sizes_fail() -> None:
    heads = torch.arange(24.0).view(3, 2, 4)
    assert compare(made(x=(heads, THREE)), made(x=(heads.flatten(1), THREE))).passed
    result = compare(made(x=(heads, THREE), y=(VALUES, THREE)), made(x=(heads[:, 0], THREE), y=(VALUES, THREE)))
    assert result.problems == ("x: rows of shape [2, 4] and [4]",)
    assert not result.passed
    allowed = compare(
        made(x=(heads, THREE), y=(VALUES, THREE)), made(x=(heads[:, 0], THREE), y=(VALUES, THREE)), allow_shape=("x",)
    )
    assert allowed.passed
    assert [module.name for module in allowed.modules] == ["y"]


def test_a_dtype_that_differs_fails_unless_allowed_and_then_values_must_be_equal() -> None:
    b = made(x=(VALUES.bfloat16(), THREE))
    assert compare(X, b).problems == ("x: torch.float32 and torch.bfloat16",)
    assert compare(X, b).verdict == "INVALID"
    assert compare(X, b, allow_dtype=("x",)).passed
    third = made(x=(VALUES / 3, THREE))
    result = compare(third, made(x=((VALUES / 3).bfloat16(), THREE)), allow_dtype=("x",))
    assert result.verdict == "DIFFERENT"
    assert result.modules[0].max_abs == float((VALUES / 3 - (VALUES / 3).bfloat16().float()).abs().max())


def test_numbers_of_a_difference_are_those_of_the_elements_that_differ() -> None:
    changed = VALUES.clone()
    changed[2, 1] = torch.nextafter(torch.nextafter(VALUES[2, 1], torch.tensor(9.0)), torch.tensor(9.0))
    changed[1, 0] = torch.nextafter(VALUES[1, 0], torch.tensor(0.0))
    found = compare(X, made(x=(changed, THREE))).modules[0]
    assert (found.num_rows, found.num_differing, found.max_ulp, found.num_nan) == (3, 2, 2, 0)
    assert found.max_abs == float(changed[2, 1]) - 6.0 == 2 * 2.0**-21
    assert found.first == Row(0, 1)


def test_signed_zero_is_a_difference_of_no_ulp() -> None:
    found = compare(made(x=(torch.zeros(3, 1), THREE)), made(x=(-torch.zeros(3, 1), THREE))).modules[0]
    assert (found.num_differing, found.max_ulp, found.max_abs) == (3, 0, 0.0)


def test_the_same_nan_is_no_difference_and_no_pass_as_in_the_audit() -> None:
    values = VALUES.clone()
    values[0, 0] = math.nan
    a = made(x=(values, THREE))
    same = compare(a, made(x=(values.clone(), THREE)))
    assert (same.verdict, same.passed) == ("INVALID", False)
    assert (same.num_nan, same.modules[0].num_differing) == (1, 0)
    assert "1 elements are NaN, first in x" in same.summary()
    assert audit_logprobs([values[0]], [values[0].clone()]).verdict.value == same.verdict
    found = compare(a, X).modules[0]
    assert (found.num_differing, found.num_nan, found.max_ulp) == (1, 1, 0)
    assert math.isnan(found.max_abs)


def test_integer_outputs_are_compared_too() -> None:
    ids = torch.tensor([[1], [2], [3]])
    assert compare(made(x=(ids, THREE)), made(x=(ids, THREE))).passed
    found = compare(made(x=(ids, THREE)), made(x=(ids + torch.tensor([[0], [0], [4]]), THREE))).modules[0]
    assert (found.num_differing, found.max_abs, found.max_ulp) == (1, 4.0, 0)


def test_a_difference_of_integers_is_said_in_their_size() -> None:
    ids = torch.tensor([[1], [2], [3]])
    result = compare(made(x=(ids, THREE)), made(x=(ids + torch.tensor([[0], [0], [4]]), THREE)))
    assert "output differs, max abs 4\n" in result.summary()


@pytest.mark.parametrize(
    ("integer", "number"), [(257, torch.tensor(256.0).bfloat16()), (2**24 + 1, torch.tensor(2.0**24))]
)
def test_an_integer_equals_a_float_of_the_same_value_only(integer: int, number: Tensor) -> None:
    def found(value: int):
        a, b = (made(x=(values.expand(3, 1).clone(), THREE)) for values in (torch.tensor(value), number))
        return compare(a, b, allow_dtype=("x",))

    assert found(integer - 1).passed
    assert (found(integer).verdict, found(integer).modules[0].max_abs) == ("DIFFERENT", 1.0)


def test_complex_numbers_are_compared_in_both_parts() -> None:
    a = torch.tensor([[1 + 1j], [0j], [complex(math.nan, 2)]])
    assert compare(made(x=(a, THREE)), made(x=(a.clone(), THREE))).first_divergent is None
    b = torch.tensor([[1 + 5j], [complex(0.0, -0.0)], [complex(math.nan, 2)]])
    found = compare(made(x=(a, THREE)), made(x=(b, THREE))).modules[0]
    assert (found.num_differing, found.max_abs, found.num_nan) == (2, 4.0, 1)
    assert found.max_ulp == 2**24 + 2**21


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_8_bits_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    a = torch.tensor([[0.0], [math.nan], [2.0]])
    assert compare(made(x=(a.to(dtype), THREE)), made(x=(a.to(dtype), THREE))).first_divergent is None
    b = torch.tensor([[-0.0], [math.nan], [1.5]])
    found = compare(made(x=(a.to(dtype), THREE)), made(x=(b.to(dtype), THREE))).modules[0]
    assert (found.num_differing, found.max_abs, found.num_nan) == (2, 0.5, 1)
    finite = a.nan_to_num()
    assert compare(made(x=(finite.to(dtype), THREE)), made(x=(finite, THREE)), allow_dtype=("x",)).passed


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10, 3)
    values[4, 1] = math.nan
    changed, tokens = values.clone(), [(0, position) for position in range(10)]
    changed[2, 0] = torch.nextafter(values[2, 0], torch.tensor(9.0))
    changed[7, 2] = torch.nextafter(torch.nextafter(values[7, 2], torch.tensor(9.0)), torch.tensor(9.0))
    a, b = made(x=(values, tokens)), made(x=(changed, tokens))
    whole = compare(a, b).modules
    for chunk in (1, 6, 7, 29):
        monkeypatch.setattr(row_difference, "_CHUNK", chunk)
        assert compare(a, b).modules == whole
        more = made(x=(torch.cat([values[:1], changed]), [(0, 99), *tokens]))
        assert compare(a, more).modules[0].num_differing == compare(more, a).modules[0].num_differing == 2
        early = made(x=(changed[3:], tokens[3:]))
        assert compare(a, early).modules[0].num_differing == compare(early, a).modules[0].num_differing == 1
    assert (whole[0].num_differing, whole[0].max_ulp, whole[0].num_nan, whole[0].first) == (2, 2, 1, Row(0, 2))
    changed[9] = math.nan
    assert math.isnan(compare(a, made(x=(changed, tokens))).modules[0].max_abs)


def with_inputs(output: Tensor, *inputs: Tensor, labels: tuple[str, ...] = ("0", "1")) -> Recording:
    builder = RecordingBuilder()
    for label, values in zip(labels, inputs, strict=False):
        builder.add("inputs", "x", label, entry_of(values, THREE))
    builder.add("outputs", "x", "", entry_of(output, THREE))
    return builder.build()


def test_inputs_are_equal_up_to_a_row_in_its_own_sequence() -> None:
    def found(differing_output: int, differing_input: int):
        row_out, row_in = (torch.zeros(3, 2) for _ in range(2))
        row_out[differing_output], row_in[differing_input] = 1, 1
        return compare(with_inputs(VALUES, VALUES), with_inputs(VALUES + row_out, VALUES + row_in)).modules[0]

    # Tokens (0, 0), (0, 1) and (2, 0).
    for output, given_input, equal in ((0, 0, False), (1, 0, False), (0, 1, True), (1, 2, True), (2, 1, True)):
        module = found(output, given_input)
        assert (module.inputs_equal, module.is_culprit) == (equal, equal), (output, given_input)


def test_a_second_input_counts_and_inputs_that_were_not_recorded_are_unknown() -> None:
    changed = VALUES + 1
    b = with_inputs(changed, VALUES, changed)
    assert compare(with_inputs(VALUES, VALUES, VALUES), b).modules[0].inputs_equal is False
    # Without a label in common the first is compared with the first.
    other = with_inputs(changed, VALUES, labels=("hidden_states",))
    assert compare(with_inputs(VALUES, VALUES), other).modules[0].inputs_equal is True
    assert compare(with_inputs(VALUES, changed), other).modules[0].inputs_equal is False
    unknown = compare(with_inputs(VALUES), b).modules[0]
    assert (unknown.inputs_equal, unknown.is_culprit) == (None, False)
    assert "inputs unknown" in str(unknown)
    assert (
        "no culprit: the inputs of the first divergence were not recorded" in compare(with_inputs(VALUES), b).summary()
    )


def test_an_input_on_one_side_only_is_named_and_inputs_are_not_called_equal() -> None:
    one, two = with_inputs(VALUES, VALUES), with_inputs(VALUES + 1, VALUES, VALUES, labels=("0", "residual"))
    for a, b in ((one, two), (two, one)):
        found = compare(a, b).modules[0]
        assert (found.inputs_equal, found.unpaired_inputs) == (None, ("residual",))
        # By the input that both have, it is still the one to blame.
        assert found.is_culprit
        assert "inputs equal but for residual (on one side only), output differs" in str(found)
    equal = compare(one, with_inputs(VALUES, VALUES, VALUES, labels=("0", "residual")))
    assert (equal.passed, equal.modules[0].inputs_equal) == (True, None)
    differing = with_inputs(VALUES + 1, VALUES + 1, VALUES, labels=("0", "residual"))
    assert compare(one, differing).modules[0].inputs_equal is False


def test_an_input_of_another_row_size_is_not_equal() -> None:
    a, b = (with_inputs(VALUES + width, VALUES, torch.ones(3, width)) for width in (2, 5))
    found = compare(a, b).modules[0]
    assert (found.inputs_equal, found.is_culprit) == (False, False)
    # Of other names they are two inputs.
    c = with_inputs(VALUES, VALUES, torch.ones(3, 2), labels=("0", "scale"))
    d = with_inputs(VALUES, VALUES, torch.ones(3, 5), labels=("0", "angles"))
    assert compare(c, d).modules[0].unpaired_inputs == ("scale", "angles")
    e, f = (with_inputs(VALUES + x, torch.ones(3, x), labels=(label,)) for x, label in ((1, "hidden"), (5, "ids")))
    found = compare(e, f).modules[0]
    assert (found.inputs_equal, found.is_culprit, found.unpaired_inputs) == (None, False, ("hidden", "ids"))


def test_a_row_that_one_of_the_inputs_lacks_is_unknown() -> None:
    recordings = []
    for output, tokens in ((VALUES, THREE), (VALUES + 1, THREE[1:])):
        builder = RecordingBuilder()
        builder.add("inputs", "x", "0", entry_of(VALUES, THREE))
        builder.add("inputs", "x", "1", entry_of(VALUES[-len(tokens) :], tokens))
        builder.add("outputs", "x", "", entry_of(output, THREE))
        recordings.append(builder.build())
    found = compare(*recordings).modules[0]
    assert (found.first, found.inputs_equal, found.culprit_row) == (Row(0, 0), None, Row(0, 1))


def test_positional_inputs_without_a_name_stand_for_named_ones_in_their_order() -> None:
    wide = torch.cat([VALUES, VALUES], 1)
    named = with_inputs(VALUES, VALUES, wide, VALUES + 1, labels=("query", "key", "value"))
    numbered = with_inputs(VALUES + 1, VALUES, wide, VALUES + 1, labels=("0", "1", "2"))
    for a, b in ((named, numbered), (numbered, named)):
        assert compare(a, b).modules[0].inputs_equal is True
    changed = with_inputs(VALUES + 1, VALUES, wide + 1, VALUES + 1, labels=("0", "1", "2"))
    assert compare(named, changed).modules[0].inputs_equal is False


def test_arguments_passed_by_place_or_by_name_are_the_same_inputs() -> None:
    class Core(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return query * key

    class Model(nn.Module):
        def __init__(self, *, by_name: bool) -> None:
            super().__init__()
            self.core, self.by_name = Core(), by_name

        def forward(self, x: Tensor) -> Tensor:
            # The cause is between the modules.
            return self.core(query=x, key=x * 1.5) if self.by_name else self.core(x, x)

    x, recordings = torch.rand(1, 3, 4) + 1, []
    for by_name in (False, True):
        model = Model(by_name=by_name)
        with record(model) as recorder, recorder.rows(Rows.packed([3])):
            model(x)
        recordings.append(recorder.recording())
    result = compare(*recordings)
    assert (result.modules[0].name, result.modules[0].inputs_equal) == ("core", False)
    assert [module.name for module in result.culprits] == ["(model)"]


def test_the_culprit_row_is_found_among_many_sequences_that_came_in_any_order() -> None:
    tokens = [(sequence, position) for sequence in (4, 0, 9) for position in (3, 0, 7, 1)]
    values = torch.randn(len(tokens), 2)

    def changed_at(*places: tuple[int, int]) -> Tensor:
        return values + torch.tensor([[float(token in places)] for token in tokens])

    def recording(given: Tensor, output: Tensor) -> Recording:
        builder = RecordingBuilder()
        builder.add("inputs", "x", "0", entry_of(given, tokens))
        builder.add("outputs", "x", "", entry_of(output, tokens))
        return builder.build()

    b = recording(changed_at((0, 1), (4, 7)), changed_at((0, 1), (0, 7), (4, 3), (9, 0)))
    found = compare(recording(values, values), b).modules[0]
    assert (found.first, found.inputs_equal, found.culprit_row, found.num_differing) == (
        Row(0, 1),
        False,
        Row(4, 3),
        4,
    )


def test_inputs_of_another_dtype_are_not_equal_unless_allowed() -> None:
    a, b = with_inputs(VALUES, VALUES), with_inputs(VALUES + 1, VALUES.bfloat16())
    assert compare(a, b).modules[0].inputs_equal is False
    assert compare(a, b, allow_dtype=("x",)).modules[0].inputs_equal is True


def test_names_with_placeholders_and_exact_names_are_mapped() -> None:
    names = NameMap({"a.{i}.{kind}.w": "b.{kind}.{i}", "a.7.q.w": "special", "": "root"})
    assert names.target("a.12.k.w").name == "b.k.12"
    assert names.target("a.12.k.w#2").name == "b.k.12#2"
    assert names.target("a.7.q.w").name == "special"
    assert names.target("").name == "root"
    assert names.target("a.1.2.k.w").name == "a.1.2.k.w"
    with pytest.raises(ValueError, match=r"'b.{j}' has placeholders that 'a.{i}' does not: \['j'\]"):
        NameMap({"a.{i}": "b.{j}"})
    for source, wrong in (("a.{i}.b.{i}", "i"), ("a.{0}", "0")):
        with pytest.raises(ValueError, match=rf"{re.escape(repr(source))} in names .*: \['{wrong}'\]"):
            NameMap({source: "b"})


def test_a_later_call_of_a_shared_module_can_be_mapped_by_itself() -> None:
    names = NameMap({"shared": "layers.0", "shared#1": "layers.1", "l.{i}": "m.{i}.x", "{any}#2": "third"})
    found = {name: names.target(name).name for name in ("shared", "shared#1", "shared#3", "l.3", "l.3#1", "other#2")}
    assert found == {
        "shared": "layers.0",
        "shared#1": "layers.1",
        "shared#3": "layers.0#3",
        "l.3": "m.3.x",
        "l.3#1": "m.3.x#1",
        "other#2": "third",
    }
    both = made(**{"shared": (VALUES, THREE), "shared#1": (VALUES + 1, THREE)})
    b = made(**{"layers.0": (VALUES, THREE), "layers.1": (VALUES + 1, THREE)})
    assert compare(both, b, names={"shared": "layers.0", "shared#1": "layers.1"}).passed
    assert compare(b, both, names={"layers.0": "shared", "layers.1": "shared#1"}).passed


def test_a_pair_of_names_that_matches_nothing_fails_whatever_is_allowed() -> None:
    a, b = made(x=(VALUES, THREE)), made(z=(VALUES, THREE))
    assert compare(a, b, names={"x": "z"}).passed
    for names in ({"x": "z", "y": "z"}, {"{any}.x": "z", "x": "z"}):
        result = compare(a, b, names=names, allow_missing=("*",))
        assert len(result.problems) == 1
        assert result.problems[0].endswith("in names pairs no two modules")
        assert not result.passed


def test_a_fused_projection_is_compared_in_its_parts() -> None:
    fused = made(**{"l.3.qkv": (torch.cat([VALUES, VALUES + 10], 1), THREE)})
    parts = {"m.3.q": (VALUES, THREE), "m.3.k": (VALUES + 10, THREE)}
    names = {"l.{i}.qkv": lambda rows: {"m.{i}.q": rows[:, :2], "m.{i}.k": rows[:, 2:]}}
    result = compare(fused, made(**parts), names=names)
    assert result.passed
    assert [(module.name, module.other) for module in result.modules] == [("l.3.qkv", "m.3.q"), ("l.3.qkv", "m.3.k")]
    parts["m.3.k"] = (VALUES + torch.tensor([10.0, 11.0]), THREE)
    found = compare(fused, made(**parts), names=names)
    assert [module.num_differing for module in found.modules] == [0, 3]
    with pytest.raises(ValueError, match=r"'x' in names: 'y' has shape \[2, 2\] for 3 rows"):
        compare(X, X, names={"x": lambda rows: {"y": rows[:2]}})
    del parts["m.3.k"]
    assert compare(fused, made(**parts), names=names).problems == ("l.3.qkv / m.3.k: missing in b",)


def test_an_output_that_only_one_side_returns_fails() -> None:
    builder = RecordingBuilder()
    for label in ("0", "1"):
        builder.add("outputs", "x", label, entry_of(VALUES, THREE))
    two = builder.build()
    assert compare(two, X).problems == ("x[1]: missing in b",)
    assert compare(X, two).problems == ("x[1]: missing in a",)
    assert compare(two, X, allow_missing=("x",)).passed
    assert [module.name for module in compare(two, two).modules] == ["x[0]", "x[1]"]


NEEDED = [name for name in ("megatron", "transformers") if importlib.util.find_spec(name) is None]
needs_megatron = pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {NEEDED}")
LAYER, HF_LAYER = "decoder.layers.{i}", "model.layers.{i}"


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """A function that runs the example's GPTModel, right-padded, with its weights for transformers."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed as dist
        from grpo.cpu import megatron_device
        from grpo.model import ModelShape, build_model, export_weights, hf_config, transformer_config
        from megatron.core import parallel_state
        from transformers import Qwen3ForCausalLM
    shape = ModelShape(hidden_size=16, ffn_hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel_state.initialize_model_parallel()
            with megatron_device(torch.device("cpu")):
                config = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False)
                model = build_model(shape, config, seed=0)
        hf = Qwen3ForCausalLM(hf_config(shape)).eval()
        hf.load_state_dict(export_weights(model, shape))

        def run(ids: Tensor, rows: Rows) -> Recording:
            position = torch.arange(ids.shape[1]).expand_as(ids)
            with megatron_device(torch.device("cpu")), record(model) as recorder, recorder.rows(rows):
                model(ids, position, None).sum().backward()
            return recorder.recording()

        yield run, model, hf
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@needs_megatron
@pytest.mark.filterwarnings("ignore")
def test_one_ulp_planted_in_megatron_is_found_exactly(megatron) -> None:
    run, model, _ = megatron
    batch = padded()
    plain = run(*batch)
    assert compare(plain, run(*batch)).passed
    kinds = [
        "input_layernorm",
        "self_attention.linear_qkv",
        "self_attention.core_attention",
        "self_attention.linear_proj",
    ]
    kinds += ["pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"]
    places = st.tuples(st.integers(0, 1), st.sampled_from(kinds), st.sampled_from(TOKENS), st.integers(0, 15))

    @settings(max_examples=10, deadline=None)
    @given(places)
    def check(place: tuple[int, str, tuple[int, int], int]) -> None:
        layer, kind, (sequence, position), element = place
        name = f"decoder.layers.{layer}.{kind}"
        with planted(model.get_submodule(name), (position, sequence, element)):
            result = compare(plain, run(*batch))
        first = result.first_divergent
        assert first is not None
        assert (first.name, first.first, first.num_differing, first.max_ulp) == (name, Row(sequence, position), 1, 1)
        assert [module.name for module in result.culprits] == [name]

    check()


def split_qkv(rows: Tensor) -> dict[str, Tensor]:
    """Megatron has the heads of each of 2 groups together: 2 queries, 1 key, 1 value of dimension 8."""
    query, key, value = rows.view(len(rows), 2, 4, 8).split([2, 1, 1], dim=2)
    names = [f"{HF_LAYER}.self_attn.{x}_proj" for x in "qkv"]
    return {name: part.flatten(1) for name, part in zip(names, (query, key, value), strict=True)}


def split_gate_up(rows: Tensor) -> dict[str, Tensor]:
    gate, up = rows.chunk(2, -1)
    return {f"{HF_LAYER}.mlp.gate_proj": gate, f"{HF_LAYER}.mlp.up_proj": up}


MEGATRON_TO_TRANSFORMERS = {
    "": "",
    "embedding.word_embeddings": "model.embed_tokens",
    f"{LAYER}": f"{HF_LAYER}",
    f"{LAYER}.input_layernorm": f"{HF_LAYER}.input_layernorm",
    f"{LAYER}.self_attention": f"{HF_LAYER}.self_attn",
    f"{LAYER}.self_attention.linear_qkv": split_qkv,
    f"{LAYER}.self_attention.q_layernorm": f"{HF_LAYER}.self_attn.q_norm",
    f"{LAYER}.self_attention.k_layernorm": f"{HF_LAYER}.self_attn.k_norm",
    f"{LAYER}.self_attention.linear_proj": f"{HF_LAYER}.self_attn.o_proj",
    f"{LAYER}.pre_mlp_layernorm": f"{HF_LAYER}.post_attention_layernorm",
    f"{LAYER}.mlp": f"{HF_LAYER}.mlp",
    f"{LAYER}.mlp.linear_fc1": split_gate_up,
    f"{LAYER}.mlp.linear_fc2": f"{HF_LAYER}.mlp.down_proj",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
ONE_SIDED = (
    *["embedding", "embedding.embedding_dropout", "decoder", "*.core_attention", "*.pre_cross_attn_layernorm"],
    *["*.cross_attention", "model", "*.act_fn", "*rotary*"],
)


@needs_megatron
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_megatron_and_transformers_are_compared_module_by_module(megatron) -> None:
    run, _, hf = megatron
    with torch.enable_grad():
        trainer = run(*padded())
    ids, rows = packed()
    with record(hf) as recorder, recorder.rows(rows):
        # Without a cache, positions that restart separate the sequences.
        hf(ids, position_ids=rows.position, use_cache=False)
    result = compare(trainer, recorder.recording(), names=MEGATRON_TO_TRANSFORMERS, allow_missing=ONE_SIDED)
    assert result.problems == ()
    assert len(result.modules) == 4 + 2 * 14
    assert {module.num_rows for module in result.modules} == {len(TOKENS)}
    assert result.modules[0].name == "embedding.word_embeddings"
    assert result.modules[0].num_differing == 0
    assert result.modules[0].inputs_equal
    # float32 against float32 in another order of summation; logits are of size 1.
    assert max(module.max_abs for module in result.modules) < 1e-5
    assert result.verdict == "DIFFERENT"
    # Every module that a mapped name could stand for is there, with inputs.
    assert all(module.inputs_equal is not None or module.unpaired_inputs for module in result.modules)
    # Engines hand tables of positions to other modules.
    with_more = {module.name.rpartition(".")[2] for module in result.modules if module.unpaired_inputs}
    assert with_more == {"0", "1", "self_attention"}
