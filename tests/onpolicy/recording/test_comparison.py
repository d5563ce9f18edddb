# SPDX-License-Identifier: Apache-2.0
"""The comparator finds planted differences exactly, and the module that caused them."""

from typing import Any

import pytest
from comparison_recordings import TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import HIDDEN, SEQUENCES, TinyDecoder, packed, padded, planted, recording_of
from torch import Tensor, nn

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.differences import Row
from mis_ext.onpolicy.recording.recordings import Recording

KINDS = ["norm", "attention.qkv", "attention.core", "attention.out", "mlp.1", "mlp.3", "mlp.0"]


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
    # Where the tokens of a forward lie is an input of attention that is not by token.
    inputs = "inputs equal but for tokens (not compared)" if kind == "attention.core" else "inputs equal"
    where = f"first divergence: {name} (sequence {sequence}, position {position})"
    assert f"{where}: {inputs}, output differs, max 1 ULP" in result.summary()
    equal = [module.name for module in result.modules[: first.order]]
    assert equal == [*whole.outputs][: first.order]


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
