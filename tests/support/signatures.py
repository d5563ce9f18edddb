# SPDX-License-Identifier: Apache-2.0
"""What Python can import from the package, and how it is called."""

import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mis_ext

ROOT = Path(__file__).parents[2]
ROOMS = (
    "diagnosis",
    "dumps",
    "explain",
    "methods",
    "onpolicy",
    "onpolicy.batch_invariant",
    "report",
    "rollout",
    "scoring",
)
PACKAGES = ("mis_ext", *(f"mis_ext.{room}" for room in ROOMS))
HOSTS = ("areal", "ms_swift", "nemo_rl", "openrlhf", "prime_rl", "roll", "skyrl", "trl", "verl")


def dotted() -> Iterator[str]:
    """Every public name with its signature, the attributes of public classes, and what the pages name by its path."""
    for path in sorted({*_public(), *_written()}):
        yield from described(path)


def offered() -> Iterator[str]:
    """What ``from package import *`` gives."""
    for package in PACKAGES:
        yield from (f"{package}: {name}" for name in importlib.import_module(package).__all__)


def _public() -> Iterator[str]:
    yield from (name.replace(": ", ".") for name in offered())
    for host in HOSTS:
        path = f"mis_ext.hosts.{host}"
        own = vars(importlib.import_module(path)).items()
        yield from (f"{path}.{name}" for name, value in own if name[0] != "_" and _home(value) == path)


def _home(value: Any) -> str | None:
    return value.__module__ if inspect.isfunction(value) or inspect.isclass(value) else None


def _written() -> Iterator[str]:
    """Paths in pages, presets and launch scripts, and what these import, as far as it is there."""
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("yaml/*.yaml"), *ROOT.glob("examples/**/*.sh")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        imports = re.findall(r"^ *from (mis_ext[\w.]*) import ([\w, ]+)", text, flags=re.MULTILINE)
        found = {f"{module}.{name.strip()}" for module, names in imports for name in names.split(",")}
        found |= {*re.findall(r"\bmis_ext(?:\.[A-Za-z]\w*)+", text)}
        yield from (path for path in found if not path.endswith((".py", ".sh", ".yaml")) and resolved(path) is not None)


def resolved(path: str) -> Any:
    """The module, or what a module or class has by that name; None where there is none."""
    module, names = path, []
    while module and not is_module(module):
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    found: Any = importlib.import_module(module) if module else None
    for name in names:
        found = getattr(found, name, getattr(found, "__dataclass_fields__", {}).get(name))
    return found


def is_module(path: str) -> bool:
    """Whether it is one of this package, not of another copy that Python also knows."""
    try:
        spec = importlib.util.find_spec(path)
    except ModuleNotFoundError:
        return False
    return spec is not None and Path(spec.origin or "").is_relative_to(Path(mis_ext.__file__).parent)


def described(path: str) -> Iterator[str]:
    """The name with its parameters; of a class also its fields, and the attributes that a page or an example uses."""
    found = resolved(path)
    yield f"{path}{signature(found)}"
    if inspect.isclass(found) and found.__module__.startswith("mis_ext"):
        fields = {*getattr(found, "__dataclass_fields__", ()), *getattr(found, "_fields", ())}
        names = {name for name in dir(found) if name in _used()} | fields
        for name in sorted(name for name in names if name[0] != "_" and _is_own(found, name)):
            yield f"{path}.{name}{signature(getattr(found, name, None))}"


@functools.cache
def _used() -> frozenset[str]:
    """Every word behind a point in the pages and the examples."""
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    return frozenset(name for file in files for name in re.findall(r"\.(\w+)", file.read_text(encoding="utf-8")))


def _is_own(kind: type, name: str) -> bool:
    """Whether a class of ours has the name, not one of Python's."""
    owners = [base for base in kind.__mro__ if name in vars(base) or name in vars(base).get("__annotations__", {})]
    return any(base.__module__.startswith("mis_ext") for base in owners)


def signature(found: Any) -> str:
    """``(a, b=, *, c=)``: ``=`` may be left out by a caller. Nothing for what is not called."""
    is_ours = inspect.isclass(found) and found.__module__.startswith("mis_ext") and not issubclass(found, Exception)
    if not (inspect.isfunction(found) or inspect.ismethod(found) or is_ours):
        return ""
    given, shown = inspect.signature(found).parameters.values(), []
    if any(each.name[0] == "_" for each in given):
        # Nobody but the package makes one.
        return ""
    for each in given:
        if each.kind is each.KEYWORD_ONLY and "*" not in shown and not any(name[0] == "*" for name in shown):
            shown.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(f"{stars}{each.name}{'' if each.default is each.empty else '='}")
    return f"({', '.join(name for name in shown if name not in ('self', 'cls'))})"


def still_called(before: str) -> bool:
    """Whether whoever called the name by its recorded signature still can."""
    path, bracket, parameters = before.rstrip(")").partition("(")
    found = resolved(path)
    parent, _, name = path.rpartition(".")
    # A name may have the value None.
    if found is None and not (parent and hasattr(resolved(parent), name)):
        return False
    if not bracket:
        return True
    (places, words), (places_now, words_now) = _taken(parameters), _taken(signature(found).strip("()"))
    all_before, all_now = {name.rstrip("=") for name in places + words}, {*places_now, *words_now}
    if any(name[:1] == "*" for name in all_now):
        all_now |= {f"{name}=" for name in all_before}
    return (
        # In the same places; under the same name; and what could be left out still can, and so can what is new.
        [name.rstrip("=") for name in places] == [name.rstrip("=") for name in places_now[: len(places)]]
        and all(name in all_now or f"{name}=" in all_now for name in all_before)
        and all(name in all_now for name in places + words if name[-1:] == "=")
        and all(name.rstrip("=") in all_before for name in all_now if name[-1:] != "=" and name[:1] != "*")
    )


def _taken(parameters: str) -> tuple[list[str], list[str]]:
    """Those that are given by their place, and those that are given by name alone."""
    names = parameters.split(", ") if parameters else []
    cut = next((place for place, name in enumerate(names) if name[0] == "*"), len(names))
    return names[:cut], [name for name in names[cut:] if name != "*"]
