# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a configuration file, with which editors complete and check it.

It describes each key by itself. The loader refuses all that the schema refuses, and combinations of keys too.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any, get_args, get_origin

from mis_ext.correction.config import GUARD_NAMES
from mis_ext.correction.tokens import STATISTICS
from mis_ext.keys.names import INSTEAD_OF_NULL, TIS_OF_FRAMEWORKS
from mis_ext.keys.rows import GATE_ROWS, PREFIXES, ROWS, Key, read_compile, read_gates, read_guards, read_metrics
from mis_ext.methods.catalogue import METHODS
from mis_ext.methods.published import words_of
from mis_ext.validation import check_bool, check_choice, check_text

_Node = dict[str, Any]


def json_schema() -> _Node:
    """The schema (draft 7) of a file for ``--custom-config-path``."""
    keys = {key: _node(row, nullable=key not in INSTEAD_OF_NULL) for key, row in ROWS.items()}
    ours = "|".join([*keys, *TIS_OF_FRAMEWORKS])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of mis_ext",
        "description": "For --custom-config-path of slime and Miles. Keys without our prefixes are the framework's.",
        "type": "object",
        "properties": keys,
        "patternProperties": {
            f"^(?!({ours})$)({'|'.join(PREFIXES)})": {"not": {}, "errorMessage": "mis_ext has no such key"}
        },
        "definitions": {"gate": _gate(), **_methods()},
    }


def schema_text() -> str:
    """The schema as JSON."""
    return json.dumps(json_schema(), indent=1) + "\n"


def described(name: str) -> dict[str, Any]:
    """The row of a key, for ``mis-ext keys``."""
    row = ROWS[name]
    default = json.dumps(row.default) if isinstance(row.default, bool) else row.default
    return {"key": name, "legal": row.legal, "default": default or None, "unit": row.unit or None, "what": row.text}


def _node(row: Key, *, nullable: bool = True) -> _Node:
    """Return the schema of the values that the check of a row allows."""
    check = row.check
    if check in (check_bool, check_text):
        node: _Node = {"type": ["boolean" if check is check_bool else "string", "null"]}
    elif isinstance(check, partial) and check.func is check_choice:
        node = {"enum": [*check.keywords["choices"], *[None] * nullable]}
    elif isinstance(check, partial):
        node = _number(**check.keywords)
    else:
        node = {"anyOf": [_OF_READERS.get(check, _METHOD), {"type": "null"}]}
    text = f"{row.text} In {row.unit}." if row.unit else row.text
    default = {} if row.default in (None, ()) else {"default": row.default}
    return node | {"description": text} | default


_HOW: _Node = {"enum": ["error", "warn"]}
_OF_READERS: dict[Any, _Node] = {
    read_gates: {"type": "array", "items": {"$ref": "#/definitions/gate"}},
    read_metrics: {"anyOf": [{"enum": ["core", "all"]}, {"type": "array", "items": {"type": "string"}}]},
    read_guards: {
        "anyOf": [
            _HOW,
            {"type": "object", "properties": dict.fromkeys(GUARD_NAMES, _HOW), "additionalProperties": False},
        ]
    },
    read_compile: {"enum": ["auto", True, False]},
}
_METHOD: _Node = {"anyOf": [{"enum": [*METHODS]}, *({"$ref": f"#/definitions/method_{name}"} for name in METHODS)]}


def _gate() -> _Node:
    nodes = {key: _node(row, nullable=False) for key, row in GATE_ROWS.items()}
    statistics = "; ".join(f"{row.name}: {row.text}" for row in STATISTICS.values())
    nodes["statistic"]["description"] += f" {statistics}"
    return _object(nodes, description="A filter: what lies outside of its bounds is dropped.")


def _methods() -> dict[str, _Node]:
    return {
        f"method_{name}": _object(
            {"name": {"const": name}} | {key: _parameter(row.hints[key]) for key in row.defaults},
            description=row.formula,
            required=["name"],
        )
        for name, row in METHODS.items()
    }


def _parameter(hint: Any) -> _Node:
    """Return the schema of a method's parameter, from its annotation."""
    if words := words_of(hint):
        return {"enum": [*words, None]}
    if get_origin(hint) is tuple:
        kinds = [_parameter(kind) for kind in get_args(hint)]
        return {"type": ["array", "null"], "items": kinds, "minItems": len(kinds), "maxItems": len(kinds)}
    allowed = hint.__metadata__[0]
    # The smallest number may be another parameter.
    low = allowed.low if isinstance(allowed.low, float | int) else -math.inf
    node = _number(low=low, high=allowed.high, open_low=allowed.open_low, open_high=allowed.open_high)
    return node | {"description": f"In {allowed}."}


def _number(*, low: float, high: float, open_low: bool = False, open_high: bool = False) -> _Node:
    node: _Node = {"type": ["number", "null"]}
    # JSON has no infinity: a bound there is none.
    if math.isfinite(low):
        node["exclusiveMinimum" if open_low else "minimum"] = low
    if math.isfinite(high):
        node["exclusiveMaximum" if open_high else "maximum"] = high
    return node


def _object(properties: dict[str, _Node], **more: Any) -> _Node:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}
