"""An episode between SGLang and an environment, in token ids: what was sampled is sent back as it was sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from mis_ext.rollout.custom_generate.host import ChatTokenizer, Settings, host_name, post_json
from mis_ext.rollout.generation import AbortedRequest, Generation, MalformedResponse
from mis_ext.rollout.readers.servers import read_sglang_generate

# With these the router sends an episode to the server that has its prefix cached.
_STICKY_POLICIES = ("consistent_hashing", "manual")
# Stands for an assistant's turn, to find where the template's text after such a turn begins.
_MARK = "\N{REFERENCE MARK}assistant\N{REFERENCE MARK}"


class Turn(NamedTuple):
    """A turn of the model, sampled in several requests where the server aborted some.

    Attributes:
        number: Turns of the model before it.
        num_sampled: Tokens of it so far.
        text: Its text so far.
        ended: The model ended it, and the environment has not answered yet.
        end_id: The token with which the model ended it; None where it did not, or with a stop string.
    """

    number: int = 0
    num_sampled: int = 0
    text: str = ""
    ended: bool = False
    end_id: int | None = None

    def after(self, call: Call) -> Turn:
        """The turn with what one more request sampled."""
        sampled, match = call.generation.sampled_ids, call.generation.stop_match
        ended = not call.aborted and call.generation.finish_reason != "length"
        end_id = sampled[-1] if sampled and match == sampled[-1] else None
        return Turn(self.number, self.num_sampled + len(sampled), self.text + call.text, ended, end_id)


class Observation(NamedTuple):
    """What the environment said behind a turn, with the template's text around: text and token ids."""

    text: str = ""
    token_ids: Sequence[int] = ()


class Call(NamedTuple):
    """One request and what came of it.

    Attributes:
        generation: What was read from the response; of an aborted request, what was sampled until then.
        text: The response's text.
        meta_info: The response's.
        observation: What the environment said before it.
    """

    generation: Generation
    text: str
    meta_info: Mapping[str, Any]
    observation: Observation

    @property
    def aborted(self) -> bool:
        """Whether the server gave the request up."""
        return _was_aborted(self.meta_info)


class Ended(NamedTuple):
    """An episode of one sample that is over, or was aborted.

    Attributes:
        calls: All requests, in order; none if there was no room for a token.
        turn: The last turn of the model.
        cut: The context or the limit of turns ended it, and not the model, the server or the environment.
        aborted: The server gave a request up, or the host its rollout.
        unsent: What the environment said since the last request, where the host gave up its rollout before the next.
    """

    calls: list[Call]
    turn: Turn
    cut: bool = False
    aborted: bool = False
    unsent: Observation = Observation()


