# SPDX-License-Identifier: Apache-2.0
"""All published methods by name: the choice of a configuration file, and their printed descriptions."""

from __future__ import annotations

import re
from typing import Any

from mis_ext.files import hanging
from mis_ext.methods import decoupled, ppo, reinforce, trust_region
from mis_ext.methods.first_update import as_correction
from mis_ext.methods.published import SYMBOLS, ChosenMethod, PublishedMethod
from mis_ext.validation import check_mapping, did_you_mean

METHODS: dict[str, PublishedMethod] = {
    name: row
    for family in (ppo, decoupled, reinforce, trust_region)
    for name, row in vars(family).items()
    if isinstance(row, PublishedMethod)
}
"""All published methods by name, grouped by family."""


def find_method(name: str) -> PublishedMethod:
    """Return the method called ``name``.

    Raises:
        ValueError: There is no such method.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}{did_you_mean(name, METHODS)}. Run mis-ext methods to list all")
    return METHODS[name]


def choose_method(key: str, value: Any) -> ChosenMethod:
    """The method for a name, or for a mapping of ``name`` and parameters.

    Args:
        key: The key of the user, for messages.
        value: ``"icepop"``, or ``{"name": "icepop", "high": 2.0}``.
    """
    given = {"name": value} if isinstance(value, str) else check_mapping(key, value)
    if not isinstance(given.get("name"), str):
        raise TypeError(f"{key} must be the name of a method, or a mapping with the key name, got {value!r}")
    name = given.pop("name")
    try:
        row = find_method(name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    where = f"{key}: {name}"
    parameters = row.checked(where, given)
    return ChosenMethod(row.name, tuple(parameters.items()), row.make(**parameters))


def list_methods() -> str:
    """Every method's name and objective, grouped by family."""
    width = max(map(len, METHODS))
    lines: list[str] = []
    for family in dict.fromkeys(row.family for row in METHODS.values()):
        rows = [row for row in METHODS.values() if row.family == family]
        lines += [family, *(hanging(f"  {row.name:{width}}  ", row.formula) for row in rows), ""]
    return "\n".join([*lines, hanging("", SYMBOLS)])


def describe_method(row: PublishedMethod) -> str:
    """Describe a method: its use, objective, parameters, log-probs, and source."""
    facts = method_facts(row)
    parameters = ", ".join(
        f"{name}={f'{value:g}' if isinstance(value, float) else value} in {facts['legal'][name]}"
        for name, value in row.defaults.items()
    )
    parts = {
        "objective": row.formula,
        "parameters": parameters or "none",
        "log-probs": ", ".join(facts["log_probs"]),
        "hook alone": f"no: {facts['why_not']}" if facts["why_not"] else "yes",
        "whole loss": f"mis_loss_method: {row.name}",
        "file": f"mis-ext methods {row.name} --yaml",
        "source": row.paper,
    }
    shown = "\n".join(hanging(f"{title + ':':12}", text) for title, text in parts.items())
    # Each paragraph, and each of When, Claims and Counter-claims, starts a new line.
    paragraphs = re.split(r"\n(?=\n|[A-Z][a-z-]+: )", row.text)
    text = "\n".join(hanging("", each) for each in paragraphs)
    return f"{row.name} ({row.family})\n\n{text}\n\n{shown}\n\n{hanging('', SYMBOLS)}"


def method_facts(row: PublishedMethod) -> dict[str, Any]:
    """Facts about a method, for programs; ``why_not``: the reason why the hook alone cannot run it, or None."""
    method = row.method
    why_not = None
    try:
        as_correction(method)
    except ValueError as error:
        why_not = str(error)
    return {
        "name": row.name,
        "family": row.family,
        "objective": row.formula,
        "text": row.text,
        "parameters": row.defaults,
        "legal": row.legal,
        "log_probs": list(method.policies),
        "hook_alone": why_not is None,
        "why_not": why_not,
        "source": row.paper,
    }
