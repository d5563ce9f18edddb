# SPDX-License-Identifier: Apache-2.0
"""Routed experts of the custom generate function: each row is the choice with which its token was first fed."""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import LIMITS, NUM_LAYERS, REPLAYED, TOPK, WITH_ENVIRONMENT, experts, run
from host_samples import SlimeSample
from sglang_answers import aborted, cut, stopped
from tokens.sample import Sample, Status

from mis_ext.rollout.generation import Contradiction, CountMismatch, MalformedResponse

pytestmark = pytest.mark.usefixtures("short_pauses")

RECORDED = Path(__file__).resolve().parents[2] / "data" / "rollout_responses"


def with_experts(reply, request, *, knows_start=True, dtype="int32", version=None):
    """What an engine adds that computes the whole sequence with the weights of the answer, as after a dropped cache."""
    meta_info = reply["meta_info"]
    version = int(meta_info["weight_version"]) if version is None else version
    fed = [*request["input_ids"], *reply["output_ids"]][:-1]
    start = request["routed_experts_start_len"] if knows_start else 0
    rows = [experts(version, place, token) for place, token in enumerate(fed)][start:]
    meta_info["routed_experts"] = base64.b64encode(np.array(rows, dtype).tobytes()).decode()
    if dtype != "int32":
        meta_info["routed_experts_dtype"] = dtype
    return reply


class Engine:
    """Answers with experts, and remembers the truth: a token keeps the experts with which it was fed first."""

    def __init__(self, **how):
        self.how, self.truth, self.sampled = how, [], 0

    def answers(self, kind, text, version):
        def reply(request):
            answer = with_experts(kind(request, text, version=version), request, **self.how)
            fed = [*request["input_ids"], *answer["output_ids"]][:-1]
            known = len(self.truth)
            assert request["return_routed_experts"] is True
            assert request["routed_experts_start_len"] == known
            self.truth += [experts(int(version), known + place, token) for place, token in enumerate(fed[known:])]
            self.sampled += len(answer["output_ids"])
            return answer

        return reply


def held(sample, engine):
    rows = sample.rollout_routed_experts
    assert isinstance(rows, torch.Tensor if isinstance(sample, SlimeSample) else np.ndarray)
    assert rows.dtype in (torch.int32, np.int32)
    assert rows.tolist() == engine.truth
    assert sum(sample.loss_mask) == engine.sampled
    return len(rows)


KINDS = pytest.mark.parametrize("sample_class", [Sample, SlimeSample], ids=["miles", "slime"])


@KINDS
def test_an_observation_that_was_not_sent_yet_gets_its_experts_with_the_next_request(
    tokenizer_folder, environment, sample_class, monkeypatch
):
    from mis_ext.rollout.custom_generate import function

    environment("[rain]", None)
    engine, sample = Engine(), sample_class(prompt="The weather")
    partial = {"settings": WITH_ENVIRONMENT, "partial_rollout": True, **REPLAYED}
    # The host gives up while the environment has its turn.
    calls = iter([False, False, True])
    monkeypatch.setattr(function, "abort_flag", lambda *_: lambda: next(calls))
    run([engine.answers(stopped, "look", "7")], tokenizer_folder, sample, **partial)
    assert held(sample, engine) == len(sample.tokens) - 1 - sample.loss_mask.count(0)
    monkeypatch.setattr(function, "abort_flag", lambda *_: lambda: False)
    run([engine.answers(stopped, "mild", "8")], tokenizer_folder, sample, **partial)
    assert held(sample, engine) == len(sample.tokens) - 1


@KINDS
def test_tokens_of_an_aborted_request_that_came_without_experts_are_not_kept(tokenizer_folder, sample_class):
    engine, sample = Engine(), sample_class(prompt="The weather")
    partial = {"partial_rollout": True, **REPLAYED}
    run([engine.answers(aborted, "it", "7")], tokenizer_folder, sample, **partial)
    kept = list(sample.tokens)
    # Retracted, it waited to go on when the host gave up.
    run([lambda r: aborted(r, " is")], tokenizer_folder, sample, **partial)
    assert (sample.tokens, sample.status) == (kept, Status.ABORTED)
    assert sample.metadata["on_policy_tokens"]["discarded_tokens"] == 3
    run([engine.answers(stopped, " is mild", "8")], tokenizer_folder, sample, **partial)
    assert held(sample, engine) == len(sample.tokens) - 1
    assert sample.response.startswith("it is mild")


@KINDS
def test_a_first_request_that_was_aborted_without_experts_leaves_a_sample_without_tokens(
    tokenizer_folder, sample_class
):
    engine, sample = Engine(), sample_class(prompt="The weather")
    partial = {"partial_rollout": True, **REPLAYED}
    run([lambda r: aborted(r, "it", version="7")], tokenizer_folder, sample, **partial)
    assert (sample.response_length, sample.status) == (0, Status.ABORTED)
    assert sample.rollout_routed_experts is None
    run([engine.answers(stopped, "mild", "8")], tokenizer_folder, sample, **partial)
    assert held(sample, engine) == len(sample.tokens) - 1
    # That of the tokens which were not kept is not among them.
    assert sample.weight_versions == ["8"]


