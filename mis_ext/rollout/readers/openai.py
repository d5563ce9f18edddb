"""OpenAI-style log-probs that have text but no token ids: refused, unless a tokenizer proves every id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mis_ext.rollout.errors import Contradiction, UnprovenTokenIds
from mis_ext.rollout.generation import REPLACEMENT, Generation, Tokenizer
from mis_ext.rollout.readers.cross_checks import Choice, given_ids, open_choice, sent_ids, settle
from mis_ext.rollout.readers.json_fields import Field
from mis_ext.rollout.token_bytes import token_bytes_of


def read_openai_chat(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    prompt_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    """What a chat request with ``logprobs: true`` sampled, if ``tokenizer`` proves the ids of ``choice``.

    A token's bytes prove its id where exactly one token of the vocabulary has them, unless the server may have made
    them from a text that lost some: a part of a character becomes U+FFFD, and some tokenizers clean up spaces.

    Args:
        request: The request as it was sent, decoded.
        response: The response as it came, decoded.
        prompt_ids: The prompt's ids, which no such response has.
        tokenizer: The server's, a fast Hugging Face tokenizer of byte-level BPE; None refuses every response.
        choice: The position of the choice; None: the only one.
        request_id: Names the request in errors and samples; None: the server's name for it.

    Raises:
        RolloutError: The response proves no sample; the subclass says why.
    """
    found = open_choice(request, response, api="chat", choice=choice, request_id=request_id)
    return _read_choice(found, tokenizer, [given_ids(found, prompt_ids)])


def read_openai_completions(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    prompt_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    r"""What a completions request with ``logprobs`` sampled, if ``tokenizer`` proves the ids of ``choice``.

    Completions have text and no bytes, so that only a token of ASCII characters is proven: servers write the bytes of
    a part of a character as U+FFFD, as Latin-1 or as ``bytes:\xe2``. Arguments and errors are those of
    :func:`read_openai_chat`; ``prompt_ids`` may be left out where the prompt was sent as ids.
    """
    found = open_choice(request, response, api="completions", choice=choice, request_id=request_id)
    return _read_choice(found, tokenizer, [given_ids(found, prompt_ids), sent_ids(found.asked, "prompt")])


def _read_choice(found: Choice, tokenizer: Tokenizer | None, prompt_places: list[Field | None]) -> Generation:
    tokens = found.tokens
    if tokenizer is None:
        advice = "ask the server for ids, or give its tokenizer and the prompt_ids"
        raise UnprovenTokenIds(tokens.request_id, f"the response has text and no token ids: {advice}")
    vocabulary = _vocabulary(tokens.request_id, tokenizer)
    known = [_bytes(found, position, text) for position, text in enumerate(tokens.strings())]
    proven = [_prove(tokens.entry(position), each, vocabulary) for position, each in enumerate(known)]
    return settle(
        tokens.request_id,
        sampled_ids=[replace(tokens, value=proven)],
        sampled_counts=[],
        log_probs=[found.log_probs],
        prompt_ids=prompt_places,
        prompt_counts=[found.prompt_count],
        finish_reason=found.finish_reason,
        stop_matches=[],
        text=found.text,
        ids_advice="give tokenizer=",
        prompt_advice="give prompt_ids=",
    )


def _prove(token: Field, known: bytes | None, vocabulary: Mapping[bytes, list[int]]) -> int:
    """The one id whose bytes are ``known``."""
    # U+FFFD stands for bytes that are no character, so for no bytes in particular.
    if known is None or REPLACEMENT.encode() in known:
        raise UnprovenTokenIds(
            token.request_id, f"the bytes of {token.path} are not known, its text is {token.value!r}"
        )
    ids = vocabulary.get(known, [])
    if len(ids) != 1:
        raise UnprovenTokenIds(token.request_id, f"{token.path} has the bytes {known!r}, which are those of ids {ids}")
    return ids[0]


def _bytes(found: Choice, position: int, text: str) -> bytes | None:
    """The bytes of a token; None where the response does not have them."""
    if found.token_bytes is None:
        return text.encode() if text.isascii() else None
    row = found.token_bytes.entry(position)
    if row.value is None:
        return None
    values = row.array()
    if not all(type(value) is int and 0 <= value < 256 for value in values):
        raise row.malformed("a list of bytes")
    known = bytes(values)
    shown = known.decode(errors="replace")
    if REPLACEMENT not in shown and shown != text:
        raise Contradiction(row.request_id, f"{row.path} are those of {shown!r}, but the token is {text!r}")
    return known


def _vocabulary(request_id: str, tokenizer: Any) -> dict[bytes, list[int]]:
    """The ids of each token's bytes."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if type(decoder).__name__ != "ByteLevel":
        why = f"its decoder is {type(decoder).__name__}, not ByteLevel, so that a token's text may lack a leading space"
        raise UnprovenTokenIds(request_id, f"the tokenizer proves no ids: {why}")
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        why = "clean_up_tokenization_spaces is true, so that a token's text may lack spaces"
        raise UnprovenTokenIds(request_id, f"the tokenizer proves no ids: {why}")
    return _ids_by_bytes(tokenizer, len(tokenizer))


@lru_cache(maxsize=1)
def _ids_by_bytes(tokenizer: Any, size: int) -> dict[bytes, list[int]]:
    # ``size`` is a part of the key: a tokenizer can grow.
    bytes_of = token_bytes_of(tokenizer)
    ids: dict[bytes, list[int]] = {}
    for token_id in tokenizer.get_vocab().values():
        ids.setdefault(bytes_of[token_id], []).append(token_id)
    return ids
