# SPDX-License-Identifier: Apache-2.0
"""Random agents, and a server whose log-probs tell their context: what a trainer may use can be computed exactly."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from tiny_tokenizers import KEEP_REASONING, PLAIN, STRIP_REASONING, TOKENIZERS, encode, encode_bytewise

from mis_ext.rollout.generation import Generation

TEMPLATES = {"keep": KEEP_REASONING, "strip": STRIP_REASONING, "plain": PLAIN}
WORDS = [
    "It rains. ",
    "天気",
    "🙂",
    " naïve",
    "\n",
    "  ",
    '{"a": [1, "b"]}',
    "[1,2]",
    "x = 1\n",
    "the weather",
    "Action: ",
]
TOOL_CALLS = [
    '<tool_call>\n{"name": "weather", "arguments": {"city":"Paris"}}\n</tool_call>',
    '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>',
]
OBSERVATIONS = ["17 degrees", "晴れ", "Go on.", '{"ok": true}', "Observation: y"]
# A log-prob is at most -1024: readers take -9999 for minus infinity.
CONTEXT_BITS, UNIQUE, SCALE = 30, 2.0**-20, 2.0**-20

Messages = list[dict[str, Any]]


class Exchange(NamedTuple):
    """One request, and the samples of its one prompt that came back."""

    answers: list[Generation]
    aborted: bool = False


class Asked(NamedTuple):
    """One call, and the messages that stand behind it."""

    call: Generation
    messages: Messages


def scores(ids: Iterable[int]) -> list[int]:
    """What the server thinks of each id in its context: a number that depends on all ids up to it."""
    state, found = 0, list[int]()
    for each in ids:
        state = (state * 6364136223846793005 + each + 1442695040888963407) & (2**64 - 1)
        found.append((state >> 20) & (2**CONTEXT_BITS - 1))
    return found


def score_of(log_prob: float) -> int:
    """The score that is in a log-prob; the rest of it says which of all sampled tokens it is."""
    return int(-log_prob / SCALE)


def parsed(text: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Reasoning, the rest of the text, and the tool calls as a parser of a server writes them."""
    reasoning, _, rest = text.rpartition("</think>")
    calls = [json.loads(found) for found in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", rest, re.DOTALL)]
    content = re.sub(r"<tool_call>\n.*?\n</tool_call>", "", rest, flags=re.DOTALL)
    return reasoning.removeprefix("<think>"), content, [{"type": "function", "function": call} for call in calls]


class Conversation:
    """The calls that some agents make under one id.

    Args:
        seed: Everything follows from it.
        tokenizer: A key of ``TOKENIZERS``.
        template: A key of ``TEMPLATES``.
    """

    def __init__(self, seed: int, tokenizer: str, template: str) -> None:
        self.random = random.Random(f"{seed} {tokenizer} {template}")
        self.tokenizer = tokenizer_of(tokenizer, template)
        self._reasons = template == "strip"
        self._closes = template != "plain"
        self._count = 0
        self.asked = list[Asked]()
        self.exchanges = list[Exchange]()
        agents = [[self.ask(*self.start())] for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
        for _ in range(self.random.randint(1, 7)):
            agent = self.random.choice(agents)
            move = self.random.choice(MOVES)(self, agent[-1])
            agent.append(move if isinstance(move, Asked) else self.ask(*move))

    @property
    def calls(self) -> list[Generation]:
        """In order."""
        return [each.call for each in self.asked]

    def ask(self, prompt: list[int], messages: Messages, *, answers: int = 1) -> Asked:
        """What the server makes of a prompt; the agent goes on from one of several answers."""
        if self.random.random() < 0.05:
            self.abort(prompt)
        calls = [self._call(prompt, str(len(self.asked) + number)) for number in range(answers)]
        self.exchanges.append(Exchange(calls))
        texts = [self.tokenizer.decode(call.sampled_ids, skip_special_tokens=True) for call in calls]
        self.asked += [
            Asked(call, [*messages, {"role": "assistant", "content": text}])
            for call, text in zip(calls, texts, strict=True)
        ]
        return self.random.choice(self.asked[-answers:])

    def log_again(self, before: Asked) -> Asked:
        """A call that is in the log already."""
        self.exchanges.append(Exchange([before.call]))
        self.asked.append(before)
        return before

    def abort(self, prompt: list[int]) -> list[int]:
        """What was sampled until the server gave the request up."""
        call = self._call(prompt, f"aborted {len(self.exchanges)}")
        self.exchanges.append(Exchange([call], aborted=True))
        return call.sampled_ids

    def _call(self, prompt: list[int], name: str) -> Generation:
        sampled, was_cut = self._sample()
        log_probs = []
        for score in scores([*prompt, *sampled])[len(prompt) :]:
            self._count += 1
            log_probs.append(-(score + self._count * UNIQUE) * SCALE)
        version = len(self.asked) // 2
        change = self.random.randrange(1, len(sampled)) if len(sampled) > 1 and self.random.random() < 0.1 else 0
        versions = [str(version + (position >= change)) for position in range(len(sampled))] if change else None
        return Generation(
            request_id=name,
            prompt_ids=prompt,
            sampled_ids=sampled,
            log_probs=log_probs,
            finish_reason="length" if was_cut else "stop",
            weight_version=str(version + 1 if change else version),
            weight_versions=versions,
        )

    def start(self) -> tuple[list[int], Messages]:
        """A system prompt and a question."""
        system = {"role": "system", "content": self.random.choice(["Think.", "Be brief."])}
        messages = [system, {"role": "user", "content": self._say()}]
        return self.render(messages), messages

    def _say(self) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randint(1, 4)))

    def _sample(self) -> tuple[list[int], bool]:
        """Ids, and whether the token limit ended them."""
        if self.random.random() < 0.05:
            return [], False
        ids = (
            encode(self.tokenizer, "<think>\nhm\n</think>\n\n") if self._reasons and self.random.random() < 0.5 else []
        )
        for _ in range(self.random.randint(1, 4)):
            word = self.random.choice(WORDS)
            ids += (
                encode_bytewise(self.tokenizer, word) if self.random.random() < 0.15 else encode(self.tokenizer, word)
            )
        if self.random.random() < 0.15:
            for call in self.random.sample(TOOL_CALLS, self.random.randint(1, 2)):
                ids += encode(self.tokenizer, call)
        if self.random.random() < 0.1:
            return ids[: self.random.randint(1, len(ids))], True
        return [*ids, self.tokenizer.eos_token_id] if self._closes else ids, False

    def render(self, messages: Messages) -> list[int]:
        """The prompt of a client that knows texts only."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return encode(self.tokenizer, text)

    def observe(self, messages: Messages) -> Messages:
        """The messages and what comes next."""
        return [*messages, {"role": "user", "content": self.random.choice(OBSERVATIONS) + self._say()}]


@cache
def tokenizer_of(name: str, template: str) -> Any:
    """One object for each pair."""
    return TOKENIZERS[name](TEMPLATES[template])


def append(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """A client that keeps ids."""
    messages = world.observe(last.messages)
    closing = "" if last.call.sampled_ids[-1:] == [world.tokenizer.eos_token_id] else "<|im_end|>"
    return [
        *last.call.prompt_ids,
        *last.call.sampled_ids,
        *encode(world.tokenizer, closing + "\n"),
        *world.render(messages[-1:]),
    ], messages


def rewrite(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """A client that keeps texts."""
    messages = world.observe(last.messages)
    return world.render(messages), messages


def strip(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """A client that strips what it keeps."""
    messages = [each | {"content": each["content"].strip()} for each in world.observe(last.messages)]
    return world.render(messages), messages


def trim(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """The oldest turns are left out."""
    messages = world.observe(last.messages)
    messages = [messages[0], *messages[min(3, len(messages) - 1) :]]
    return world.render(messages), messages


def summarise(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """The conversation so far becomes a text."""
    messages = [last.messages[0], {"role": "user", "content": f"So far: {last.messages[-1]['content'][:9]}"}]
    return world.render(messages), messages


def fork(world: Conversation, _: Asked) -> tuple[list[int], Messages]:
    """Another branch from any call."""
    return world.random.choice([append, rewrite])(world, world.random.choice(world.asked))


def retry(world: Conversation, _: Asked) -> tuple[list[int], Messages]:
    """The prompt of any call once more."""
    before = world.random.choice(world.asked)
    return [*before.call.prompt_ids], before.messages[:-1]


def retry_often(world: Conversation, last: Asked) -> Asked:
    """Several answers to one request."""
    return world.ask(*retry(world, last), answers=world.random.randint(2, 3))


def repeat(world: Conversation, _: Asked) -> Asked:
    """Any call, logged twice."""
    return world.log_again(world.random.choice(world.asked))


def resume(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """The server gives the request up, and the client goes on from what was sampled until then."""
    prompt, messages = append(world, last)
    return [*prompt, *world.abort(prompt)], messages


def call_tools(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """A client that keeps what a server parsed: the template writes reasoning and tool calls anew."""
    messages = [*last.messages]
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and "tool_calls" not in message:
            _, content, calls = parsed(message["content"])
            messages[number] = {"role": "assistant", "content": content, "tool_calls": calls}
    results = [{"role": "tool", "content": world.random.choice(OBSERVATIONS)} for _ in messages[-1]["tool_calls"]]
    return world.render([*messages, *results]), [*messages, *results]


def edit(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """Any message has another word."""
    messages = world.observe(last.messages)
    number = world.random.randrange(len(messages) - 1)
    messages[number] = messages[number] | {"content": "Edited: " + messages[number]["content"]}
    return world.render(messages), messages


def reorder(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """Two messages change places."""
    messages = world.observe(last.messages)
    i, j = world.random.sample(range(len(messages)), 2)
    messages[i], messages[j] = messages[j], messages[i]
    return world.render(messages), messages


def go_on(world: Conversation, last: Asked) -> tuple[list[int], Messages]:
    """Something is appended within the turn, of which the client may have trimmed the end."""
    ids, text = [*last.call.sampled_ids], world.tokenizer.decode(last.call.sampled_ids, skip_special_tokens=True)
    if world.random.random() < 0.5:
        ids = encode(world.tokenizer, text.rstrip())
    elif ids[-1:] == [world.tokenizer.eos_token_id]:
        del ids[-1:]
    messages = [*last.messages[:-1], {"role": "assistant", "content": text}]
    return [*last.call.prompt_ids, *ids, *encode(world.tokenizer, " Observation: y\n")], messages


MOVES = (
    *(append, append, append, rewrite, rewrite, strip, trim, summarise, fork, retry, retry_often),
    *(repeat, edit, reorder, go_on, resume, call_tools),
)
