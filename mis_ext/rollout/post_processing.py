# SPDX-License-Identifier: Apache-2.0
"""Detection of changes to the text of a generation after sampling, from the texts that servers may decode."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import takewhile

from mis_ext.rollout.generation import REPLACEMENT, Generation, Tokenizer


class PostProcessingKind(str, Enum):
    """Difference between the used and the sampled text."""

    EXACT = "exact"
    STOP_TRIMMED = "stop_trimmed"
    SPECIAL_TOKENS_STRIPPED = "special_tokens_stripped"
    PREFIX_TRUNCATED = "prefix_truncated"
    SUFFIX_ADDED = "suffix_added"
    PREFIX_REMOVED = "prefix_removed"
    EDITED = "edited"
    UNDECIDABLE = "undecidable"


_CURES = {
    PostProcessingKind.EXACT: "",
    PostProcessingKind.STOP_TRIMMED: (
        "the sampled tokens are correct; to include the end in the text: SGLang no_stop_trim: true, vLLM "
        "include_stop_str_in_output: true, and skip_special_tokens: false"
    ),
    PostProcessingKind.SPECIAL_TOKENS_STRIPPED: (
        "the sampled tokens are correct; to include all of them in the text: skip_special_tokens: false (and SGLang "
        "no_stop_trim: true)"
    ),
    PostProcessingKind.PREFIX_TRUNCATED: (
        "do not cut the text: pass the string to cut at as a stop string, with SGLang no_stop_trim: true or vLLM "
        "include_stop_str_in_output: true, so that the server samples nothing after it"
    ),
    PostProcessingKind.SUFFIX_ADDED: (
        "keep the raw text; the added text was not sampled: append its tokens as an observation, with loss_mask 0. "
        "A stop string that is added back belongs in the raw text: SGLang no_stop_trim: true, vLLM "
        "include_stop_str_in_output: true"
    ),
    PostProcessingKind.PREFIX_REMOVED: (
        "keep the raw text for training and for the next turn; remove reasoning only for display (start the server "
        "without a reasoning parser, and do not strip the text)"
    ),
    PostProcessingKind.EDITED: "keep the raw text and the sampled ids; append the text of the environment",
    PostProcessingKind.UNDECIDABLE: (
        "compare token ids, not text: make the server return them, and pass them on instead of the text"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PostProcessing:
    """Result of ``detect_post_processing``.

    Attributes:
        kind: The class.
        detail: The difference, with the text around it.
    """

    kind: PostProcessingKind
    detail: str

    @property
    def cure(self) -> str:
        """The fix in the agent's loop; empty if none is needed."""
        return _CURES[self.kind]

    @property
    def keeps_ids(self) -> bool:
        """True if the text represents all sampled tokens, so that they can be trained."""
        kinds = PostProcessingKind
        return self.kind in (kinds.EXACT, kinds.STOP_TRIMMED, kinds.SPECIAL_TOKENS_STRIPPED)


def detect_post_processing(
    generation: Generation, response_text: str, tokenizer: Tokenizer, *, stop: Sequence[str] = ()
) -> PostProcessing:
    """Determine how ``response_text`` follows from the text of the sampled tokens.

    Returns the first explanation of the whole text: no change; the server omitted the end (stop string or end token) or
    special tokens; the text was cut, was extended, or lost its beginning; otherwise an edit. A text with two
    explanations of the third group is undecidable. So is a text that differs only in characters that depend on the
    decoder.

    Args:
        generation: The sampled tokens.
        response_text: The text that the agent used, or that was scored.
        tokenizer: The server's tokenizer.
        stop: Stop strings of the request, if the server does not report the matched one.

    Raises:
        TypeError: ``response_text`` is not a ``str``.
    """
    if not isinstance(response_text, str):
        raise TypeError(f"response_text must be a str, got {type(response_text).__name__}")
    kinds = PostProcessingKind
    plain = []
    for decoding in _decodings(generation, tokenizer, skips_special=False):
        if response_text == decoding.text:
            return PostProcessing(kind=kinds.EXACT, detail="the text is that of the sampled tokens")
        plain.append((decoding, _trimmed(decoding, generation, tokenizer, stop)))
    for _, trimmed in plain:
        if response_text in trimmed:
            detail = f"the text ends before or with {trimmed[response_text]}, but the sampled tokens go on"
            return PostProcessing(kind=kinds.STOP_TRIMMED, detail=detail)
    stripped = []
    for decoding in _decodings(generation, tokenizer, skips_special=True):
        stripped.append((decoding, _trimmed(decoding, generation, tokenizer, stop)))
        if response_text in (decoding.text, *stripped[-1][1]):
            return PostProcessing(kind=kinds.SPECIAL_TOKENS_STRIPPED, detail="special tokens are not in the text")
    whole = [decoding for decoding, _ in (*plain, *stripped)]
    # The texts that may have been extended or shortened.
    bodies = {body for decoding, trimmed in (*plain, *stripped) for body in (decoding.text, *trimmed)}
    return _classify_change(response_text, whole, sorted(bodies, key=len, reverse=True))