@dataclass(frozen=True)
class Episode:
    """What does not change from turn to turn; see :func:`mis_ext.rollout.generate` for all of it."""

    args: Any
    sample: Any
    sampling_params: Mapping[str, Any]
    settings: Settings
    tokenizer: ChatTokenizer
    max_context: int | None
    is_aborted: Callable[[], bool]
    template_options: Callable[[], Mapping[str, Any]]

    async def run(self, prompt_ids: list[int], turn: Turn) -> Ended:
        """The episode from a prompt on to its end.

        Args:
            prompt_ids: Everything before the first request, a part of the model's turn included.
            turn: The turn that the first request samples, or that the environment has not answered yet.
        """
        step = self.settings.load_environment()
        calls: list[Call] = []
        known_ids, observation = prompt_ids, Observation()
        while True:
            if not turn.ended:
                if self.is_aborted():
                    return Ended(calls, turn, aborted=True, unsent=observation)
                max_new_tokens = self.sampling_params["max_new_tokens"] - turn.num_sampled
                if self.max_context is not None:
                    max_new_tokens = min(max_new_tokens, self.max_context - len(known_ids))
                if max_new_tokens <= 0:
                    return Ended(calls, turn, cut=True)
                call = await self._request(known_ids, turn, max_new_tokens, observation)
                calls.append(call)
                known_ids, turn = known_ids + call.generation.sampled_ids, turn.after(call)
                if not turn.ended:
                    return Ended(calls, turn, aborted=call.aborted)
            # The model has ended its turn; what the environment says of it comes before the next.
            if step is None:
                return Ended(calls, turn)
            if self.is_aborted():
                return Ended(calls, turn, aborted=True)
            started = time.monotonic()
            said = await step(self.sample, turn.text)
            self.sample.non_generation_time += time.monotonic() - started
            if said is None:
                return Ended(calls, turn)
            if turn.number + 1 >= self.settings.max_turns:
                return Ended(calls, turn, cut=True)
            text = observation_text(self.tokenizer, said, turn.end_id, self.template_options)
            observation = Observation(text, self.tokenizer.encode(text, add_special_tokens=False))
            known_ids, turn = [*known_ids, *observation.token_ids], Turn(turn.number + 1)

    async def _request(self, prompt_ids: list[int], turn: Turn, max_new_tokens: int, observation: Observation) -> Call:
        params = {**self.sampling_params, "max_new_tokens": max_new_tokens}
        request = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
        policy = getattr(self.args, "router_policy", None) or getattr(self.args, "sglang_router_policy", None)
        key = getattr(self.sample, "routing_key", None) or getattr(self.sample, "session_id", None)
        response = await post_json(
            f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}/generate",
            request,
            host=host_name(self.sample),
            max_attempts=self.settings.max_attempts,
            headers={"X-SMG-Routing-Key": key} if key and policy in _STICKY_POLICIES else {},
        )
        request_id = f"sample {self.sample.index}, turn {turn.number}"
        try:
            generation = read_sglang_generate(request, response, request_id=request_id)
        except AbortedRequest:
            if not _was_aborted(response.get("meta_info") or {}):
                raise
            generation = _read_aborted(request, response, request_id)
        if generation.text is None:
            raise MalformedResponse(request_id, "response.text is missing: start SGLang with its tokenizer")
        return Call(generation, generation.text, response["meta_info"], observation)


def _was_aborted(meta_info: Mapping[str, Any]) -> bool:
    """Whether a request that was being sampled, or waited for it, was given up; an error of the server is none."""
    reason = meta_info.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type") == "abort"


def _read_aborted(request: Mapping[str, Any], response: Mapping[str, Any], request_id: str) -> Generation:
    """What was sampled until the abort: as good as what is sampled up to a token limit."""
    meta_info, ids = response["meta_info"], request["input_ids"]
    length = len(meta_info.get("output_token_logprobs") or [])
    if not length:
        return Generation(
            request_id=request_id, prompt_ids=ids, sampled_ids=[], log_probs=[], finish_reason="length", text=""
        )
    # A request that was retracted, and aborted while it waited to go on, has no count of its prompt.
    cut = {"prompt_tokens": len(ids), **meta_info, "finish_reason": {"type": "length", "length": length}}
    return read_sglang_generate(request, {**response, "meta_info": cut}, request_id=request_id)


def encode_prompt(
    tokenizer: ChatTokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    template_options: Callable[[], Mapping[str, Any]],
) -> list[int]:
    """Token ids of a sample's prompt: a text, to which the host has applied the template, as it stands; or messages."""
    if not isinstance(prompt, str):
        prompt = _render(tokenizer, prompt, template_options())
    return tokenizer.encode(prompt, add_special_tokens=False)


def observation_text(
    tokenizer: ChatTokenizer,
    observation: str | Sequence[Mapping[str, Any]],
    end_id: int | None,
    template_options: Callable[[], Mapping[str, Any]],
) -> str:
    """What follows a sampled turn up to where the next one begins.

    Messages are rendered behind an assistant's turn that stands for the sampled one; a text is returned as it stands.
    The end of that turn is left out where the model sampled it itself, as ``end_id``.

    Raises:
        ValueError: The template does not render the turn that stands for the sampled one.
    """
    if isinstance(observation, str):
        return observation
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}, *observation]
    rendered = _render(tokenizer, turns, template_options())
    _, mark, behind = rendered.partition(_MARK)
    if not mark:
        raise ValueError(
            "the chat template does not render an assistant's content as it stands: let the environment return the "
            f"text to append, with the template's tokens, in place of messages; it rendered {rendered!r}"
        )
    return behind if end_id is None else behind.removeprefix(tokenizer.decode([end_id], skip_special_tokens=False))


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any]
) -> str:
    rendered = tokenizer.apply_chat_template(
        messages, **{"add_generation_prompt": True, **template_options, "tokenize": False}
    )
    return cast(str, rendered)
