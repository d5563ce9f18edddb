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
REMOVED = {
    "mis_loss_compile": "remove the key",
    "rs_gates.level": "write reduce: token, sum (for sequence), mean (geometric), min, or max",
    "rs_gates.after": "remove the key: a filter judges all tokens of the response mask",
    "rs_gates.target_accept": "write low and high; mis-ext report shows what share each bound keeps",
    "rs_gates.target_gain": "remove the key",
    "rs_gates.statistic: squared_log_ratio": "write statistic: k2, with half of the bound",
    **{f"mis_lr_multiplier_{kind}": f"take the root of mis_ess_ratio_{kind}" for kind in ("token", "seq")},
    "mis_ratio_above_2_fraction": "use mis_tis_truncate_fraction, or mis_ratio_max",
    "mis_ratio_below_half_fraction": "use mis_tis_truncate_fraction_low, or mis_ratio_min",
    "mis_train_rollout_logprob_abs_diff_invalid": "use mis_nonfinite_token_fraction, which is the same",
    **dict.fromkeys(("mis_log_ppl_diff_min", "mis_log_ppl_diff_max"), "use mis_log_ppl_diff, or mis_ratio_max"),
    "mis_tis_weight_std": "use mis_tis_weight_ess: (standard deviation / mean)^2 is 1 / mis_tis_weight_ess - 1",
    **{f"mis_ess_ratio_token_{age}": f"use mis_k3_kl_{age}" for age in ("fresh", "stale")},
}
"""What replaces keys, ``rs_gates.KEY``, ``rs_gates.KEY: value``, and metrics that a file for 0.5 may have."""
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
    wrong.refuse([f"no keys of mis_ext: {'; '.join(hints)}"] if hints else [])
    wrong.refuse(
        f"{key}: null could mean {word} or the default; write {key}: {word}, or remove the key"
        for key, word in NO_NULL.items()
        if key in given and given[key] is None
    )
    gates, inner = given.get("rs_gates"), given.get("mis_metrics")
    inner = list(inner) if isinstance(inner, (list, tuple)) else []
    for gate in gates if isinstance(gates, (list, tuple)) else ():
        for key, value in gate.items() if isinstance(gate, Mapping) else ():
            inner += [f"rs_gates.{key}", f"rs_gates.{key}: {value}"]
    gone = [name for name in REMOVED if name in given or name in inner]
    wrong.refuse(f"{name} was removed in mis_ext 0.6: {REMOVED[name]}" for name in gone)


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
