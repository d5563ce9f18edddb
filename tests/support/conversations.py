# SPDX-License-Identifier: Apache-2.0
"""Two calls of one conversation for every class of boundary, with real tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tiny_tokenizers import KEEP_REASONING, STRIP_REASONING, TURN_END, encode, encode_bytewise, render
from transformers import PreTrainedTokenizerFast

from mis_ext.rollout.generation import FinishReason, Generation, TrainingSample

QUESTION = [
    {"role": "system", "content": "Think first."},
    {"role": "user", "content": "What is the weather in München?"},
]
MORE = [{"role": "user", "content": "and in 東京?"}]
TOOL_RESULT = [{"role": "tool", "content": '{"sky": "晴れ"}'}]
ANSWER = "It is mild today 🙂, and tomorrow it rains."


def call(
    name: str, prompt_ids: list[int], sampled_ids: list[int], *, finish_reason: FinishReason = "stop"
) -> Generation:
    """A call whose log-probs differ from those of every call with another name."""
    first = -1 - sum(name.encode()) % 97
    log_probs = [first / 7 - position / 1e3 for position in range(len(sampled_ids))]
    return Generation(
        request_id=name,
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        log_probs=log_probs,
        finish_reason=finish_reason,
        weight_version=f"version of {name}",
    )


class Case(NamedTuple):
    """Two calls, the class of the boundary between them, and the ids after the first sample in the second prompt."""

    kind: str
    calls: list[Generation]
    observation: list[int]


def contiguous(tokenizer: Any) -> Case:
    """The template writes the call of a tool as it was sampled."""
    tokenizer.chat_template = KEEP_REASONING
    sampled = '{"name": "get_weather", "arguments": {"city": "München"}}'
    ids = encode(tokenizer, f"<tool_call>\n{sampled}\n</tool_call>{TURN_END}")
    function = {"name": "get_weather", "arguments": {"city": "München"}}
    history = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, *TOOL_RESULT]
    observation = encode(tokenizer, "\n") + render(tokenizer, TOOL_RESULT)
    return _two_calls(tokenizer, "contiguous", _first_prompt(tokenizer), ids, render(tokenizer, history), observation)


def retokenized(tokenizer: Any) -> Case:
    prompt, (history, observation) = _first_prompt(tokenizer), _history(tokenizer, ANSWER)
    sampled = [*encode_bytewise(tokenizer, ANSWER), *encode(tokenizer, TURN_END)]
    return _two_calls(tokenizer, "different", prompt, sampled, history, observation)


def reasoning_stripped(tokenizer: Any) -> Case:
    prompt = _first_prompt(tokenizer)
    sampled = encode(tokenizer, f"<think>\nI know 天気.\n</think>\n\n{ANSWER}{TURN_END}")
    tokenizer.chat_template = STRIP_REASONING
    history = [*QUESTION, {"role": "assistant", "content": f"<think>\nI know 天気.\n</think>\n\n{ANSWER}"}, *MORE]
    return _two_calls(tokenizer, "different", prompt, sampled, render(tokenizer, history), [])


def truncated_and_closed(tokenizer: Any) -> Case:
    prompt, sampled = _first_prompt(tokenizer), encode(tokenizer, "It is mild")
    observation = encode(tokenizer, TURN_END) + _history(tokenizer, "")[1]
    second = prompt + sampled + observation
    return _two_calls(tokenizer, "truncated_generation", prompt, sampled, second, observation, "length")


def retry(tokenizer: Any) -> Case:
    prompt, sampled = _first_prompt(tokenizer), encode(tokenizer, ANSWER + TURN_END)
    return _two_calls(tokenizer, "retry", prompt, sampled, [*prompt], [])


def duplicate(tokenizer: Any) -> Case:
    prompt, sampled = _first_prompt(tokenizer), encode(tokenizer, ANSWER + TURN_END)
    return Case("duplicate", [call("first", prompt, sampled), call("first", [*prompt], [*sampled])], [])


def empty_generation(tokenizer: Any) -> Case:
    prompt = _first_prompt(tokenizer)
    observation = encode(tokenizer, TURN_END) + _history(tokenizer, "")[1]
    return _two_calls(tokenizer, "empty_generation", prompt, [], prompt + observation, observation)


CASES: dict[str, Callable[[Any], Case]] = {
    case.__name__: case
    for case in (
        contiguous,
        retokenized,
        reasoning_stripped,
        truncated_and_closed,
        retry,
        duplicate,
        empty_generation,
    )
}


def sample_of(*pieces: list[int] | Generation) -> TrainingSample:
    """The sample of a prompt and what follows it: ids that were not sampled, and calls, in order."""
    tokens, loss_mask, log_probs, versions = list[int](), list[int](), list[float](), list[str | None]()
    names = []
    for piece in pieces:
        if isinstance(piece, Generation):
            size = len(piece.sampled_ids)
            tokens += piece.sampled_ids
            loss_mask += [1] * size
            log_probs += piece.log_probs
            versions += [piece.weight_version] * size
            names += [piece.request_id] if piece.sampled_ids else []
        else:
            tokens += piece
            loss_mask += [0] * len(piece)
            log_probs += [0.0] * len(piece)
            versions += [None] * len(piece)
    start = loss_mask.index(1)
    return TrainingSample(
        tokens=tokens,
        response_length=len(tokens) - start,
        loss_mask=loss_mask[start:],
        rollout_log_probs=log_probs[start:],
        weight_versions=versions[start:],
        request_ids=names,
    )


def _first_prompt(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return render(tokenizer, QUESTION)


def _history(tokenizer: PreTrainedTokenizerFast, answer: str) -> tuple[list[int], list[int]]:
    """The second prompt after a text response, and its part after the end of the turn."""
    behind = encode(tokenizer, "\n") + render(tokenizer, MORE)
    return render(tokenizer, [*QUESTION, {"role": "assistant", "content": answer}, *MORE]), behind


def _two_calls(
    tokenizer: PreTrainedTokenizerFast,
    kind: str,
    prompt: list[int],
    sampled: list[int],
    second_prompt: list[int],
    observation: list[int],
    finish_reason: FinishReason = "stop",
) -> Case:
    first = call("first", prompt, sampled, finish_reason=finish_reason)
    return Case(kind, [first, call("second", second_prompt, encode(tokenizer, f"Fine.{TURN_END}"))], observation)
