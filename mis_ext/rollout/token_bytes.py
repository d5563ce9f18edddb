"""The bytes of each token: the only text of a token that does not depend on its neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, cast

from mis_ext.rollout.generation import Tokenizer

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
# A space, a line break and characters of two and four bytes: read in the wrong way, at least one of them differs.
_PROBE = "a é\n🙂"


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, looked up once per id: ``list(map(token_bytes.__getitem__, ids))``.

    Joined bytes are the text, also where a character is spread over tokens. (``decode`` puts U+FFFD there, with byte
    fallback for every byte of a broken run, and may cut a leading space.)

    Args:
        tokenizer: A Hugging Face tokenizer of byte-level BPE, or of BPE with byte fallback.

    Raises:
        ValueError: The tokenizer is of neither form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._names = cast("_Names", tokenizer)
        if not all(hasattr(tokenizer, name) for name in ("convert_ids_to_tokens", "get_added_vocab")):
            raise ValueError(f"tokenizer {_name(tokenizer)} must have convert_ids_to_tokens and get_added_vocab")
        self._read = _choose_reading(tokenizer, self._names)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        texts = self._names.get_added_vocab()
        self.added_texts = frozenset(texts)
        self.special_texts = tuple(text for text, token_id in texts.items() if token_id in self.special_ids)
        for text, token_id in texts.items():
            self[token_id] = text.encode()

    def __missing__(self, token_id: int) -> bytes:
        (name,) = self._names.convert_ids_to_tokens([token_id])
        # Ids beyond the vocabulary have no text; what is in none equals itself alone.
        self[token_id] = b"\xff%d\xff" % token_id if name is None else self._read(name)
        return self[token_id]


@lru_cache(maxsize=4)
def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes:
    """The bytes of a tokenizer's tokens; the same object for the same tokenizer."""
    return TokenBytes(tokenizer)


class _Names(Protocol):
    def convert_ids_to_tokens(self, ids: list[int]) -> Sequence[str | None]: ...

    def get_added_vocab(self) -> dict[str, int]: ...


def _choose_reading(tokenizer: Tokenizer, names: _Names) -> Callable[[str], bytes]:
    probe_names = names.convert_ids_to_tokens(tokenizer.encode(_PROBE, add_special_tokens=False))
    for read in (_read_byte_level, _read_byte_fallback):
        # SentencePiece may put a space before a text.
        if b"".join(read(name or "") for name in probe_names).removeprefix(b" ") == _PROBE.encode():
            return read
    raise ValueError(
        f"tokenizer {_name(tokenizer)} must be byte-level BPE or BPE with byte fallback: "
        f"the bytes of its tokens {[*probe_names]} for {_PROBE!r} are unknown"
    )


def _read_byte_level(name: str) -> bytes:
    # A name outside the alphabet is one that was added to the vocabulary as a text.
    known = BYTE_LEVEL_ALPHABET.keys() >= set(name)
    return bytes(map(BYTE_LEVEL_ALPHABET.__getitem__, name)) if known else name.encode()


def _read_byte_fallback(name: str) -> bytes:
    byte = _BYTE_NAME.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and not chr(byte).isspace()]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _name(tokenizer: Tokenizer) -> str:
    return type(tokenizer).__name__


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
"""The byte of each character that a byte-level tokenizer writes for it."""
