# SPDX-License-Identifier: Apache-2.0
"""A faster Triton interpreter, with matmuls as on a GPU, where the instruction for a tile rounds all rows equally."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from types import CodeType, ModuleType
from typing import Any

import numpy as np


def dot_row_by_row(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """``tl.dot`` in the interpreter, for each element separately: the terms are added in the order of k.

    The interpreter multiplies by ``numpy.matmul``, where the BLAS may round the rows of one tile differently. OpenBLAS
    0.3.29 does so in its kernels for Haswell, those of a CPU without AVX-512, not in those for SkylakeX.
    """
    a_data, b_data = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    total = np.zeros_like(d.data)
    for k in range(a_data.shape[-1]):
        total += a_data[..., :, k, None] * b_data[..., k, None, :]
    return type(d)(total + d.data, d.dtype.scalar)


def quicken(interpreter: ModuleType) -> None:
    """Cache the repeated work of the interpreter, which takes most of its time.

    For each function that a kernel calls it patches all of Triton's language, for the type of each number it makes a
    table of all types, for each tensor its type and its shape anew, it broadcasts what has one shape already, for each
    function it reads and parses its source, and it looks for integers that overflow, as compiled kernels do not.
    """
    patch, launch, types = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    language, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    make, broadcast = language.tensor.__init__, semantic.broadcast_impl_value
    block_type, scalar_type = language.block_type, language.dtype
    equal = scalar_type.__eq__
    patched: set[int] = set()
    known: dict[str, np.dtype] = {}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    def launch_anew(self: Any, *args: Any, **keywords: Any) -> None:
        patched.clear()
        # The logarithm of 0 is minus infinity, as on a GPU, and no warning.
        with np.errstate(divide="ignore", invalid="ignore"):
            launch(self, *args, **keywords)

    def patch_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names not in patched:
            patched.add(names)
            return patch(function)
        return None

    def known_type(of: Any) -> np.dtype:
        if of.name not in known:
            known[of.name] = types(of)
        return known[of.name]

    def make_alike(self: Any, handle: Any, type: Any) -> None:
        if (shaped := vars(type).get("shaped")) is None:
            make(self, handle, type)
            type.shaped = (self.shape, self.numel, self.dtype)
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = shaped

    def known_block(element: Any, shape: Any) -> Any:
        key = (element.name, (*shape,))
        if key not in blocks:
            blocks[key] = block_type(element, shape)
        return blocks[key]

    def broadcast_other(self: Any, left: Any, right: Any) -> Any:
        is_alike = left.type.is_block() and right.type.is_block() and left.type.shape == right.type.shape
        return (left, right) if is_alike else broadcast(self, left, right)

    def same_type(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, patch_once
    interpreter._get_np_dtype, language.tensor.__init__ = known_type, make_alike
    interpreter.InterpreterBuilder.get_block_ty = lambda self, element, shape: known_block(element, shape)
    block_type.with_element_ty = lambda self, element: known_block(element, self.shape)
    semantic.broadcast_impl_value, scalar_type.__eq__ = broadcast_other, same_type
    interpreter.FunctionRewriter.rewrite_ast = _rewritten
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def _rewritten(self: Any) -> Any:
    """Like ``rewrite_ast`` of the interpreter; kernels that differ only in their global names share code."""
    function = self.fn
    module = vars(sys.modules[type(self).__module__])
    names = function.__globals__
    names |= {name: value for name, value in module.items() if name not in names}
    found: dict[str, Any] = {**self.kwargs}
    exec(_code(function.__code__.co_filename, function.__code__.co_firstlineno, self.ast_transformer), names, found)
    return found[function.__name__]


@functools.cache
def _code(file: str, first_line: int, transformer: ast.NodeTransformer) -> CodeType:
    node = transformer.visit(_functions(file)[first_line])
    node.decorator_list = []
    return compile(ast.fix_missing_locations(ast.Module([node], [])), file, "exec")


@functools.cache
def _functions(file: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line of their first decorator."""
    tree = ast.parse("".join(linecache.getlines(file)))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {min(each.lineno for each in (node, *node.decorator_list)): node for node in functions}
