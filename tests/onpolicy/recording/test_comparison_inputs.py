# SPDX-License-Identifier: Apache-2.0
"""The comparator: when the inputs of a module count as equal, and which names are the same."""

import re
from typing import Any

import pytest
import torch
from comparison_recordings import THREE, VALUES, X, entry_of, made
from torch import Tensor, nn

from mis_ext.onpolicy.recording.compare import NameMap, compare
from mis_ext.onpolicy.recording.differences import Row
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording, RecordingBuilder
from mis_ext.onpolicy.recording.rows import Rows


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
    # Where no row of the output differs, all rows of the inputs count.
    assert compare(with_inputs(VALUES, VALUES), with_inputs(VALUES, VALUES + 1)).modules[0].inputs_equal is False


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
    summary = compare(with_inputs(VALUES), b).summary()
    assert "no culprit: inputs of the first divergence were not compared: 0, 1" in summary
    neither = compare(with_inputs(VALUES), with_inputs(changed)).summary()
    assert "no culprit: the inputs of the first divergence were not recorded" in neither


def test_an_input_on_one_side_only_is_named_and_inputs_are_not_called_equal() -> None:
    one, two = with_inputs(VALUES, VALUES), with_inputs(VALUES + 1, VALUES, VALUES, labels=("0", "residual"))
    for a, b in ((one, two), (two, one)):
        found = compare(a, b).modules[0]
        assert (found.inputs_equal, found.uncompared_inputs) == (None, ("residual",))
        # By the input that both have, it is still the one to blame.
        assert found.is_culprit
        assert "inputs equal but for residual (not compared), output differs" in str(found)
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
    assert compare(c, d).modules[0].uncompared_inputs == ("scale", "angles")
    e, f = (with_inputs(VALUES + x, torch.ones(3, x), labels=(label,)) for x, label in ((1, "hidden"), (5, "ids")))
    found = compare(e, f).modules[0]
    assert (found.inputs_equal, found.is_culprit, found.uncompared_inputs) == (None, False, ("hidden", "ids"))


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


MASK = torch.ones(1, 1, 3, 3).tril()


def masked(output: float, **given: Any) -> Recording:
    """Of a module that gets what no token has."""

    class Core(nn.Module):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            return x + output

    model = Core()
    with record(model) as recorder, recorder.rows(Rows.packed([3])):
        model(torch.ones(1, 3, 2), **given)
    return recorder.recording()


@pytest.mark.parametrize("value", [MASK, object(), [object(), 1], nn.Parameter(MASK)])
def test_an_input_that_is_not_by_token_is_named_and_never_equal(value) -> None:
    a, b = (masked(output, scale=0.5, flag=True, name="x", none=None, other=value) for output in (0, 1))
    for left, right in ((a, b), (b, a), (a, masked(1)), (masked(1), a)):
        found = compare(left, right).modules[0]
        assert (found.inputs_equal, found.compared_inputs, found.uncompared_inputs) == (None, ("x",), ("other",))
        # By the inputs that were compared, it is still the one to blame.
        assert found.is_culprit
        assert "inputs equal but for other (not compared), output differs" in str(found)


def test_a_module_without_inputs_by_token_is_no_culprit() -> None:
    """As a rotary embedding, which gets a table of positions."""
    skipped = {"x[table] inputs": "no token dimensions in [9]"}
    sides = (X, made(x=(VALUES + 1, THREE)))
    result = compare(*(Recording(outputs=side.outputs, skipped=skipped) for side in sides))
    assert result.culprits == ()
    assert "no culprit: inputs of the first divergence were not compared: table" in result.summary()


def test_the_culprit_row_is_found_among_many_sequences_that_came_in_any_order() -> None:
    tokens = [(sequence, position) for sequence in (4, 0, 9) for position in (3, 0, 7, 1)]
    values = torch.randn(len(tokens), 2)

    def changed_at(*places: tuple[int, int]) -> Tensor:
        return values + torch.tensor([[float(token in places)] for token in tokens])

    def recording(given: Tensor, output: Tensor) -> Recording:
        builder = RecordingBuilder()
        # A forward pass without tokens, whose rows have another shape.
        builder.add("inputs", "x", "0", entry_of(torch.empty(0, 3), []))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_inputs_of_another_dtype_are_not_equal_unless_allowed(dtype) -> None:
    a, b = with_inputs(VALUES, VALUES), with_inputs(VALUES + 1, VALUES.to(dtype))
    assert compare(a, b).modules[0].inputs_equal is False
    assert compare(a, b, allow=("x",)).modules[0].inputs_equal is True


def test_names_with_placeholders_and_exact_names_are_mapped() -> None:
    names = NameMap({"a.{i}.{kind}.w": "b.{kind}.{i}", "a.7.q.w": "special", "": "root"})
    pairs = {"a.12.k.w": "b.k.12", "a.12.k.w#2": "b.k.12#2", "a.7.q.w": "special", "": "root", "a.1.2.k.w": "a.1.2.k.w"}
    assert {name: [*names.targets(name, {})[1]] for name in pairs} == {name: [other] for name, other in pairs.items()}
    with pytest.raises(ValueError, match=r"'b.{j}' has placeholders that 'a.{i}' does not: \['j'\]"):
        NameMap({"a.{i}": "b.{j}"})
    for source, wrong in (("a.{i}.b.{i}", "i"), ("a.{0}", "0")):
        with pytest.raises(ValueError, match=rf"{re.escape(repr(source))} in names .*: \['{wrong}'\]"):
            NameMap({source: "b"})


def test_a_pair_of_names_that_matches_nothing_fails_whatever_is_allowed() -> None:
    a, b = made(x=(VALUES, THREE)), made(z=(VALUES, THREE))
    assert compare(a, b, names={"x": "z"}).passed
    for names in ({"x": "z", "y": "z"}, {"{any}.x": "z", "x": "z"}):
        result = compare(a, b, names=names, allow=("*",))
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
    assert compare(two, X, allow=("x",)).passed
    assert [module.name for module in compare(two, two).modules] == ["x[0]", "x[1]"]
