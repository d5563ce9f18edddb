# SPDX-License-Identifier: Apache-2.0
"""Changes of meaning of a Python file, each of one expression or statement. ``mutate.py`` draws among them.

Not changed: strings, annotations, decorators, ``__all__``, what stands behind ``raise``, ``strict`` and ``encoding``.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

OPERATORS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sum": "max",
    "mean": "sum",
    "amin": "amax",
    "amax": "amin",
    "argmin": "argmax",
    "argmax": "argmin",
    "minimum": "maximum",
    "maximum": "minimum",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "floor": "ceil",
    "ceil": "floor",
    "exp": "expm1",
    "expm1": "exp",
    "log": "log1p",
    "log1p": "log",
    "zeros": "ones",
    "ones": "zeros",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "isfinite": "isnan",
    "startswith": "endswith",
    "endswith": "startswith",
    "append": "extend",
    "extend": "append",
}
DECLARED = ("annotation", "returns", "decorator_list", "strict", "encoding")
Pair = tuple[ast.AST, ast.AST]
"""What is replaced, by what."""


class Place(NamedTuple):
    """An expression or statement of a file, and all that may be put there."""

    path: str
    scopes: tuple[str, ...]
    """The classes and functions around it."""
    pairs: tuple[Pair, ...]


class Change(NamedTuple):
    """One change of one file."""

    path: str
    line: int
    scopes: tuple[str, ...]
    before: str
    """The lines that change, as they are."""
    after: str
    text: str
    """The whole file after the change."""


def places_of(path: str, source: str) -> list[Place]:
    """Every place of a file where a change has a meaning."""
    found = ((scopes, tuple(_pairs(node))) for scopes, node in _nodes(ast.parse(source), ()))
    return [Place(path, scopes, pairs) for scopes, pairs in found if pairs]


def change_at(place: Place, source: str, generator: random.Random) -> Change | None:
    """One of the changes of a place; None where it leaves the same program or none at all."""
    target, replacement = generator.choice(place.pairs)
    lines = source.encode().splitlines(keepends=True)
    first, last = target.lineno - 1, target.end_lineno - 1
    head, tail = lines[first][: target.col_offset], lines[last][target.end_col_offset :]
    middle = b"".join(lines[first : last + 1])[len(head) : -len(tail) or None].decode()
    # Within an f-string, older versions of Python do not know where an expression stands.
    if isinstance(target, ast.expr) and _dump(f"({middle})") != _dump(f"({ast.unparse(target)})"):
        return None
    new = ast.unparse(replacement)
    texts = [
        "".join((b"".join(lines[:first]) + head).decode() + part + (tail + b"".join(lines[last + 1 :])).decode())
        for part in (new, f"({new})")
    ]
    if isinstance(target, ast.expr) and _dump(texts[0]) != _dump(texts[1]):
        texts.reverse()
    if _dump(texts[0]) in (None, _dump(source)):
        return None
    before, after = source.splitlines(), texts[0].splitlines()
    end = len(before) - last - 1
    return Change(
        place.path,
        first + 1,
        place.scopes,
        "\n".join(before[first : last + 1]),
        "\n".join(after[first : len(after) - end]),
        texts[0],
    )


def _dump(source: str) -> str | None:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return None


def _nodes(node: ast.AST, scopes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    """The nodes below that have a meaning, each with the functions around it."""
    yield scopes, node
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scopes = (*scopes, node.name)
    declared = (*DECLARED, "test", "body") if _is_for_types(node) else DECLARED
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in declared and getattr(child, "arg", None) not in declared:
                yield from _nodes(child, scopes)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _other(items: Sequence, index: int, *new: object) -> list:
    return [*items[:index], *new, *items[index + 1 :]]


def _shifted(node: ast.expr) -> Iterator[Pair]:
    for operator in (ast.Add, ast.Sub):
        yield node, ast.BinOp(node, operator(), ast.Constant(1))


def _pairs(node: ast.AST) -> Iterator[Pair]:
    """What a node may become."""
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                for other in OPERATORS[type(operator)]:
                    yield node, _with(node, ops=_other(operators, index, other()))
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr() | ast.List() | ast.Tuple()):
            pass
        case ast.BinOp(right=ast.Constant(value=str()) | ast.JoinedStr() | ast.List() | ast.Tuple()):
            pass
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator):
            for other in OPERATORS.get(type(operator), ()):
                yield node, _with(node, op=other())
        case ast.BoolOp(op=operator, values=values):
            yield node, _with(node, op=OPERATORS[type(operator)][0]())
            for index in range(len(values)):
                left = _other(values, index)
                yield node, left[0] if len(left) == 1 else _with(node, values=left)
        case ast.UnaryOp(operand=operand):
            yield node, operand
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from ((node, ast.Constant(value + 1)), (node, ast.Constant(value - 1)))
        case ast.Constant(value=float(value)):
            yield node, ast.Constant(2 * value if value else 1.0)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for index in range(len(arguments) - 1):
                pair = arguments[index + 1], arguments[index]
                yield node, _with(node, args=[*arguments[:index], *pair, *arguments[index + 2 :]])
            for index, keyword in enumerate(keywords):
                if keyword.arg and keyword.arg not in DECLARED:
                    yield node, _with(node, keywords=_other(keywords, index))
            if isinstance(function, ast.Name) and function.id == "range":
                yield from _shifted(arguments[-1])
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield node, ast.Name(NAMES[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            yield node, _with(node, attr=NAMES[name])
        case ast.Slice(lower=lower, upper=upper):
            for bound in filter(None, (lower, upper)):
                yield from _shifted(bound)
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not _is_for_types(node):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=tests):
            yield from ((test, ast.UnaryOp(ast.Not(), test)) for test in tests)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()
