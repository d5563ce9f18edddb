"""The methods as a table, for the documentation, and one as text, for the command line."""

from __future__ import annotations

import re
from typing import Any

from mis_ext.columns import hanging
from mis_ext.correction.tables import Table
from mis_ext.methods.as_correction import as_correction
from mis_ext.methods.catalogue import METHODS
from mis_ext.methods.published import SYMBOLS, PublishedMethod


def methods_table() -> Table:
    """Every method with its family, objective and source."""
    return Table(
        ("family", "method", "objective of a token", "source"),
        tuple((row.family, f"`{row.name}`", f"`{row.formula}`", row.paper) for row in METHODS.values()),
    )


def list_methods() -> str:
    """Every method's name and objective, family after family."""
    width = max(map(len, METHODS))
    lines: list[str] = []
    family = None
    for row in METHODS.values():
        if row.family != family:
            family = row.family
            lines += ["", family]
        lines.append(hanging(f"  {row.name:{width}}  ", row.formula))
    return "\n".join([*lines[1:], "", hanging("", SYMBOLS)])


def describe_method(row: PublishedMethod) -> str:
    """When to use a method, its objective, parameters, log-probs and source, as text."""
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
    # A line of its own: what stands behind an empty line, and each of When, Claims, Counter-claims.
    paragraphs = re.split(r"\n(?=\n|[A-Z][a-z-]+: )", row.text)
    text = "\n".join(hanging("", each) for each in paragraphs)
    return f"{row.name} ({row.family})\n\n{text}\n\n{shown}\n\n{hanging('', SYMBOLS)}"


def method_facts(row: PublishedMethod) -> dict[str, Any]:
    """What is known of a method, for programs; ``why_not`` says why the hook alone cannot do it, None where it can."""
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
