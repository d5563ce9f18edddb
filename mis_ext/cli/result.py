"""What a command hands back: one content, for programs and for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What a command found.

    ``content`` is all of it, as :func:`~mis_ext.jsonable.to_jsonable` takes it. ``show`` prints it for people. ``code``
    is the exit code.
    """

    content: Any
    show: Callable[[], object]
    code: int = 0
