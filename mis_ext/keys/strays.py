# SPDX-License-Identifier: Apache-2.0
"""Names that would do nothing although they are meant for us: misspelt, in the wrong place, a peer's or a host's."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, get_args

from mis_ext.correction.config import BOUNDS, HookLevel
from mis_ext.files import list_presets
from mis_ext.keys.parts import KEYS_OF_GATE

PREFIXES = ("tis_", "rs_", "mis_")
_LETTERS_PER_MISTAKE = 6
_OTHER_WORDS = ("misc_",)

_ADVICE_ON_PRESETS = {
    name: f"the name of a preset: write what mis-ext presets {name} prints"
    for name in list_presets()
    # Those with a prefix are unknown keys anyway.
    if not f"{name}_".startswith(PREFIXES)
}
_OF_CONFIG = {
    "metrics_only": "write use_tis: false, and give --get-mismatch-metrics",
    "warn_only": "write mis_guard",
    "per_token_loss": "give --calculate-per-token-loss",
    "normalize": "write tis_batch_normalize: true",
    "gate": "write rs_gates",
}
"""Fields of a configuration in Python, a preset's name among them, and words of several keys."""

PLAIN_WORDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("when", *KEYS_OF_GATE, *_OF_CONFIG), ()),
    **dict.fromkeys(_ADVICE_ON_PRESETS, (True,)),
    "level": get_args(HookLevel),
    "mode": tuple(BOUNDS),
}
"""Names that may well be those of a reward function or another tool; with one of these values they are not."""
_OURS_ALONE = {"weight": "write tis_level", "scope": "write tis_normalize_scope"}
_OF_PEERS = {
    "use_mis": "use_tis: true, and use_rs: true for a gate",
    # verl
    "rollout_correction": "the keys of mis_ext, see docs/reference/configuration.md",
    "rollout_is": "tis_level",
    "rollout_is_threshold": "tis_upper_bound",
    "rollout_is_batch_normalize": "tis_batch_normalize",
    "rollout_rs": "use_rs: true and rs_level",
    "rollout_rs_threshold": "rs_upper_bound and rs_lower_bound",
    "rollout_token_veto_threshold": "rs_veto_threshold",
    "bypass_mode": "mis_loss_mode: bypass",
    # TRL
    "vllm_importance_sampling_correction": "use_tis: true",
    "vllm_importance_sampling_mode": "tis_level and tis_mode",
    "vllm_importance_sampling_cap": "tis_upper_bound",
}

HOST_CLIPS = {"tis_clip": 2.0, "tis_clip_low": 0}
"""The bounds of the hosts' built-in correction and their defaults: present on every ``args``, and not ours."""


def refuse_near_misses(names: Iterable[str], *, keys: Collection[str]) -> None:
    """Refuse names, none of them ours as they stand, that differ from one of ``keys`` by a slip of the hand."""
    meant = {name: near_miss(name, keys=keys) for name in names}
    hints = [f"{name!a} (did you mean {key!r}?)" for name, key in meant.items() if key is not None]
    if hints:
        raise ValueError(f"misspelt keys: {'; '.join(hints)}")


def near_miss(name: str, *, keys: Collection[str]) -> str | None:
    """The key that ``name`` was probably meant to be."""
    spelled = unicodedata.normalize("NFKC", name).strip()
    candidate = re.sub(r"(?<=[a-z])(?=[A-Z])|[\s.-]+", "_", spelled).casefold()
    if candidate in keys:
        return candidate
    if not candidate.isascii():
        # One look-alike letter in three: enough for the shortest key.
        return next(iter(difflib.get_close_matches(candidate, keys, n=1, cutoff=0.6)), None)
    if candidate.startswith(_OTHER_WORDS):
        return None
    # Length and letters are cheap, and enough for nearly all of the frameworks' names.
    size, letters = len(candidate), {*candidate}
    for key in keys:
        num_slips = len(key) // _LETTERS_PER_MISTAKE
        is_alike = abs(size - len(key)) <= num_slips and len(letters.symmetric_difference(key)) <= num_slips
        if is_alike and _is_typo(candidate, key):
            return key
    return None


def _is_typo(name: str, key: str) -> bool:
    """Whether few letters are missing, added or exchanged; a word of two letters must stand there, as in ``use_rs``."""
    num_slips = len(key) // _LETTERS_PER_MISTAKE
    last_word = key.rpartition("_")[2]
    is_right = name.endswith(f"_{last_word}") or name.startswith(key)
    if "_" not in key or (len(last_word) < 3 and not is_right):
        return False
    if sorted(name) == sorted(key):
        return True
    num_same = sum(block.size for block in SequenceMatcher(None, name, key, autojunk=False).get_matching_blocks())
    return len(name) + len(key) - 2 * num_same <= num_slips


def advice_on_strays(flat_keys: Collection[str]) -> dict[str, str]:
    """What to do about each name that would have no effect at the top level; ``flat_keys`` are ours there.

    No flag of slime, Miles or Megatron-LM has one of these names.
    """
    meant: dict[str, list[str]] = {}
    for key in flat_keys:
        for prefix in PREFIXES:
            if key.startswith(prefix):
                meant.setdefault(key.removeprefix(prefix), []).append(key)
    advice = dict(_ADVICE_ON_PRESETS)
    advice |= {key: "write it into a gate of rs_gates" for key in KEYS_OF_GATE if key != "name"}  # Everybody has one.
    advice |= {name: f"write {key}" for name, key in _OF_PEERS.items()} | _OF_CONFIG | _OURS_ALONE
    return advice | {name: f"write {' or '.join(keys)}" for name, keys in meant.items()}


def refuse_strays(given: Mapping[str, Any], *, advice: Mapping[str, str]) -> None:
    """Refuse names that would do nothing, and can only be meant for us; null and false do what they say."""
    hints = "; ".join(
        f"{name!r} ({advice[name]})" for name, value in given.items() if name in advice and _is_ours(name, value)
    )
    if hints:
        raise ValueError(f"keys without effect: {hints}")


def _is_ours(name: str, value: Any) -> bool:
    if name in PLAIN_WORDS:
        return isinstance(value, (str, bool)) and value in PLAIN_WORDS[name] and method_advice(name) is None
    return value is not None and value is not False


def method_advice(name: str) -> str | None:
    """What to do about the name of a method at the top level, where it may also be anybody's flag."""
    from mis_ext.methods.catalogue import METHODS  # All methods: no call of the hook needs them.

    return f"write mis_loss_method: {name}" if name in METHODS and not name.startswith(PREFIXES) else None


def refuse_host_clips(given: Mapping[str, Any]) -> None:
    """Refuse bounds of the host's built-in correction, in whose place ours runs; their defaults are always there."""
    instead = {"tis_clip": "tis_upper_bound", "tis_clip_low": "tis_mode: clip with tis_lower_bound"}
    for key, default in HOST_CLIPS.items():
        if given.get(key, default) != default:
            raise ValueError(
                f"{key}={given[key]!r}: no effect, because it belongs to the host's built-in correction; write "
                f"{instead[key]}"
            )
