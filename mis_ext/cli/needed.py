"""Packages that a command needs."""

from __future__ import annotations

import importlib


def require(*modules: str, install: str) -> None:
    """Say what to install, before any work is done.

    Raises:
        OSError: A module is not there; the message says how to get it.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise OSError(f"needs {module}: pip install {install}") from error
