# SPDX-License-Identifier: Apache-2.0
"""What is known of a vocabulary: the bytes of each token, and how many tokens tokenizer, model and trainer count.

The bytes are the only text of a token that does not depend on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

from mis_ext.rollout.generation import Tokenizer

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
# A space, a line break and characters of two and four bytes: read in the wrong way, at least one of them differs.
_PROBE = "a é\n🙂"


def _byte_level_alphabet() -> dict[str, int]:
    printable = [byte for byte in range(256) if chr(byte).isprintable() and not chr(byte).isspace()]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
"""GPT-2's printable stand-ins for the bytes: printable Latin-1 as itself, the others from U+0100 on."""


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, looked up once per id: ``list(map(token_bytes.__getitem__, ids))``.

    Joined bytes are the text, also where a character is spread over tokens. (``decode`` puts U+FFFD there, with byte
    fallback for every byte of a broken run, and may cut a leading space.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._names = cast("_Names", tokenizer)
        if not all(hasattr(tokenizer, name) for name in ("convert_ids_to_tokens", "get_added_vocab")):
            raise ValueError(
                f"tokenizer {type(tokenizer).__name__} must have convert_ids_to_tokens and get_added_vocab"
            )
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
        f"tokenizer {type(tokenizer).__name__} must be byte-level BPE or BPE with byte fallback: "
        f"the bytes of its tokens {[*probe_names]} for {_PROBE!r} are unknown"
    )


def _read_byte_level(name: str) -> bytes:
    # A name outside the alphabet is one that was added to the vocabulary as a text.
    known = BYTE_LEVEL_ALPHABET.keys() >= set(name)
    return bytes(map(BYTE_LEVEL_ALPHABET.__getitem__, name)) if known else name.encode()


def _read_byte_fallback(name: str) -> bytes:
    byte = _BYTE_NAME.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace("▁", " ").encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyReport:
    """What ``check_vocabulary`` found.

    Attributes:
        num_nameless: Rows of the model without a token in the tokenizer: they can be sampled, and have no text.
        num_padding: Rows that only the trainer has: its softmax gives them mass that the server's does not.
        messages: What to do about either; empty where there is neither.
    """

    num_nameless: int
    num_padding: int
    messages: tuple[str, ...]


def check_vocabulary(*, tokenizer_size: int, model_size: int, trainer_size: int) -> VocabularyReport:
    """Which rows of the trainer's logits the server's softmax does not have, and which have no token.

    Args:
        tokenizer_size: Ids of the tokenizer, added tokens included: ``len(tokenizer)``.
        model_size: ``vocab_size`` of the model's configuration; the servers cut their logits to it.
        trainer_size: Columns of the trainer's logits, over all tensor-parallel ranks; see ``padded_vocab_size``.

    Raises:
        ValueError: Tokens without a row: the sizes belong to different models.
    """
    if tokenizer_size > model_size:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} ids and the model {model_size} rows: ids from {model_size} on have no "
            "logit; this is another model's tokenizer, or the embedding was not resized"
        )
    if model_size > trainer_size:
        raise ValueError(
            f"the model has {model_size} rows and the trainer {trainer_size}: ids from {trainer_size} on cannot be "
            "scored; give the trainer the model's vocab_size"
        )
    num_nameless, num_padding = model_size - tokenizer_size, trainer_size - model_size
    messages = []
    if num_nameless:
        messages.append(
            f"{num_nameless} rows from {tokenizer_size} on have no token: one that is sampled vanishes from the text; "
            "keep token ids, never re-tokenize"
        )
    if num_padding:
        messages.append(
            f"{num_padding} rows of padding from {model_size} on take part in the trainer's softmax: its log-probs are "
            f"too low by padding_log_mass(logits, {model_size}); score with vocab_size={model_size}, or set these "
            "columns to -inf"
        )
    return VocabularyReport(num_nameless=num_nameless, num_padding=num_padding, messages=tuple(messages))


def padded_vocab_size(model_size: int, *, divisible_by: int = 128, tensor_parallel_size: int = 1) -> int:
    """Columns of Megatron's logits: ``model_size`` rounded up to ``--make-vocab-size-divisible-by`` times ranks."""
    multiple = divisible_by * tensor_parallel_size
    return -(-model_size // multiple) * multiple
