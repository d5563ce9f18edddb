"""What was done to the text of a generation after it was sampled: by the texts that servers may decode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from mis_ext.rollout.generation import REPLACEMENT, Generation, Tokenizer


class PostProcessingKind(str, Enum):
    """How the text that was used differs from the text that was sampled."""

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
        "the sampled tokens are right; to have the end in the text too: SGLang no_stop_trim: true, vLLM "
        "include_stop_str_in_output: true, and skip_special_tokens: false"
    ),
    PostProcessingKind.SPECIAL_TOKENS_STRIPPED: (
        "the sampled tokens are right; to have them all in the text: skip_special_tokens: false (and SGLang "
        "no_stop_trim: true)"
    ),
    PostProcessingKind.PREFIX_TRUNCATED: (
        "do not cut the text: give the string to cut at as stop string, with SGLang no_stop_trim: true or vLLM "
        "include_stop_str_in_output: true, so that the server samples nothing after it"
    ),
    PostProcessingKind.SUFFIX_ADDED: (
        "keep the raw text; what is added was not sampled: append its tokens as an observation, with loss_mask 0. A "
        "stop string that is put back belongs in the raw text: SGLang no_stop_trim: true, vLLM "
        "include_stop_str_in_output: true"
    ),
    PostProcessingKind.PREFIX_REMOVED: (
        "keep the raw text for training and for the next turn; take reasoning away only for display (start the server "
        "without a reasoning parser, and do not strip the text)"
    ),
    PostProcessingKind.EDITED: "keep the raw text and the sampled ids; append what the environment says",
    PostProcessingKind.UNDECIDABLE: (
        "compare token ids, not text: have the server return them, and pass them on instead of the text"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PostProcessing:
    """What ``detect_post_processing`` found.

    Attributes:
        kind: The class.
        detail: What differs, with the text around it.
        num_kept: Sampled tokens whose whole text was kept, from the first one on; None where that says nothing.
        lost_text: Text that was kept, of a token that was cut in two: this token is not among ``num_kept``.
    """

    kind: PostProcessingKind
    detail: str
    num_kept: int | None = None
    lost_text: str = ""

    @property
    def cure(self) -> str:
        """What to change in the agent's loop, empty where nothing need be."""
        return _CURES[self.kind]

    @property
    def keeps_ids(self) -> bool:
        """Whether the text stands for all sampled tokens, so that they can be trained as they are."""
        kinds = PostProcessingKind
        return self.kind in (kinds.EXACT, kinds.STOP_TRIMMED, kinds.SPECIAL_TOKENS_STRIPPED)

    @property
    def is_fixable(self) -> bool:
        """Whether ``fix`` gives a generation that the text stands for."""
        return self.kind is PostProcessingKind.PREFIX_TRUNCATED

    def fix(self, generation: Generation) -> Generation:
        """The generation without the tokens behind the cut: ids and log-probs, hence the mask, end at the same token.

        A token that was cut in two is not kept: its log-prob is of its whole text. The result ends as if by a token
        limit, since its last token is not one that was sampled to end the turn.

        Args:
            generation: The one that was given to ``detect_post_processing``.

        Raises:
            ValueError: The text is not a first part of what was sampled.
        """
        if not self.is_fixable or self.num_kept is None:
            raise ValueError(f"only a text cut at its end can be fixed, this is {self.kind.value}: {self.detail}")
        if self.num_kept >= len(generation.sampled_ids):
            raise ValueError(
                f"request {generation.request_id!r}: {len(generation.sampled_ids)} sampled tokens, of which "
                f"{self.num_kept} were kept: this is another generation"
            )
        versions = generation.weight_versions and generation.weight_versions[: self.num_kept]
        return replace(
            generation,
            weight_version=versions[-1] if versions else generation.weight_version,
            weight_versions=versions or None,
            sampled_ids=generation.sampled_ids[: self.num_kept],
            log_probs=generation.log_probs[: self.num_kept],
            kept_ids=generation.kept_ids and generation.kept_ids[: self.num_kept],
            finish_reason="length",
            stop_match=None,
            text=None,
        )


