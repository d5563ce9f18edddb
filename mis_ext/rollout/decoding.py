"""The texts that a server may have made of sampled token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property

from mis_ext.rollout.generation import Generation, Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no whole character."""

_CONTEXT_LENGTH = 8
_LONGEST_CHARACTER = 4


class Decoding:
    """Sampled tokens as text, in one of the ways in which servers decode.

    Args:
        generation: What was sampled.
        tokenizer: The server's.
        skips_special: Whether special tokens have no text.
        in_context: Whether the tokens are decoded behind the end of the prompt, as servers do that decode while they
            sample: some decoders drop the space that a text begins with.
    """

    def __init__(self, generation: Generation, tokenizer: Tokenizer, *, skips_special: bool, in_context: bool) -> None:
        self.skips_special = skips_special
        self._tokenizer = tokenizer
        self._ids = generation.sampled_ids
        self.num_tokens = len(self._ids)
        self._context = [*generation.prompt_ids[-_CONTEXT_LENGTH:]] if in_context else []
        self._context_text = self._decode(self._context) if self._context else ""
        decoded = self._decode([*self._context, *self._ids])
        self.is_possible = decoded.startswith(self._context_text)
        self.text = decoded[len(self._context_text) :]

    @cached_property
    def whole_text(self) -> str:
        """The text without a last character that was cut."""
        return self.first_whole(self.num_tokens)

    def first(self, num_tokens: int) -> str:
        """The text of the first ``num_tokens`` sampled tokens."""
        if num_tokens == self.num_tokens:
            return self.text
        return self._decode([*self._context, *self._ids[:num_tokens]])[len(self._context_text) :]

    def first_whole(self, num_tokens: int) -> str:
        """The text of the first ``num_tokens`` sampled tokens, or of up to three fewer so that no character is cut."""
        texts = (self.first(n) for n in range(num_tokens, max(num_tokens - _LONGEST_CHARACTER, -1), -1))
        return next((text for text in texts if not text.endswith(UNKNOWN)), self.first(num_tokens))

    def tokens_within(self, text: str) -> tuple[int, str]:
        """How many of the first tokens lie within ``text``, with which the sampled text begins; and their text."""
        enough = bisect_left(range(self.num_tokens + 1), len(text), key=lambda n: len(self.first_whole(n)))
        num_tokens = min(enough, self.num_tokens)
        while not text.startswith(inside := self.first(num_tokens)):
            num_tokens -= 1
        return num_tokens, inside

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self.skips_special) if ids else ""


def decodings(generation: Generation, tokenizer: Tokenizer, *, skips_special: bool) -> Iterator[Decoding]:
    """The decodings with different texts, alone first, then in context."""
    alone = Decoding(generation, tokenizer, skips_special=skips_special, in_context=False)
    yield alone
    behind = Decoding(generation, tokenizer, skips_special=skips_special, in_context=True)
    if behind.is_possible and behind.text != alone.text:
        yield behind


class Endings:
    """What a decoding's text is without the end that a server leaves out.

    Args:
        decoding: The text of all sampled tokens.
        generation: What was sampled.
        tokenizer: The server's.
        stop: Stop strings of the request, where the server does not say which one matched.
    """

    def __init__(self, decoding: Decoding, generation: Generation, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.decoding = decoding
        self.trimmed: dict[str, str] = {}
        """Text that the server may have returned: what it ends at."""
        self.bodies = {decoding.text}
        """The texts that something may have been added to, or removed from."""
        if generation.finish_reason == "length" or not generation.sampled_ids:
            return
        last, match = generation.sampled_ids[-1], generation.stop_match
        without_last = decoding.first(decoding.num_tokens - 1)
        texts = [tokenizer.decode([last], skip_special_tokens=skips) for skips in (False, True)]
        is_special = match is None and texts[0] != "" and texts[1] == ""
        if match == last or is_special:
            self.trimmed[without_last] = f"the end token {last}"
        for string in [match] if isinstance(match, str) else (stop if match is None else ()):
            position = decoding.text.find(string)
            # The server stops at the token that completes it.
            if position >= 0 and string not in without_last:
                for end in (position, position + len(string)):
                    self.trimmed[decoding.text[:end]] = f"the stop string {string!r}"
        self.bodies.update(self.trimmed)
