# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a configuration file, with which editors complete and check it.

It describes each key by itself. The loader refuses all that the schema refuses, values of a method's parameters, and
combinations of keys too.
"""

from __future__ import annotations

import json
import math
from typing import Any

from mis_ext.correction.config import GUARD_NAMES
from mis_ext.correction.tokens import STATISTICS
from mis_ext.keys.names import NO_NULL
from mis_ext.keys.rows import (
    GATE_ROWS,
    PREFIXES,
    ROWS,
    TIS_OF_FRAMEWORKS,
    Key,
    read_compile,
    read_gates,
    read_guards,
    read_method,
    read_metrics,
)
from mis_ext.methods.catalogue import METHODS
from mis_ext.validation import check_bool, check_choice, check_text

_Node = dict[str, Any]


def json_schema() -> _Node:
    """The schema (draft 7) of a file for ``--custom-config-path``."""
    ours = "|".join([*ROWS, *TIS_OF_FRAMEWORKS])
    gate = {key: _node(row, nullable=False) for key, row in GATE_ROWS.items()}
    statistics = "; ".join(f"{row.name}: {row.text}" for row in STATISTICS.values())
    gate["statistic"]["description"] += f" {statistics}"
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of mis_ext",
        "description": "For --custom-config-path of slime and Miles. Keys without our prefixes are the framework's.",
        "type": "object",
        "properties": {key: _node(row, nullable=key not in NO_NULL) for key, row in ROWS.items()},
        "patternProperties": {
            f"^(?!({ours})$)({'|'.join(PREFIXES)})": {"not": {}, "errorMessage": "mis_ext has no such key"}
        },
        "definitions": {
            "gate": _object(gate, description="A filter: what lies outside of its bounds is dropped."),
            **{
                f"method_{name}": _object(
                    {"name": {"const": name}} | {key: {"description": f"In {row.legal[key]}."} for key in row.defaults},
                    description=row.formula,
                    required=["name"],
                )
                for name, row in METHODS.items()
            },
        },
    }


def schema_text() -> str:
    """The schema as JSON."""
    return json.dumps(json_schema(), indent=1) + "\n"


def described(name: str) -> dict[str, Any]:
    """The row of a key, for ``mis-ext keys``."""
    row = ROWS[name]
    default = json.dumps(row.default) if isinstance(row.default, bool) else row.default
    return {"key": name, "legal": row.legal, "default": default or None, "unit": row.unit or None, "what": row.text}


def _node(row: Key, *, nullable: bool) -> _Node:
    """Return the schema of the values that the check of a row allows."""
    default = {} if row.default in (None, ()) else {"default": row.default}
    text = f"{row.text} In {row.unit}." if row.unit else row.text
    node = _value(row.check)
    return (node if not nullable else {"anyOf": [node, {"type": "null"}]}) | {"description": text} | default


def _value(check: Any) -> _Node:
    if check in _READERS:
        return _READERS[check]
    if check.func is check_choice:
        return {"enum": [*check.keywords["choices"]]}
    node: _Node = {"type": "number"}
    # JSON has no infinity: a bound there is none.
    for end, name in (("low", "Minimum"), ("high", "Maximum")):
        bound, is_open = check.keywords[end], check.keywords[f"open_{end}"]
        if math.isfinite(bound):
            node[f"exclusive{name}" if is_open else name.lower()] = bound
    return node


def _object(properties: _Node, **more: Any) -> _Node:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


_HOW: _Node = {"enum": ["error", "warn"]}
_READERS: dict[Any, _Node] = {
    check_bool: {"type": "boolean"},
    check_text: {"type": "string"},
    read_compile: {"enum": ["auto", True, False]},
    read_gates: {"type": "array", "items": {"$ref": "#/definitions/gate"}},
    read_guards: {"anyOf": [_HOW, _object(dict.fromkeys(GUARD_NAMES, _HOW))]},
    read_method: {"anyOf": [{"enum": [*METHODS]}, *({"$ref": f"#/definitions/method_{name}"} for name in METHODS)]},
    read_metrics: {"anyOf": [{"enum": ["core", "all"]}, {"type": "array", "items": {"type": "string"}}]},
}
