"""The keys of a sample, as files spell them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEYS = {
    "log_probs": ("log_prob",),
    "rollout_log_probs": ("rollout_log_prob",),
    "loss_masks": ("loss_mask",),
    "response_lengths": ("response_length",),
    "total_lengths": ("total_length",),
    "max_seq_lens": (),
    "tokens": ("token",),
    "rollout_token_ids": ("rollout_token_id",),
    "weight_versions": ("weight_version",),
    "sample_indices": ("sample_index", "index"),
    "advantages": ("advantage",),
    "rewards": ("reward",),
    "group_indices": ("group_index", "group_id"),
}
"""The other names that a key of a column has in a row."""
OPTIONAL = ("advantages", "rewards", "group_indices")
"""Not what a sample is about: a column of another length, as of a whole rollout in the file of a rank, is left out."""
VERSION_OF_FILE = "train_weight_version"
"""May also be one for the whole file."""


ROLLOUT_IDS = ("rollout_id", "step")
"""Names of the rollout of a row, or of the whole file; the first that is there counts."""


def rollout_of(said: Mapping[str, Any]) -> Any:
    """The rollout that a row, or a file, says; None where it says none."""
    return next((said[name] for name in ROLLOUT_IDS if said.get(name) is not None), None)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows, a sample each, as columns; None where a row lacks a key.

    Raises:
        ValueError: There is no row.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("holds no sample")
    names = {key: (key, *others) for key, others in KEYS.items()} | {VERSION_OF_FILE: (VERSION_OF_FILE,)}
    return {
        key: [next((row[name] for name in spelt if row.get(name) is not None), None) for row in rows]
        for key, spelt in names.items()
    }