def test_evaluation_and_a_flag_that_is_off_ask_for_nothing(tokenizer_folder):
    import asyncio

    from host_samples import loopback_server
    from tokens.sample import host_args

    from mis_ext.rollout.custom_generate.function import generate

    for flags, evaluation in (({**REPLAYED, "use_rollout_routing_replay": False}, False), (REPLAYED, True)):
        sample = Sample(prompt="The weather")
        with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
            asyncio.run(generate(host_args(server.port, tokenizer_folder, **flags), sample, LIMITS, evaluation))
        assert not any("routed_experts" in key for key in server.requests[0])
        assert sample.rollout_routed_experts is None


@pytest.mark.parametrize(
    "how", [{"dtype": "uint8"}, {"moe_router_topk": None}, {"num_experts": None}, {"feeds_the_last": True}]
)
def test_what_a_server_may_send_otherwise_is_read(tokenizer_folder, how):
    engine, sample = Engine(dtype=how.pop("dtype", "int32")), Sample(prompt="The weather")
    feeds_the_last = how.pop("feeds_the_last", False)
    answer = engine.answers(stopped, "mild", "7")

    def reply(request):
        came = answer(request)
        if feeds_the_last:
            more = base64.b64decode(came["meta_info"]["routed_experts"]) + bytes(4 * NUM_LAYERS * TOPK)
            came["meta_info"]["routed_experts"] = base64.b64encode(more).decode()
        return came

    run([reply], tokenizer_folder, sample, **REPLAYED | how)
    assert held(sample, engine) == len(sample.tokens) - 1


def encoded(values, dtype="int32"):
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


# "The weather" has 2 tokens, and "mild" with its end 5: 6 rows of 6 values.
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"routed_experts": None}, MalformedResponse, "no routed_experts, which use_rollout_routing_replay needs"),
        ({"routed_experts": "?"}, MalformedResponse, "is not base64"),
        ({"routed_experts": [1, 2]}, MalformedResponse, "must be base64, got list"),
        ({"routed_experts_dtype": "float32"}, MalformedResponse, "must be one of .* got 'float32'"),
        (
            {"routed_experts": encoded([1, 2] * 15)},
            CountMismatch,
            "30 values; .* 7 tokens starting at position 0 need 36",
        ),
        ({"routed_experts": encoded([1] * 35)}, CountMismatch, "has 35 values"),
        ({"routed_experts": encoded([1, 2] * 12 + [0] * 6 + [1, 2] * 3)}, MalformedResponse, "position 4: no value"),
        ({"routed_experts": encoded([1, 8] * 18)}, MalformedResponse, r"must be in \[0, 8\), got 1 to 8"),
        ({"routed_experts": encoded([1, -1] * 18)}, MalformedResponse, r"must be in \[0, 8\), got -1 to 1"),
    ],
)
def test_what_is_no_routing_of_the_tokens_is_refused(tokenizer_folder, changes, error, message):
    def reply(request):
        came = with_experts(stopped(request, "mild"), request)
        came["meta_info"] |= changes
        return came

    with pytest.raises(error, match=f"sample 0, turn 0.*{message}"):
        run([reply], tokenizer_folder, Sample(prompt="The weather"), **REPLAYED)


def test_one_expert_a_token_may_be_expert_0_for_some_and_not_for_all(tokenizer_folder):
    def reply(text):
        def zeros(request):
            came = stopped(request, text)
            fed = len(request["input_ids"]) + len(came["output_ids"]) - 1
            came["meta_info"]["routed_experts"] = encoded([0] * fed * NUM_LAYERS)
            return came

        return zeros

    sample = Sample(prompt="The weather")
    run([reply("mild")], tokenizer_folder, sample, **REPLAYED | {"moe_router_topk": 1})
    assert sample.rollout_routed_experts.shape == (6, NUM_LAYERS, 1)
    with pytest.raises(MalformedResponse, match="0 in every layer at position 0"):
        run([reply("mild and rain")], tokenizer_folder, Sample(prompt="The"), **REPLAYED | {"moe_router_topk": 1})


