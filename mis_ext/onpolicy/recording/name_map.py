"""Which module of one model is which of another."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from mis_ext.files import read_yaml

Parts = Callable[[Tensor], Mapping[str, Tensor]]
_PLACEHOLDER = re.compile(r"\\?\{(\w+)\\?\}")


class Target(NamedTuple):
    """What a module is compared with: the pair that says so (None: nothing said), and a name or a transform."""

    source: str | None
    name: str
    parts: Callable[[Tensor], dict[str, Tensor]] | None


class NameMap:
    """Module names of model a to those of model b; a name that no pair matches is its own counterpart.

    Args:
        pairs: From a name of a, in which ``{layer}`` (or any word, each once) stands for one dot-free part, to a name
            of b with the same placeholders; or, where b splits or permutes what a computes in one module, to a function
            of a's rows ``[N, ...]`` that returns the rows of each module of b, by name. Exact names win over patterns,
            then the first that matches. The model itself is ``""``. A pair for a later call of a module (``name#1``)
            wins over one for all its calls.

    Raises:
        ValueError: A target uses a placeholder that its source does not have, or a source has one twice or one that is
            no word.
    """

    def __init__(self, pairs: Mapping[str, str | Parts]) -> None:
        self.pairs = dict(pairs)
        for source, target in self.pairs.items():
            unknown = (
                set(_PLACEHOLDER.findall(target)) - set(_PLACEHOLDER.findall(source))
                if isinstance(target, str)
                else set()
            )
            if unknown:
                raise ValueError(f"{target!r} has placeholders that {source!r} does not: {sorted(unknown)}")
        self._patterns = {source: _pattern(source) for source in sorted(self.pairs, key=lambda x: "{" in x)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NameMap:
        """Read pairs of names from a YAML or JSON file.

        Raises:
            ValueError: The file is not a mapping of strings to strings.
        """
        pairs = read_yaml(os.fspath(path))
        if not all(isinstance(name, str) for name in pairs.values()):
            raise ValueError(f"{os.fspath(path)} must map module names to module names, both strings")
        return cls(pairs)

    def target(self, name: str) -> Target:
        """The counterpart of module ``name``; a later call (``name#1``) has the same call of the counterpart."""
        base, mark, call = name.partition("#")
        return self._match(name, "") or self._match(base, mark + call) or Target(None, name, None)

    def _match(self, name: str, call: str) -> Target | None:
        for source, pattern in self._patterns.items():
            match = pattern.fullmatch(name)
            if match is None:
                continue
            target, fields = self.pairs[source], match.groupdict()
            if isinstance(target, str):
                return Target(source, target.format(**fields) + call, None)
            return Target(source, name + call, partial(_split, source, target, fields, call))
        return None


def _pattern(source: str) -> re.Pattern[str]:
    names = _PLACEHOLDER.findall(source)
    wrong = sorted({name for name in names if names.count(name) > 1 or not name.isidentifier()})
    if wrong:
        raise ValueError(f"{source!r} in names has placeholders that are there twice or are no words: {wrong}")
    return re.compile(_PLACEHOLDER.sub(r"(?P<\1>[^.#]+)", re.escape(source)))


def _split(source: str, split: Parts, fields: dict[str, Any], call: str, values: Tensor) -> dict[str, Tensor]:
    parts = {part.format(**fields) + call: rows for part, rows in split(values).items()}
    for part, rows in parts.items():
        if rows.shape[:1] != values.shape[:1]:
            raise ValueError(f"{source!r} in names: {part!r} has shape {[*rows.shape]} for {len(values)} rows")
    return parts
