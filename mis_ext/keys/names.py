# SPDX-License-Identifier: Apache-2.0
"""Names that are no keys: misspelt, removed, or another framework's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Any

from mis_ext.keys.rows import FLAT_KEYS, PREFIXES, ROWS, TIS_OF_FRAMEWORKS
from mis_ext.validation import Errors, check_known

OF_OTHERS = {
    "mis": "flat keys, since 0.6: tis_level, tis_mode, rs_gates, and others of mis-ext keys",
    "use_mis": "use_tis: true, and use_rs: true for a filter",
    # verl
    "rollout_correction": "what mis-ext convert verl FILE prints",
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
"""Other names that are refused, and what replaces them."""
NO_NULL = {"tis_level": "none", "tis_mode": "unbounded", "rs_level": "none"}
"""Keys for which null could mean two things: the default, and this word."""


def refuse_names(given: Mapping[str, Any], wrong: Errors) -> None:
    """Collect names that are no keys but mean mis_ext. Another framework's option may be null or false."""
    names = [name for name in given if name not in ROWS and name not in TIS_OF_FRAMEWORKS]
    with wrong:
        check_known("keys", [name for name in names if name.startswith(PREFIXES)], FLAT_KEYS)
    meant = {name: near_miss(name, ROWS) for name in names if not name.startswith(PREFIXES)}
    hints = [f"{name!a} (did you mean {key!r}?)" for name, key in meant.items() if key is not None]
    hints += [f"{name!r} (write {key})" for name, key in OF_OTHERS.items() if given.get(name) not in (None, False)]
    with wrong:
        if hints:
            raise ValueError(f"no keys of mis_ext: {'; '.join(hints)}")
    for key, word in NO_NULL.items():
        if key in given and given[key] is None:
            wrong.refuse([f"{key}: null could mean {word} or the default; write {key}: {word}, or remove the key"])


def near_miss(name: str, keys: Collection[str]) -> str | None:
    """The key that ``name`` probably means: misspelled, or without its prefix."""
    spelled = re.sub(r"[\s.-]+", "_", name.strip()).casefold()
    if spelled in keys:
        return spelled
    if spelled.startswith("misc_"):
        return None
    slips = (key for key in keys if _is_slip(spelled, key))
    # A single word may belong to anyone.
    bare = (prefix + spelled for prefix in PREFIXES if "_" in spelled and prefix + spelled in keys)
    return next(slips, next(bare, None))


def _is_slip(name: str, key: str) -> bool:
    """Return True if at most one letter in six differs. A last word of two letters, as in ``use_rs``, must be there."""
    most = len(key) // 6
    # Length and letters are cheap, and enough for nearly all names.
    if abs(len(name) - len(key)) > most or len({*name}.symmetric_difference(key)) > most:
        return False
    last_word = key.rpartition("_")[2]
    if len(last_word) < 3 and not name.endswith(f"_{last_word}") and not name.startswith(key):
        return False
    num_same = sum(block.size for block in SequenceMatcher(None, name, key, autojunk=False).get_matching_blocks())
    return sorted(name) == sorted(key) or len(name) + len(key) - 2 * num_same <= most
