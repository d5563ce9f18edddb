"""The only code that reads the hosts' ``args``, whatever kind of object that is."""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping
from typing import Any

from mis_ext.hosts.slime_miles.flat_keys import STRAY_KEYS
from mis_ext.hosts.slime_miles.run_config import ARGUMENTS

NOT_READ = "not read"
"""Stands for the value of an argument that is none of ours: only its name counts, which may be a misspelling."""

_PLAIN = (argparse.Namespace, types.SimpleNamespace)


def read_argument(args: Any, name: str) -> Any:
    """``args.name``, None where there is none: of a namespace, a dataclass, a wrapper, or a mapping."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def read_values(args: Any) -> list[Any]:
    """Of each of ``ARGUMENTS`` its value, None where there is none."""
    if type(args) in _PLAIN:
        # Called for every micro-batch: the objects that both hosts use have nothing but their own attributes.
        return [*map(vars(args).get, ARGUMENTS)]
    return [read_argument(args, name) for name in ARGUMENTS]


def all_arguments(args: Any) -> dict[str, Any]:
    """What a configuration is made of, and the names of all other arguments, among which misspellings hide.

    Attributes of classes and properties count too, and what a wrapper passes on. Others' properties are not called.
    """
    is_mapping = isinstance(args, Mapping)
    names = [*args] if is_mapping else [name for name in dir(args) if not name.startswith("_")]
    values = dict(zip(ARGUMENTS, read_values(args), strict=True))
    # A wrapper may say None for whatever it does not have: that is not the null of a file.
    ours = {name: value for name, value in values.items() if value is not None or name in names}
    ours |= {name: read_argument(args, name) for name in names if name in STRAY_KEYS}
    return dict.fromkeys(names, NOT_READ) | ours
