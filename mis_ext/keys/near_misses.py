"""Names that were probably meant to be our keys, among the hundreds that the hosts keep beside them."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

_LETTERS_PER_MISTAKE = 6
_OTHER_WORDS = ("misc_",)


def refuse_near_misses(names: Iterable[str], *, keys: Collection[str]) -> None:
    """Refuse names that differ from one of ``keys`` by a slip of the hand.

    Args:
        names: Names that are not ours as they stand.
        keys: Our keys.

    Raises:
        ValueError: A name differs by case, dashes, spaces, letters of another alphabet, or by a letter or two.
    """
    meant = {name: near_miss(name, keys=keys) for name in names}
    hints = [f"{name!a} (did you mean {key!r}?)" for name, key in meant.items() if key is not None]
    if hints:
        raise ValueError(f"misspelt keys: {'; '.join(hints)}")


def near_miss(name: str, *, keys: Collection[str]) -> str | None:
    """The key that ``name`` was probably meant to be."""
    candidate = _normalised(name)
    if candidate in keys:
        return candidate
    if not candidate.isascii():
        # One look-alike letter in three: enough for the shortest key.
        return next(iter(difflib.get_close_matches(candidate, keys, n=1, cutoff=0.6)), None)
    if candidate.startswith(_OTHER_WORDS):
        return None
    return next((key for key in keys if _is_typo(candidate, key)), None)


def _normalised(name: str) -> str:
    spelled = unicodedata.normalize("NFKC", name).strip()
    with_underscores = re.sub(r"(?<=[a-z])(?=[A-Z])|[\s.-]+", "_", spelled)
    return with_underscores.casefold()


def _is_typo(name: str, key: str) -> bool:
    """Whether few letters are missing, added or exchanged; a word of two letters must stand there, as in ``use_rs``."""
    last_word = key.rpartition("_")[2]
    is_right = name.endswith(f"_{last_word}") or name.startswith(key)
    if "_" not in key or (len(last_word) < 3 and not is_right):
        return False
    if sorted(name) == sorted(key):
        return True
    num_slips = len(key) // _LETTERS_PER_MISTAKE
    # Cheap, and enough for nearly all of the hosts' names.
    if abs(len(name) - len(key)) > num_slips or len(set(name) ^ set(key)) > num_slips:
        return False
    num_same = sum(block.size for block in SequenceMatcher(None, name, key, autojunk=False).get_matching_blocks())
    return len(name) + len(key) - 2 * num_same <= num_slips
