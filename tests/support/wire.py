# SPDX-License-Identifier: Apache-2.0
"""What agents (``agents.py``) were answered, as SGLang and vLLM tell it: whole, streamed, aborted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, NamedTuple

from agents import Exchange, parsed
from streamed import Event, chunked, counted, generate_events, lines_of, of_sglang, pieces_of, with_ends
from truth import versions_of

from mis_ext.rollout.generation import Generation
from mis_ext.rollout.readers.server_sent_events import join_stream
from mis_ext.rollout.rollout_log import READERS

FORMATS = ("sglang", "sglang-chat", "vllm", "vllm-chat", "vllm-completions")
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class Wire(NamedTuple):
    """One request, and what came back.

    Attributes:
        format: One of ``FORMATS``.
        request: As it was sent.
        responses: SGLang's ``/generate`` gives one for each sample, the others one with all choices.
    """

    format: str
    request: dict[str, Any]
    responses: list[dict[str, Any]]

    def copy(self) -> Wire:
        """What arrives: JSON."""
        request, responses = json.loads(json.dumps([self.request, self.responses]))
        return Wire(self.format, request, responses)

    def read(self) -> list[Generation]:
        """What the reader makes of it: as many samples as were asked for."""
        samples = [(each, {}) for each in self.responses]
        if self.format != "sglang":
            num_asked = self.request.get("sampling_params", self.request)["n"]
            samples = [(self.responses[0], {"choice": choice}) for choice in range(num_asked)]
        return [READERS[self.format].read(self.request, response, **choice) for response, choice in samples]

    def read_lines(self, lines: list[str]) -> list[Generation]:
        """The same of a stream."""
        return self._replace(responses=[join_stream(lines)]).read()

    def ways(self) -> tuple[str, ...]:
        """How it may arrive; a stream of SGLang's ``/generate`` has one sample."""
        if self.format == "sglang":
            return ("whole", "cumulative", "incremental") if len(self.responses) == 1 else ("whole",)
        return ("whole", "stream")

    def sent(self, way: str) -> Wire:
        """What of it arrives in one of the ``ways()``, in its own objects."""
        whole = self.copy()
        is_less = self.format == "sglang-chat" and way == "stream"
        return whole._replace(responses=[*map(of_sglang, whole.responses)]) if is_less else whole

    def told(self, answers: list[Generation], way: str) -> list[Generation]:
        """What of the truth arrives; a stream of SGLang's chat names no version of the weights."""
        if (self.format, way) != ("sglang-chat", "stream"):
            return answers
        return [replace(answer, weight_version=None, weight_versions=None) for answer in answers]

    def events(self, way: str, rng: random.Random) -> list[Event]:
        """What a server streams, in one of the ``ways()``."""
        if self.format == "sglang":
            events = generate_events(self.responses[0])
            return pieces_of(events) if way == "incremental" else events
        if self.format == "sglang-chat":
            return counted(with_ends(chunked(of_sglang(self.responses[0]), rng)))
        return counted(chunked(self.responses[0], rng))

    def given_up(self, rng: random.Random) -> list[str]:
        """Lines of a stream that breaks off, or of which one is an error."""
        events = self.events(self.ways()[-1], rng)
        kept = events[: rng.randrange(len(events))]
        if rng.random() < 0.5:
            return lines_of(kept, end=False)
        return lines_of([*kept, {"error": {"message": "out of memory"}}])


