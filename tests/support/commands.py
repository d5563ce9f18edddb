# SPDX-License-Identifier: Apache-2.0
"""`mis-ext` in this process, as a program reads it."""

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from mis_ext.tools.cli import main


def json_of(*arguments: object) -> tuple[int, Any]:
    """The exit code, and the one document that ``--json`` prints: legal JSON, in one line."""
    with redirect_stdout(StringIO()) as printed:
        code = main([*map(str, arguments), "--json"])
    (line,) = printed.getvalue().splitlines()
    return code, json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
