# SPDX-License-Identifier: Apache-2.0
"""Recording of the inputs and outputs of every module of a model, through hooks that change nothing."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mis_ext.onpolicy.recording.recordings import Kind, Recording, RecordingBuilder, describe
from mis_ext.onpolicy.recording.rows import LAYOUTS, Layout, Rows, place_rows
from mis_ext.validation import check_choice, did_you_mean

RowsOf = Callable[[Module, tuple[Any, ...], dict[str, Any]], Rows | None]


@contextmanager
def record(
    model: Module,
    *,
    modules: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    rows_of: RowsOf | None = None,
    layout: Layout | None = None,
) -> Iterator[Recorder]:
    """Record the inputs and outputs of modules in every forward of ``model`` inside this block, by token.

    No output bit and no gradient changes: recorded tensors are detached and copied to the CPU. Only calls inside a call
    of ``model`` are recorded, and nothing in a backward pass, which may recompute activations. Hooks do not see inside
    a compiled or captured graph, and are not part of code that is compiled in the block.

    Inputs are labeled by the parameters of the module's ``forward``, also if passed by position. Tensors are found in
    tuples, lists and mappings, and in returned dataclasses. Inputs that are not per token, such as masks, caches and
    parameters, are only listed. Numbers and strings are not recorded.

    Args:
        model: The module; each of its calls is one forward.
        modules: The modules to record, as shell patterns of their names (``*`` also matches dots; the model itself is
            ``""``).
        exclude: Modules to exclude, likewise: those with their own order of tokens, such as MoE experts. With one
            expert per token, the shape does not show this.
        rows_of: A function of the model, ``args`` and ``kwargs`` of a forward, called in its thread, that returns the
            tokens of the forward; None skips it. Without this function, set the tokens with :meth:`Recorder.rows`.
        layout: The order of tokens in tensors whose shape fits both ``[b, s, ...]`` and ``[s, b, ...]``.

    Yields:
        The recorder; its :meth:`Recorder.recording` stays available after the block, also after an exception.

    Raises:
        ValueError: A pattern matches no module, or a choice is unknown. In a forward: no rows were set, or the layout
            of a tensor is ambiguous (the message names the module). An error in another thread is also raised at the
            end of the block, because engines swallow it.
    """
    recorder = Recorder(model, modules, exclude, rows_of=rows_of, layout=layout)
    with recorder._attached():
        yield recorder
    if recorder.error is not None:
        raise recorder.error


class _Forward:
    """One running call of the model: its tokens, the number of calls of each module, and the open calls."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.num_calls: Counter[str] = Counter()
        self.open_calls: dict[str, list[str]] = defaultdict(list)


class Recorder:
    """Hooks on the modules of a model, and their collected rows. Created by :func:`record`."""

    def __init__(
        self,
        model: Module,
        modules: Sequence[str],
        exclude: Sequence[str],
        *,
        rows_of: RowsOf | None,
        layout: Layout | None,
    ) -> None:
        check_choice("layout", layout or "bsh", LAYOUTS)
        named = dict(model.named_modules())
        for pattern in (*modules, *exclude):
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ValueError(f"no module matches {pattern!r}{did_you_mean(pattern, named)}")
        self.error: BaseException | None = None
        self._model = model
        matches = {name: [any(fnmatchcase(name, x) for x in given) for given in (modules, exclude)] for name in named}
        self._modules = {name: module for name, module in named.items() if matches[name] == [True, False]}
        self._rows_of = rows_of
        self._rows: Rows | None = None
        self._layout = layout
        self._builder, self._lock = RecordingBuilder(), threading.Lock()
        self._running, self._owner = threading.local(), threading.get_ident()

    @contextmanager
    def rows(self, rows: Rows) -> Iterator[None]:
        """Set the tokens of the forwards in this block, in any thread."""
        previous, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = previous

    def recording(self) -> Recording:
        """Everything recorded so far.

        Raises:
            ValueError: A row was recorded twice with different bits.
        """
        with self._lock:
            return self._builder.build()

    @contextmanager
    def _attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            begin = self._noting(self._begin)
            stack.callback(self._model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            for name, module in self._modules.items():
                before = self._noting(partial(self._before, name, _positional_parameters(module)))
                after = self._noting(partial(self._after, name))
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            # Also if the forward raises an error: calls outside of a forward are not recorded.
            stack.callback(self._model.register_forward_hook(self._end, always_call=True).remove)
            yield

    def _begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.forward = None
        rows = self._rows if self._rows_of is None else self._rows_of(model, args, kwargs)
        if rows is not None:
            self._running.forward = _Forward(rows)
            with self._lock:
                self._builder.begin_forward()
        elif self._rows_of is None:
            raise ValueError("a forward without rows: wrap it in recorder.rows(...), or pass rows_of to record()")

    def _end(self, *_: Any) -> None:
        self._running.forward = None

    def _before(
        self, name: str, parameters: list[str], _: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        forward: _Forward | None = getattr(self._running, "forward", None)
        if forward is not None:
            call = f"{name}#{forward.num_calls[name]}" if forward.num_calls[name] else name
            forward.num_calls[name] += 1
            forward.open_calls[name].append(call)
            labels = [*parameters[: len(args)], *map(str, range(len(parameters), len(args)))]
            given = {**dict(zip(labels, args, strict=True)), **kwargs}
            self._add("inputs", call, _tensors_in(given), forward)
            for label, value in given.items():
                if not (value is None or isinstance(value, (int, float, str)) or any(_tensors_in(value))):
                    self._skip("inputs", call, label, f"a {type(value).__name__}")

    def _after(self, name: str, _: Module, __: Any, output: Any) -> None:
        forward: _Forward | None = getattr(self._running, "forward", None)
        if forward is not None:
            call, tensors = forward.open_calls[name].pop(), [*_tensors_in(output, of_dataclasses=True)]
            self._add("outputs", call, tensors, forward)
            # Functions and None have no values to compare.
            if not tensors and output is not None and not callable(output):
                self._skip("outputs", call, "", f"no activations in a {type(output).__name__}")

    def _add(self, kind: Kind, call: str, tensors: Iterable[tuple[str, Tensor]], forward: _Forward) -> None:
        for label, tensor in tensors:
            placed = place_rows(tensor, forward.rows, where=f"{describe(call, label)} {kind}", layout=self._layout)
            if placed is None:
                self._skip(kind, call, label, f"no token dimensions in {[*tensor.shape]}")
            else:
                with self._lock:
                    self._builder.add(kind, call, label, placed)

    def _skip(self, kind: Kind, call: str, label: str, reason: str) -> None:
        with self._lock:
            self._builder.skip(kind, call, label, reason)

    def _noting(self, hook: Callable[..., None]) -> Callable[..., None]:
        def noting_hook(*args: Any) -> None:
            # A traced hook would break the graph, and thus change bits. In a backward pass a forward is a
            # recomputation.
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
                return
            try:
                hook(*args)
            except Exception as error:
                if threading.get_ident() != self._owner:
                    self.error = self.error or error
                raise

        return noting_hook


def _positional_parameters(module: Module) -> list[str]:
    """The parameters of the forward that can be passed by position; none if it is not Python."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _tensors_in(value: Any, label: str = "", *, of_dataclasses: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Activations in nested tuples, lists and mappings, with their path, without parameters."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if not isinstance(value, Parameter):
            yield label, value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif of_dataclasses and dataclasses.is_dataclass(value):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    for key, item in items:
        yield from _tensors_in(item, f"{label}.{key}" if label else str(key), of_dataclasses=of_dataclasses)