def wire_of(exchange: Exchange, format: str, tokenizer: Any, rng: random.Random) -> Wire:
    """An exchange as a server of this format tells it; how ids are asked for is drawn.

    Args:
        exchange: What was sampled.
        format: One of ``FORMATS``.
        tokenizer: The server's.
        rng: Draws the options.
    """
    prompt, name = exchange.answers[0].prompt_ids, f"request {rng.randrange(10**9)}"
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": sum(len(answer.sampled_ids) for answer in exchange.answers),
    }
    if format == "sglang":
        request = {"input_ids": prompt, "return_logprob": True, "sampling_params": {"n": len(exchange.answers)}}
        responses = [
            {
                "text": tokenizer.decode(answer.sampled_ids),
                "output_ids": answer.sampled_ids,
                "meta_info": _meta_info(f"{name} {number}", answer, [None] * len(answer.sampled_ids), exchange),
            }
            for number, answer in enumerate(exchange.answers)
        ]
        return Wire(format, request, responses).copy()
    as_ids = rng.random() < 0.5
    make = {
        "sglang-chat": lambda *args: _sglang_choice(*args, exchange),
        "vllm": _vllm_choice,
        "vllm-chat": lambda *args: _chat_choice(*args, as_ids=as_ids),
        "vllm-completions": lambda *args: _completions_choice(*args, prompt, as_ids=as_ids),
    }[format]
    choices = []
    for index, answer in enumerate(exchange.answers):
        choice = {"index": index, **make(answer, tokenizer)}
        # A server that parses calls out of a text says so.
        called = not exchange.aborted and answer.finish_reason == "stop" and choice.get("message", {}).get("tool_calls")
        choice["finish_reason"] = "abort" if exchange.aborted else "tool_calls" if called else answer.finish_reason
        if called and "meta_info" in choice:
            choice["meta_info"]["finish_reason"]["type"] = "tool_calls"
        choices.append(choice)
    asked = {"n": len(choices), "logprobs": True, "return_token_ids": True}
    if format == "vllm":
        request = {"token_ids": prompt, "sampling_params": asked}
        kind = {"request_id": name, "output_mode": "tokens", "prompt_token_ids": rng.choice([prompt, None])}
    elif format == "vllm-completions":
        request, kind = {"prompt": prompt, **asked}, {"id": name, "object": "text_completion"}
    else:
        request, kind = {"messages": [], **asked}, {"id": name, "object": "chat.completion"}
        if format == "vllm-chat":
            kind["prompt_token_ids"] = prompt
        elif rng.random() < 0.5:
            kind["sglext"] = {"input_ids": prompt, "output_ids": [answer.sampled_ids for answer in exchange.answers]}
    return Wire(format, request, [{**kind, "choices": choices, "usage": usage}]).copy()


def _meta_info(name: str, answer: Generation, texts: list[str | None], exchange: Exchange) -> dict[str, Any]:
    ids = answer.sampled_ids
    reason = {"type": answer.finish_reason} | ({"length": len(ids)} if answer.finish_reason == "length" else {})
    return {
        "id": name,
        "finish_reason": ABORT if exchange.aborted else reason,
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": len(ids),
        "output_token_logprobs": [[*row] for row in zip(answer.log_probs, ids, texts, strict=True)],
        "weight_version": answer.weight_version,
        "weight_versions": _spans(answer),
    }


def _spans(answer: Generation) -> list[dict[str, Any]]:
    versions = versions_of(answer)
    starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    return [
        {"version": versions[start], "start": start, "end": end}
        for start, end in zip(starts, [*starts, len(versions)][1:], strict=True)
    ]


def _texts(answer: Generation, tokenizer: Any, *, as_ids: bool) -> list[str]:
    return [f"token_id:{each}" if as_ids else tokenizer.decode([each]) for each in answer.sampled_ids]


def _message(answer: Generation, tokenizer: Any) -> dict[str, Any]:
    reasoning, content, calls = parsed(tokenizer.decode(answer.sampled_ids, skip_special_tokens=True))
    for number, call in enumerate(calls):
        call["id"] = f"call {number}"
        call["function"] = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
    return {"role": "assistant", "content": content, "reasoning": reasoning or None, "tool_calls": calls}


def _content(answer: Generation, texts: list[str]) -> dict[str, Any]:
    rows = zip(texts, answer.log_probs, strict=True)
    return {"content": [{"token": text, "logprob": value, "bytes": [*text.encode()]} for text, value in rows]}


def _sglang_choice(answer: Generation, tokenizer: Any, exchange: Exchange) -> dict[str, Any]:
    texts = _texts(answer, tokenizer, as_ids=False)
    return {
        "message": _message(answer, tokenizer),
        "logprobs": _content(answer, texts),
        "prompt_token_ids": answer.prompt_ids,
        "response_token_ids": answer.sampled_ids,
        "meta_info": _meta_info("chat", answer, [*texts], exchange),
    }


def _chat_choice(answer: Generation, tokenizer: Any, *, as_ids: bool) -> dict[str, Any]:
    return {
        "message": _message(answer, tokenizer),
        "logprobs": _content(answer, _texts(answer, tokenizer, as_ids=as_ids)),
        "token_ids": answer.sampled_ids,
        "weight_versions": _spans(answer),
    }


def _completions_choice(answer: Generation, tokenizer: Any, prompt: list[int], *, as_ids: bool) -> dict[str, Any]:
    return {
        "text": tokenizer.decode(answer.sampled_ids),
        "logprobs": {"tokens": _texts(answer, tokenizer, as_ids=as_ids), "token_logprobs": answer.log_probs},
        "prompt_token_ids": prompt,
        "token_ids": answer.sampled_ids,
        "weight_versions": _spans(answer),
    }


def _vllm_choice(answer: Generation, tokenizer: Any) -> dict[str, Any]:
    rows = zip(answer.sampled_ids, answer.log_probs, strict=True)
    return {
        "logprobs": {"content": [{"token_id": each, "logprob": value} for each, value in rows]},
        "token_ids": answer.sampled_ids,
        "weight_versions": _spans(answer),
    }
