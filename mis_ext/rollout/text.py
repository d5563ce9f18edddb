"""What this package asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A Hugging Face tokenizer, or anything with its ``encode`` and ``decode``."""

    def __hash__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...  # noqa: D102

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...  # noqa: D102