def _classify_change(text: str, whole: Sequence[_Decoding], bodies: Sequence[str]) -> PostProcessing:
    kinds = PostProcessingKind
    # Servers that decode during sampling hold back a character until its last byte.
    shown = [*bodies, *(decoding.whole_text for decoding in whole)]
    if any(text.replace(REPLACEMENT, "") == candidate.replace(REPLACEMENT, "") for candidate in shown):
        detail = "the text differs only in bytes of incomplete characters, which the decoder or an agent omits"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    begins = (sampled for decoding in whole for sampled in (decoding.text, decoding.whole_text))
    cut = next((sampled for sampled in begins if sampled.startswith(text)), None)
    removed = next((body for body in bodies if text and body.endswith(text)), None)
    if cut is not None and text.endswith(REPLACEMENT):
        detail = "the text was cut inside an incomplete character: the token of the cut depends on the decoder"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    if cut is not None and removed:
        detail = f"the sampled text both begins and ends with {_show(text)}"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    if cut is not None:
        end = text if len(text) <= 40 else f"…{text[-40:]}"
        detail = f"the text was cut after {end!r}; {_show(cut[len(text) :])} was sampled after it"
        return PostProcessing(kind=kinds.PREFIX_TRUNCATED, detail=detail)
    if removed:
        detail = f"the text lacks its beginning {_show(removed.removesuffix(text))}"
        return PostProcessing(kind=kinds.PREFIX_REMOVED, detail=detail)
    for body in bodies:
        if text.startswith(body):
            return PostProcessing(kind=kinds.SUFFIX_ADDED, detail=f"{_show(text[len(body) :])} was not sampled")
    num_equal = ((sum(takewhile(bool, map(operator.eq, text, each.text))), each.text) for each in whole)
    position, closest = max(num_equal)
    shown_there = f"{_show(closest[position:])} was sampled, but the text has {_show(text[position:])}"
    return PostProcessing(kind=kinds.EDITED, detail=f"the first difference is at character {position}: {shown_there}")


def _show(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


class _Decoding:
    """Sampled tokens as text, decoded in one of the ways of servers.

    With ``context``, ids before the sampled ids, the tokens are decoded after it, like in servers that decode during
    sampling. Some decoders drop the space at the beginning of a text.
    """

    def __init__(self, ids: list[int], tokenizer: Tokenizer, *, skips_special: bool, context: Sequence[int]) -> None:
        self._tokenizer, self._skips_special = tokenizer, skips_special
        self._ids, self._context = ids, [*context]
        self._context_text = self._decode(self._context)
        decoded = self._decode([*self._context, *ids])
        self.is_possible = decoded.startswith(self._context_text)
        self.text = decoded[len(self._context_text) :]

    def without_last(self, num_tokens: int) -> str:
        """The text without the last ``num_tokens`` tokens."""
        ids = self._ids[: len(self._ids) - num_tokens]
        return self._decode([*self._context, *ids])[len(self._context_text) :]

    @cached_property
    def whole_text(self) -> str:
        """The text without an incomplete last character."""
        # A character has at most four bytes.
        texts = (self.without_last(n) for n in range(min(4, len(self._ids) + 1)))
        return next((text for text in texts if not text.endswith(REPLACEMENT)), self.text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special) if ids else ""


def _decodings(generation: Generation, tokenizer: Tokenizer, *, skips_special: bool) -> Iterator[_Decoding]:
    """The decodings with different texts, first alone, then after the end of the prompt."""
    alone = _Decoding(generation.sampled_ids, tokenizer, skips_special=skips_special, context=())
    yield alone
    context = generation.prompt_ids[-8:]
    behind = _Decoding(generation.sampled_ids, tokenizer, skips_special=skips_special, context=context)
    if behind.is_possible and behind.text != alone.text:
        yield behind


def _trimmed(decoding: _Decoding, generation: Generation, tokenizer: Tokenizer, stop: Sequence[str]) -> dict[str, str]:
    """The texts without the end that a server may have returned, and the end of each."""
    if generation.finish_reason == "length" or not generation.sampled_ids:
        return {}
    trimmed = {}
    last, match = generation.sampled_ids[-1], generation.stop_match
    without_last = decoding.without_last(1)
    shown, stripped = (tokenizer.decode([last], skip_special_tokens=skips) for skips in (False, True))
    is_special = match is None and shown != "" and stripped == ""
    if match == last or is_special:
        trimmed[without_last] = f"the end token {last}"
    for string in [match] if isinstance(match, str) else (stop if match is None else ()):
        position = decoding.text.find(string)
        # The server stops at the token that completes the stop string.
        if position >= 0 and string not in without_last:
            for end in (position, position + len(string)):
                trimmed[decoding.text[:end]] = f"the stop string {string!r}"
    return trimmed
