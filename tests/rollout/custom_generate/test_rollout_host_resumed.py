# SPDX-License-Identifier: Apache-2.0
"""The custom generate function: aborted samples, partial rollouts and several weight versions."""

import sys
from pathlib import Path

import pytest
import torch
from tiny_tokenizers import TURN_END

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import QUESTION, TOOL_RESULT, WITH_ENVIRONMENT, run
from host_samples import SlimeSample
from sglang_answers import END, TOKENIZER, aborted, stopped
from tiny_tokenizers import encode, encode_bytewise
from tokens.sample import Sample, Status

from mis_ext.rollout.custom_generate.function import UNFINISHED

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.mark.parametrize("text", ["is mi", ""])
def test_an_aborted_sample_holds_no_half_response_and_starts_anew(tokenizer_folder, environment, text):
    environment(TOOL_RESULT)
    sample = Sample(prompt="The weather")
    run([lambda r: stopped(r, "look"), lambda r: aborted(r, text)], tokenizer_folder, sample, settings=WITH_ENVIRONMENT)
    assert sample.status is Status.ABORTED
    assert (sample.tokens, sample.response, sample.response_length) == ([], "", 0)
    assert (sample.loss_mask, sample.rollout_log_probs) == (None, None)
    assert sample.metadata == {"on_policy_tokens": {"aborted_requests": 1, "discarded_tokens": 5 + len(text)}}
    run([lambda r: stopped(r, "mild")], tokenizer_folder, sample)
    assert sample.status is Status.COMPLETED
    assert sample.loss_mask == [1] * 5
    assert sample.metadata["on_policy_tokens"]["discarded_tokens"] == 5 + len(text)


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
@pytest.mark.parametrize("masked", [False, True])
def test_a_partial_rollout_goes_on_where_it_was_aborted(tokenizer_folder, environment, sample_class, masked):
    said = environment(TOOL_RESULT, None)
    sample = sample_class(prompt=QUESTION)
    partial = {"settings": WITH_ENVIRONMENT, "partial_rollout": True}
    run([lambda r: stopped(r, "look"), lambda r: aborted(r, "It is")], tokenizer_folder, sample, **partial)
    assert sample.status is Status.ABORTED
    kept, log_probs = list(sample.tokens), list(sample.rollout_log_probs)
    observed = sample.loss_mask.count(0)
    assert sample.loss_mask == [1] * 5 + [0] * observed + [1] * 5
    if masked:
        # The hosts do this where old weights' tokens are not to be trained.
        sample.loss_mask = [0] * sample.response_length

    server = run([lambda r: stopped(r, " mild", version="8")], tokenizer_folder, sample, **partial)
    assert server.requests[0]["input_ids"] == kept
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 32 - 5
    assert said.told == [f"look{TURN_END}", f"It is mild{TURN_END}"]
    assert sample.status is Status.COMPLETED
    assert sample.tokens == [*kept, *encode_bytewise(TOKENIZER, " mild"), END]
    assert sample.rollout_log_probs[: len(log_probs)] == log_probs
    before = [0] * (10 + observed) if masked else [1] * 5 + [0] * observed + [1] * 5
    assert sample.loss_mask == before + [1] * 6
    assert sample.weight_versions == ["7", "7", "8"]
    assert UNFINISHED not in sample.metadata
    counts = sample.metadata["on_policy_tokens"]
    assert (counts["aborted_requests"], counts["generations"], counts["sampled_tokens"]) == (1, 3, 16)


def updated_midway(request):
    response = stopped(request, "mild", version="8")
    segments = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 5}]
    response["meta_info"]["weight_versions"] = segments
    return response


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
def test_a_response_of_two_weight_versions_names_both(tokenizer_folder, sample_class):
    sample = sample_class(prompt="The weather")
    run([lambda r: aborted(r, "It is ")], tokenizer_folder, sample, partial_rollout=True)
    run([updated_midway], tokenizer_folder, sample, partial_rollout=True)
    assert sample.weight_versions == ["7", "7", "8"]


def test_versions_of_a_response_that_its_host_cleared_are_gone(tokenizer_folder):
    sample = Sample(prompt="The weather")
    # Miles keeps them when it samples a prompt afresh.
    sample.teacher_log_probs = [3.0] * 9
    run([lambda r: stopped(r, "mild", version="8")], tokenizer_folder, sample, mis_staleness=True)
    assert sample.teacher_log_probs == [8.0] * 5


def test_log_probs_of_a_teacher_are_left_alone_where_nobody_asks_for_versions(tokenizer_folder):
    sample = SlimeSample(prompt="The weather")
    resumed = {"partial_rollout": True, "use_opd": True}
    run([lambda r: aborted(r, "It is")], tokenizer_folder, sample, **resumed)
    # slime has them in a tensor.
    sample.teacher_log_probs = teachers = torch.zeros(5)
    run([lambda r: stopped(r, " mild")], tokenizer_folder, sample, **resumed)
    assert sample.status is Status.COMPLETED
    assert sample.teacher_log_probs is teachers


def test_versions_and_the_log_probs_of_a_teacher_do_not_go_together(tokenizer_folder):
    with pytest.raises(ValueError, match="mis_staleness and use_opd use the same field"):
        run([], tokenizer_folder, Sample(prompt="The weather"), mis_staleness=True, use_opd=True)


def test_the_spans_of_versions_of_a_newer_miles_stay_its_own(tokenizer_folder):
    class Spans:
        pass

    class MilesSample(Sample):
        def update_from_meta_info(self, args, meta_info):
            super().update_from_meta_info(args, meta_info)
            self.weight_versions[-1] = Spans()

    sample = MilesSample(prompt="The weather")
    run([updated_midway], tokenizer_folder, sample)
    (version,) = sample.weight_versions
    assert isinstance(version, Spans)


def test_a_sample_that_its_host_cleared_starts_anew(tokenizer_folder, environment):
    said = environment(None)
    sample = Sample(prompt="The weather")
    sample.metadata[UNFINISHED] = (1, 9, "half a turn")
    server = run(
        [lambda r: stopped(r, "mild")], tokenizer_folder, sample, settings=WITH_ENVIRONMENT, partial_rollout=True
    )
    assert said.told == [f"mild{TURN_END}"]
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 32


def test_the_turn_that_the_hosts_own_function_left_unfinished_counts_against_the_limit(tokenizer_folder):
    ids = encode(TOKENIZER, "The weather")
    sample = Sample(prompt="The", tokens=ids, response=" weather", response_length=1, rollout_log_probs=[-0.5])
    server = run([lambda r: stopped(r, "mild")], tokenizer_folder, sample, partial_rollout=True)
    assert server.requests[0]["input_ids"] == ids
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 31
    assert sample.loss_mask == [1] * 6
    assert sample.rollout_log_probs[0] == -0.5
    assert sample.response == f" weathermild{TURN_END}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs have 0 entries, but its response has 2"),
        ({"rollout_log_probs": [-0.5]}, "rollout_log_probs have 1 entries, but its response has 2"),
        ({"loss_mask": [1, 1, 1]}, "loss_mask have 3 entries, but its response has 2"),
        ({"tokens": [5]}, "tokens have 1 entries, but its response has 2"),
    ],
)
def test_a_resumed_sample_whose_fields_disagree_is_refused(tokenizer_folder, fields, message):
    whole = {"tokens": [5, 6, 7], "response_length": 2, "rollout_log_probs": [-0.5, -0.5]}
    with pytest.raises(ValueError, match=message):
        run([], tokenizer_folder, Sample(prompt="The", **(whole | fields)))