def detect_post_processing(
    generation: Generation, response_text: str, tokenizer: Tokenizer, *, stop: Sequence[str] = ()
) -> PostProcessing:
    """How ``response_text`` came from the text of the sampled tokens.

    The first of these that explains the whole text: nothing was done; the server left out the end (stop string or end
    token) or special tokens; the text was cut, completed, or lost its beginning; anything else is an edit. Text that
    two of the last explain, and text that differs only where a decoder decides, is undecidable.

    Args:
        generation: What was sampled.
        response_text: The text that the agent went on with, or that was scored.
        tokenizer: The server's.
        stop: Stop strings of the request, where the server does not say which one matched.

    Raises:
        TypeError: ``response_text`` is no text.
    """
    if not isinstance(response_text, str):
        raise TypeError(f"response_text must be a str, got {type(response_text).__name__}")
    kinds = PostProcessingKind
    plain = []
    for decoding in decodings(generation, tokenizer, skips_special=False):
        if response_text == decoding.text:
            return PostProcessing(kind=kinds.EXACT, detail="the text is that of the sampled tokens")
        plain.append(decoding)
    endings = [Endings(decoding, generation, tokenizer, stop) for decoding in plain]
    for ending in endings:
        if response_text in ending.trimmed:
            detail = f"the text ends before or with {ending.trimmed[response_text]}, the sampled tokens go on"
            return PostProcessing(kind=kinds.STOP_TRIMMED, detail=detail)
    stripped = decodings(generation, tokenizer, skips_special=True)
    for ending in [Endings(decoding, generation, tokenizer, stop) for decoding in stripped]:
        if response_text in (ending.decoding.text, *ending.trimmed):
            return PostProcessing(kind=kinds.SPECIAL_TOKENS_STRIPPED, detail="special tokens are not in the text")
        endings.append(ending)
    return _classify_change(response_text, endings, tokenizer)


def _classify_change(text: str, endings: Sequence[Endings], tokenizer: Tokenizer) -> PostProcessing:
    kinds = PostProcessingKind
    whole = [ending.decoding for ending in endings]
    bodies = sorted({body for ending in endings for body in ending.bodies}, key=len, reverse=True)
    # Servers that decode while they sample hold back a character until its last byte.
    shown = [*bodies, *(decoding.whole_text for decoding in whole)]
    if any(text.replace(REPLACEMENT, "") == candidate.replace(REPLACEMENT, "") for candidate in shown):
        detail = "the text differs only where bytes are no whole character: the decoder leaves such out, or an agent"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    begins = [(decoding, shown) for decoding in whole for shown in (decoding.text, decoding.whole_text)]
    cut = next(((decoding, shown) for decoding, shown in begins if shown.startswith(text)), None)
    removed = next((body for body in bodies if text and body.endswith(text)), None)
    if cut and text.endswith(REPLACEMENT):
        detail = "the text was cut where bytes are no whole character: which token that is depends on the decoder"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    if cut and removed:
        detail = f"{_show(text)} is both how the sampled text begins and how it ends"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    if cut:
        return _cut_at_token(text, *cut)
    if removed:
        lost = removed[: len(removed) - len(text)]
        return PostProcessing(kind=kinds.PREFIX_REMOVED, detail=f"the text lacks its beginning {_show(lost)}")
    for body in bodies:
        if text.startswith(body):
            return PostProcessing(kind=kinds.SUFFIX_ADDED, detail=f"{_show(text[len(body) :])} was not sampled")
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    if cleans_up and any("".join(text.split()) == "".join(body.split()) for body in bodies):
        detail = "the text differs only in spaces: the decoder cleans such up, or an agent did"
        return PostProcessing(kind=kinds.UNDECIDABLE, detail=detail)
    return PostProcessing(kind=kinds.EDITED, detail=_first_difference(text, [decoding.text for decoding in whole]))


def _cut_at_token(text: str, decoding: Decoding, sampled: str) -> PostProcessing:
    num_kept, inside = decoding.tokens_within(text)
    end = text if len(text) <= 40 else f"…{text[-40:]}"
    detail = f"the text was cut after {end!r}; {_show(sampled[len(text) :])} was sampled after it"
    lost = text[len(inside) :]
    if lost:
        detail += f"; the cut is inside token {num_kept}, of which {_show(lost)} was kept"
    return PostProcessing(kind=PostProcessingKind.PREFIX_TRUNCATED, detail=detail, num_kept=num_kept, lost_text=lost)


def _first_difference(text: str, sampled: Sequence[str]) -> str:
    position, closest = max((_num_shared(text, candidate), candidate) for candidate in sampled)
    return (
        f"the first difference is at character {position}: {_show(closest[position:])} was sampled, the text has "
        f"{_show(text[position:])}"
    )


def _num_shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _show(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


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
        return next((text for text in texts if not text.endswith(REPLACEMENT)), self.first(num_tokens))

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