def spans(*versions):
    return [{"version": each, "start": 2 * place, "end": 2 * place + 2} for place, each in enumerate(versions)]


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        # The same weights: what another batch rounds otherwise.
        ({"num_retractions": 1}, False),
        ({"num_retractions": 1, "versions": ["7", "8"]}, True),
        # Updated in place: the cache stayed, and with it the experts.
        ({"num_retractions": 0, "versions": ["7", "8"]}, False),
        # Who does not count retractions may have had one.
        ({"num_retractions": None, "versions": ["7", "8"]}, True),
    ],
)
def test_a_retracted_request_is_refused_where_the_weights_changed_and_counted_where_not(
    tokenizer_folder, fields, refused
):
    def reply(request):
        came = cut(request, "mild")
        came["meta_info"]["num_retractions"] = fields["num_retractions"]
        if "versions" in fields:
            came["meta_info"] |= {"weight_versions": spans(*fields["versions"]), "weight_version": "8"}
        return with_experts(came, request)

    sample = Sample(prompt="The weather")
    if refused:
        with pytest.raises(Contradiction, match=r"sample 0, turn 0.*retracted \(weight versions 7, 8\)"):
            run([reply], tokenizer_folder, sample, **REPLAYED)
        return
    run([reply], tokenizer_folder, sample, **REPLAYED)
    assert sample.metadata["on_policy_tokens"]["retracted_requests"] == (fields["num_retractions"] or 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "sample 0 cannot be resumed with use_rollout_routing_replay: its tokens have no experts"),
        (2, "have 2 rows, but its 5 tokens need 4 to 4"),
        (5, "have 5 rows, but its 5 tokens need 4 to 4"),
    ],
)
def test_a_resumed_sample_must_have_the_experts_of_what_was_fed(tokenizer_folder, rows, message):
    experts_so_far = None if rows is None else np.ones((rows, NUM_LAYERS, TOPK), np.int32)
    sample = Sample(
        prompt="The weather",
        tokens=[5, 6, 7, 8, 9],
        response="a",
        response_length=3,
        rollout_log_probs=[-1.0] * 3,
        rollout_routed_experts=experts_so_far,
        status=Status.ABORTED,
    )
    with pytest.raises(ValueError, match=message):
        run([], tokenizer_folder, sample, partial_rollout=True, **REPLAYED)


def test_requests_of_one_sample_have_experts_of_one_shape(tokenizer_folder):
    # Nobody says how many experts a token has, and the server sends twice the rows that were asked for.
    sample, flags = Sample(prompt="The weather"), {**REPLAYED, "moe_router_topk": None, "partial_rollout": True}
    run([lambda r: with_experts(aborted(r, "it"), r)], tokenizer_folder, sample, **flags)
    with pytest.raises(ValueError, match=r"sample 0: .*layers and topk of their experts: \[\(3, 2\), \(3, 4\)\]"):
        run([lambda r: with_experts(stopped(r, " i"), r, knows_start=False)], tokenizer_folder, sample, **flags)


def test_a_sample_without_room_for_a_token_is_named(tokenizer_folder):
    with pytest.raises(ValueError, match="sample 0 has no room for a token, so the engine chose no experts"):
        run([], tokenizer_folder, Sample(prompt="The weather"), rollout_max_context_len=2, **REPLAYED)


@pytest.mark.filterwarnings("ignore::mis_ext.rollout.custom_generate.host.LogProbDefinitionWarning")
@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_eagle_topk": 1}, False),
        ({"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_eagle_topk": 4}, True),
        ({"sglang_speculative_algorithm": "EAGLE"}, True),
        ({"sglang_speculative_algorithm": "NGRAM", "sglang_speculative_eagle_topk": 1}, True),
    ],
)
def test_drafts_along_a_tree_are_refused(tokenizer_folder, flags, refused):
    engine, sample = Engine(), Sample(prompt="The weather")
    if refused:
        with pytest.raises(ValueError, match=f"{flags['sglang_speculative_algorithm']} needs .*eagle_topk=1"):
            run([], tokenizer_folder, sample, **REPLAYED, **flags)
        return
    run([engine.answers(stopped, "mild", "7")], tokenizer_folder, sample, **REPLAYED, **flags)
    assert held(sample, engine) == len(sample.tokens) - 1


def test_what_slime_needs_for_top_p_reaches_its_own_method_and_experts_do_not(tokenizer_folder):
    def reply(request):
        came = with_experts(stopped(request, "mild"), request)
        came["meta_info"] |= {"top_p_token_ids": "AA==", "top_p_token_offsets": "AQ=="}
        return came

    sample = SlimeSample(prompt="The weather")
    run([reply], tokenizer_folder, sample, **REPLAYED)
    (appended,) = [each["meta_info"] for each in sample.appended]
    assert (appended["top_p_token_ids"], appended["top_p_token_offsets"]) == ("AA==", "AQ==")
    assert "routed_experts" not in appended


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())


@KINDS
def test_genuine_answers_of_sglang_are_joined(tokenizer_folder, sample_class):
    first, second = (recorded(f"generate_experts_{name}") for name in ("abort", "continued"))
    num_prompt = len(first["request"]["input_ids"])
    sample = sample_class(prompt="The answer is")
    model = {"num_layers": 2, "moe_router_topk": 2, "num_experts": 8}
    flags = REPLAYED | model | {"partial_rollout": True}
    params = first["request"]["sampling_params"]
    for answer in (first, second):
        server = run([lambda r, a=answer: a["response"]], tokenizer_folder, sample, params=params, **flags)
        asked = {key: value for key, value in server.requests[0].items() if key not in ("path", "sampling_params")}
        assert asked == {key: value for key, value in answer["request"].items() if key != "sampling_params"}
    (old, new) = (
        np.frombuffer(base64.b64decode(each["response"]["meta_info"]["routed_experts"]), np.int32).reshape(-1, 2, 2)
        for each in (first, second)
    )
    assert len(old) == num_prompt + first["response"]["meta_info"]["completion_tokens"] - 1
    assert sample.rollout_routed_experts.tolist() == [*old.tolist(), *new.tolist()]
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
