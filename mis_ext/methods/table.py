"""The methods as a table, for the documentation, and one as text, for the command line."""

from __future__ import annotations

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
        lines.append(f"  {row.name:{width}}  {row.formula}")
    return "\n".join([*lines[1:], "", SYMBOLS])


def describe_method(row: PublishedMethod) -> str:
    """When to use a method, its objective, parameters, log-probs and source, as text."""
    method = row.method
    defaults = ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.defaults.items()
    )
    try:
        as_correction(method)
        hook = "yes"
    except ValueError as error:
        hook = f"no: {error}"
    parts = {
        "objective": row.formula,
        "parameters": defaults or "none",
        "log-probs": ", ".join(method.policies),
        "hook alone": hook,
        "whole loss": f"mis_loss_method: {row.name}",
        "file": f"mis-ext methods {row.name} --yaml",
        "source": row.paper,
    }
    facts = "\n".join(f"{title + ':':12}{text}" for title, text in parts.items())
    return f"{row.name} ({row.family})\n\n{row.text}\n\n{facts}\n\n{SYMBOLS}"
