# SPDX-License-Identifier: Apache-2.0
"""The environment: a tool that responds to every turn of the model until the conversation is long enough."""

from __future__ import annotations

from typing import Any

from .sample import Sample


async def step(sample: Sample, text: str) -> list[dict[str, Any]] | None:
    """Return the tool output for a turn of the model; None after as many outputs as the sample requires."""
    turns = sample.metadata.setdefault("turns", [])
    turns.append(text)
    if len(turns) > sample.metadata["num_lookups"]:
        return None
    found = f"{len(text)} characters, {len(text.split())} words; permission is hereby granted"
    message = {"role": "tool", "content": found}
    sample.metadata.setdefault("found", []).append(message)
    return [message]
