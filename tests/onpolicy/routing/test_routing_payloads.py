# SPDX-License-Identifier: Apache-2.0
"""What SGLang and vLLM send of their experts: whose row is whose, what nobody wrote, and what is refused."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.routing_layout import RoutingLayout

NOTHING = [[-1, -1], [-1, -1]]


def payload(rows: Tensor) -> str:
    return base64.b64encode(rows.contiguous().view(torch.uint8).numpy().tobytes()).decode()


# SGLang's rows of 4 tokens, of which the last was sampled and never fed; the middle one of 3 decoder layers is dense.
SGLANG = torch.tensor([[[1, 2], [0, 0], [3, 4]], [[5, 6], [0, 0], [7, 0]], [[2, 1], [0, 0], [6, 5]]], dtype=torch.int32)
SGLANG_MODEL = {"num_layers": 3, "topk": 2, "num_experts": 8, "moe_layers": [0, 2]}
# As SGLang 0.5.23 answered when weights were updated with pause_generation in mode retract.
RETRACTED = json.loads((Path(__file__).parents[2] / "data/rollout_responses/generate_two_versions.json").read_text())
SGLANG_EXPERTS = [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[2, 1], [6, 5]], NOTHING]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.uint8])
def test_row_p_of_sglang_is_the_choice_for_the_token_at_p_and_the_last_token_has_none(dtype) -> None:
    info = {"routed_experts": payload(SGLANG.to(dtype)), "routed_experts_dtype": str(dtype).removeprefix("torch.")}
    sample = RoutedExperts.from_sglang(info, num_tokens=4, **SGLANG_MODEL)
    assert sample.experts_TLK.tolist() == SGLANG_EXPERTS


def test_sglang_may_start_later_and_may_feed_the_last_token() -> None:
    info = {"routed_experts": payload(SGLANG), "routed_experts_start_len": 2}
    later = RoutedExperts.from_sglang(info, num_tokens=6, **SGLANG_MODEL)
    assert later.experts_TLK.tolist() == [NOTHING, NOTHING, *SGLANG_EXPERTS]
    fed = RoutedExperts.from_sglang({"routed_experts": payload(SGLANG)}, num_tokens=3, **SGLANG_MODEL)
    assert fed.experts_TLK.tolist() == SGLANG_EXPERTS[:3]


@pytest.mark.parametrize(
    ("info", "changes", "message"),
    [
        ({}, {}, "meta_info has no routed_experts: .*return_routed_experts: true"),
        ({"routed_experts": "?"}, {}, "is not base64"),
        ({"routed_experts": "AAAA"}, {}, "is base64, but not of a list of int32"),
        (
            {"routed_experts": payload(SGLANG), "routed_experts_dtype": "int8"},
            {},
            "routed_experts_dtype must be one of",
        ),
        (
            {"routed_experts": payload(SGLANG)},
            {"num_tokens": 5},
            "3 rows starting at position 0, but num_tokens = 5 needs 4",
        ),
        (
            {"routed_experts": payload(SGLANG)},
            {"num_tokens": 2},
            "3 rows starting at position 0, but num_tokens = 2 needs 1",
        ),
        ({"routed_experts": payload(SGLANG)}, {"topk": 4}, "18 values: .* topk = 4 that is 1.5 rows"),
        ({"routed_experts": payload(0 * SGLANG)}, {}, "every expert in routed_experts is 0"),
        ({"routed_experts": payload(SGLANG)}, {"moe_layers": None}, "expert 0 is chosen twice at token 0, layer 1"),
        ({"routed_experts": payload(SGLANG)}, {"num_experts": 7}, "expert 7 at token 1, layer 1"),
        (
            {"routed_experts": payload(SGLANG)},
            {"moe_layers": [0, 1]},
            "layer 2 has experts, so it is not a dense layer",
        ),
    ],
)
def test_what_sglang_cannot_have_meant_is_refused(info, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedExperts.from_sglang(info, **{"num_tokens": 4, **SGLANG_MODEL, **changes})


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"routed_experts": SGLANG.tolist()}, "routed_experts must be base64, got list"),
        (SGLANG.tolist(), "meta_info must be a mapping, got list: RoutedExperts.from_rows"),
        (SGLANG, "meta_info must be a mapping, got Tensor"),
    ],
)
def test_lists_in_the_place_of_what_sglang_sends_are_an_error_that_says_who_takes_them(info, message) -> None:
    with pytest.raises(TypeError, match=message):
        RoutedExperts.from_sglang(info, num_tokens=4, **SGLANG_MODEL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_retractions": 1}, "the request was retracted: SGLang computed its experts again"),
        ({"weight_versions": [{"version": "7"}, {"version": "8"}]}, r"retracted \(weight versions 7, 8\)"),
        (RETRACTED["response"]["meta_info"], r"retracted \(weight versions 7, 8\)"),
    ],
)
def test_experts_of_a_retracted_request_are_not_those_of_its_log_probs(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedExperts.from_sglang({**fields, "routed_experts": payload(SGLANG)}, num_tokens=4, **SGLANG_MODEL)


@pytest.mark.parametrize("versions", [["7"], ["7", "8"]])
def test_weights_that_are_updated_in_place_leave_the_experts_of_earlier_tokens(versions) -> None:
    fields = {"num_retractions": 0, "weight_versions": [{"version": version} for version in versions]}
    info = {**fields, "routed_experts": payload(SGLANG)}
    assert RoutedExperts.from_sglang(info, num_tokens=4, **SGLANG_MODEL).experts_TLK.tolist() == SGLANG_EXPERTS


# One expert a token in 4 decoder layers, the first dense; nobody chose expert 0 but the third token in layer 2.
TOP_1 = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 0, 1], [0, 2, 2, 5]], dtype=torch.int32).unsqueeze(-1)


def read_by_sglang(rows: Tensor, *, moe_layers: list | None) -> RoutedExperts:
    info, model = {"routed_experts": payload(rows)}, {"num_layers": 4, "topk": rows.size(-1), "num_experts": 8}
    return RoutedExperts.from_sglang(info, num_tokens=len(rows) + 1, moe_layers=moe_layers, **model)


def read_by_vllm(rows: Tensor, *, moe_layers: list | None) -> RoutedExperts:
    file = io.BytesIO()
    np.save(file, rows.to(torch.uint8).numpy())
    choice = {"routed_experts": base64.b64encode(file.getvalue()).decode()}
    return RoutedExperts.from_vllm(choice, num_tokens=len(rows) + 1, num_experts=8, moe_layers=moe_layers)


@pytest.mark.parametrize("read", [read_by_sglang, read_by_vllm])
def test_with_one_expert_a_token_zeros_that_nobody_wrote_are_not_expert_0(read) -> None:
    whole = read(TOP_1, moe_layers=[1, 2, 3])
    assert torch.equal(whole.experts_TLK[:-1], TOP_1[:, 1:])
    # Layer 3 proves that the layers are counted from 1.
    with pytest.raises(ValueError, match=r"layer 3 has experts, so it is not .*, but moe_layers = \[0, 1, 2\]"):
        read(TOP_1, moe_layers=[0, 1, 2])
    rows = TOP_1.clone()
    rows[:2] = 0
    part = read(rows, moe_layers=[1, 2, 3])
    assert part.recorded_T.tolist() == [False, False, True, True, False]
    assert torch.equal(part.experts_TLK[2:4], TOP_1[2:, 1:])
    layout = RoutingLayout.packed([5])
    with pytest.raises(ValueError, match="2 tokens have no recorded experts, the first at position 0 of sample 0"):
        layout.local([part])
    assert layout.local([part], missing="own").num_missing == 2


@pytest.mark.parametrize("read", [read_by_sglang, read_by_vllm])
@pytest.mark.parametrize("moe_layers", [[3, 3, -2], [1, 2, 2, 3], [3, 2, 1], [1, 2, 3, 4], [-3, 2, 3], []])
def test_layers_that_are_not_each_once_in_their_order_are_refused(read, moe_layers) -> None:
    with pytest.raises(ValueError, match=r"moe_layers must be ascending layers in \[0, 4\), each once, got \["):
        read(TOP_1, moe_layers=moe_layers)
    for no_layer in (1.0, "1", True, None):
        with pytest.raises(TypeError, match=f"moe_layers must be an integer, got {no_layer!r}"):
            read(TOP_1, moe_layers=[no_layer, 2, 3])


@pytest.mark.parametrize("value", ["1", 1.0, True, [1]])
@pytest.mark.parametrize(
    ("read", "key"),
    [
        *[(lambda info, _: info, key) for key in ("num_retractions", "routed_experts_start_len")],
        *[(lambda _, model: model, key) for key in ("num_tokens", "num_layers", "topk", "num_experts")],
    ],
)
def test_a_count_that_is_no_integer_is_an_error_that_names_it(read, key, value) -> None:
    info, model = {"routed_experts": payload(SGLANG)}, {"num_tokens": 4, **SGLANG_MODEL}
    read(info, model)[key] = value
    with pytest.raises(TypeError, match=rf"{key} must be an integer.*, got {re.escape(repr(value))}"):
        RoutedExperts.from_sglang(info, **model)
    read(info, model)[key] = -1
    with pytest.raises(ValueError, match=rf"{key} must be an integer of at least [01], got -1|num_tokens = -1 needs"):
        RoutedExperts.from_sglang(info, **model)


def test_a_count_that_the_server_leaves_empty_is_as_if_it_were_not_there() -> None:
    empty = dict.fromkeys(("num_retractions", "routed_experts_start_len", "weight_versions", "routed_experts_dtype"))
    sample = RoutedExperts.from_sglang({**empty, "routed_experts": payload(SGLANG)}, num_tokens=4, **SGLANG_MODEL)
    assert sample.experts_TLK.tolist() == SGLANG_EXPERTS
    one = {"weight_versions": [{"version": 7}, {"version": 7}], "routed_experts": payload(SGLANG)}
    assert RoutedExperts.from_sglang(one, num_tokens=4, **SGLANG_MODEL).experts_TLK.tolist() == SGLANG_EXPERTS
    for spans in ("7", [7]):
        with pytest.raises(TypeError, match="weight_versions"):
            RoutedExperts.from_sglang(
                {"weight_versions": spans, "routed_experts": payload(SGLANG)}, num_tokens=4, **SGLANG_MODEL
            )
