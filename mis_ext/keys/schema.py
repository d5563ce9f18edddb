# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a configuration file, with which editors complete and check it.

It describes each key by itself. The loader refuses all that the schema refuses, values of a method's parameters, and
combinations of keys too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mis_ext.correction.tokens import STATISTICS
from mis_ext.keys.names import NO_NULL
from mis_ext.keys.rows import GATE_ROWS, PREFIXES, ROWS, TIS_OF_FRAMEWORKS, Key
from mis_ext.methods.catalogue import METHODS

_Node = dict[str, Any]


def json_schema() -> _Node:
    """The schema (draft 7) of a file for ``--custom-config-path``."""
    ours = "|".join([*ROWS, *TIS_OF_FRAMEWORKS])
    gate = {key: _node(row.values.schema, row) for key, row in GATE_ROWS.items()}
    statistics = "; ".join(f"{row.name}: {row.text}" for row in STATISTICS.values())
    gate["statistic"]["description"] += f" {statistics}"
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of mis_ext",
        "description": "For --custom-config-path of slime and Miles. Keys without our prefixes are the framework's.",
        "type": "object",
        "properties": {
            key: _node(row.values.schema if key in NO_NULL else {"anyOf": [row.values.schema, {"type": "null"}]}, row)
            for key, row in ROWS.items()
        },
        "patternProperties": {
            f"^(?!({ours})$)({'|'.join(PREFIXES)})": {"not": {}, "errorMessage": "mis_ext has no such key"}
        },
        "definitions": {
            "gate": _object(gate, description="A filter: what lies outside of its bounds is dropped."),
            "method": {
                "anyOf": [{"enum": [*METHODS]}, *({"$ref": f"#/definitions/method_{name}"} for name in METHODS)]
            },
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
    (_, legal, _), default, text, unit = ROWS[name]
    default = json.dumps(default) if isinstance(default, bool) else default
    return {"key": name, "legal": legal, "default": default or None, "unit": unit or None, "what": text}


def _node(values: Mapping[str, Any], row: Key) -> _Node:
    text = f"{row.text} In {row.unit}." if row.unit else row.text
    return {**values, "description": text} | ({} if row.default in (None, ()) else {"default": row.default})


def _object(properties: _Node, **more: Any) -> _Node:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}
