# SPDX-License-Identifier: Apache-2.0
"""Comparison of two recordings of the same tokens: the first different module and position, and the culprit module."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import Tensor

from mis_ext.files import read_yaml
from mis_ext.onpolicy.recording.differences import (
    InputDifference,
    Row,
    RowDifference,
    row_difference,
    row_size,
)
from mis_ext.onpolicy.recording.recordings import Recording, describe
from mis_ext.onpolicy.recording.rows import PlacedRows
from mis_ext.validation import check_instance

Verdict = Literal["EXACT", "DIFFERENT", "INVALID"]


@dataclass(frozen=True, kw_only=True)
class ModuleDifference:
    """One output of one module, compared bit for bit.

    Attributes:
        name: The module in a, with the label of the output if it has several; ``(model)`` for the model itself.
        other: The same in b.
        order: Index of the output in a's order of execution.
        num_rows: Number of compared rows.
        num_differing: Number of rows with a different bit.
        max_abs: Largest absolute difference; NaN if only one side is NaN.
        max_ulp: Largest distance in units in the last place, without NaNs.
        num_nan: Elements that are NaN on either side. The same NaN on both sides is not a difference, but makes the
            verdict INVALID, as in :func:`mis_ext.onpolicy.audit_logprobs`.
        first: The first differing row, by sequence, then position.
        inputs_equal: Whether every input of the module is equal up to the first differing row, in its sequence; or in
            all rows if no row differs. None if no input differs, but not all were compared, or this row of an input is
            missing.
        compared_inputs: Labels, in a, of the compared inputs.
        uncompared_inputs: Labels of inputs that only one side has per token, or that are not per token.
        culprit_row: The first row that differs although the compared inputs are equal up to it; None if there is none,
            or if an inner module has one.
    """

    name: str
    other: str
    order: int
    num_rows: int
    num_differing: int
    max_abs: float
    max_ulp: int
    num_nan: int
    first: Row | None
    inputs_equal: bool | None
    compared_inputs: tuple[str, ...]
    uncompared_inputs: tuple[str, ...]
    culprit_row: Row | None

    @property
    def is_culprit(self) -> bool:
        """True if a difference arises in this module."""
        return self.culprit_row is not None

    def __str__(self) -> str:
        return f"{self.name}: equal" if self.first is None else self._at(self.first)

    def blame(self) -> str:
        """The first row with equal inputs and a different output, as a sentence; else the first different row."""
        return str(self) if self.culprit_row is None else self._at(self.culprit_row)

    def inputs_besides(self) -> str:
        """The inputs that were not compared, as the end of a sentence about equal inputs."""
        return f" but for {', '.join(self.uncompared_inputs)} (not compared)" if self.uncompared_inputs else ""

    def _at(self, row: Row) -> str:
        inputs = {True: "inputs equal", False: "inputs differ", None: "inputs unknown"}[self.inputs_equal]
        if row == self.culprit_row:
            inputs = f"inputs equal{self.inputs_besides()}"
        # Only integers, NaNs, 8-bit floats and signed zeros differ by 0 ULP.
        by = f"abs {self.max_abs:.3g}" if not self.max_ulp and self.max_abs else f"{self.max_ulp} ULP"
        return f"{self.name} (sequence {row.sequence}, position {row.position}): {inputs}, output differs, max {by}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of :func:`mis_ext.onpolicy.recording.compare.compare`.

    Attributes:
        modules: Every compared output, in a's order of execution.
        problems: Outputs that could not be compared, or exist on only one side, and were not allowed.
        skipped: Outputs that neither side has per token, such as tables of positions. They are not compared, and not a
            problem.
    """

    modules: tuple[ModuleDifference, ...]
    problems: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def first_divergent(self) -> ModuleDifference | None:
        """The first module with a different output, in a's order of execution; its ``first`` is the position."""
        return next((module for module in self.modules if module.num_differing), None)

    @property
    def culprits(self) -> tuple[ModuleDifference, ...]:
        """Modules whose output differs although their inputs are equal."""
        return tuple(module for module in self.modules if module.is_culprit)

    @property
    def num_rows(self) -> int:
        """Number of compared rows (tokens of an output), over all outputs."""
        return sum(module.num_rows for module in self.modules)

    @property
    def num_nan(self) -> int:
        """Elements that are NaN on either side, over all outputs."""
        return sum(module.num_nan for module in self.modules)

    @property
    def verdict(self) -> Verdict:
        """EXACT: complete, without NaN, and all bits equal. DIFFERENT: some bit differs. INVALID: undecided."""
        if self.first_divergent is not None:
            return "DIFFERENT"
        return "INVALID" if self.problems or not self.num_rows or self.num_nan else "EXACT"

    @property
    def passed(self) -> bool:
        """True if the verdict is EXACT."""
        return self.verdict == "EXACT"

    def summary(self) -> str:
        """The verdict, the first divergence, the culprits and the problems, in plain text."""
        lines = [f"{self.verdict}: {self.num_rows} rows of {len(self.modules)} outputs compared"]
        first = self.first_divergent
        if first is not None:
            lines.append(f"first divergence: {first}")
            lines += [f"culprit: {module.blame()}" for module in self.culprits if module is not first]
            if not self.culprits:
                why = "the difference arises between the recorded modules, before its first place"
                if first.inputs_equal is None and not first.compared_inputs and first.uncompared_inputs:
                    labels = ", ".join(first.uncompared_inputs)
                    why = f"inputs of the first divergence were not compared: {labels}"
                elif first.inputs_equal is None:
                    why = "the inputs of the first divergence were not recorded on both sides"
                lines.append(f"no culprit: {why}")
        with_nan = [module.name for module in self.modules if module.num_nan]
        lines += [f"{self.num_nan} elements are NaN, first in {with_nan[0]}"] if with_nan else []
        lines += [f"not compared: {', '.join(self.skipped)}"] if self.skipped else []
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def compare(
    a: Recording,
    b: Recording,
    *,
    names: NameMap | Mapping[str, str | Parts] | None = None,
    allow: Sequence[str] = (),
) -> Comparison:
    """Compare two recordings of the same tokens bitwise.

    Outputs of a pair of modules are paired by label, and otherwise the first with the first, so that a tensor, a tuple
    and a named result can be compared. Inputs are paired in the same way, with limits
    (:class:`mis_ext.onpolicy.recording.differences.InputDifference`). Inputs count as equal if they are equal in the
    same sequence up to and including the row, which is all that a causal model may read. Some inputs are not compared:
    those of only one side (engines pass tables of positions or a residual to different modules), and those that are not
    per token, such as a cache or a mask. Then the inputs are not called equal, but the module can still be a culprit by
    its compared inputs, and the message names the other inputs.

    Args:
        a: One recording; its order of execution is used.
        b: The other recording.
        names: Maps a's module names to b's.
        allow: Shell patterns of modules (by either name) that may be missing on one side, or have different rows,
            dtypes, or row sizes. Values on both sides must still be equal.
    """
    for side, recording in (("a", a), ("b", b)):
        check_instance(side, recording, Recording)
    names = names if isinstance(names, NameMap) else NameMap(names or {})
    findings = _Findings(allow)
    # Keyed by the name without the number of the call.
    compared: list[tuple[str, ModuleDifference]] = []
    for pair in _pairs(a, b, names, findings):
        difference = _compare_pair(pair, a, b, findings)
        if difference is not None:
            compared.append((pair.module_a.partition("#")[0], difference))
    culprits = {base for base, module in compared if module.is_culprit}
    modules = []
    for base, module in compared:
        has_inner = any(inner != base and (not base or inner.startswith(f"{base}.")) for inner in culprits)
        # The inner culprit is the cause.
        modules.append(replace(module, culprit_row=None) if has_inner else module)
    return Comparison(
        modules=tuple(sorted(modules, key=lambda module: module.order)),
        problems=tuple(findings.problems),
        skipped=tuple(key for key in a.skipped if key in b.skipped and key.endswith(" outputs")),
    )


class _Findings:
    def __init__(self, allow: Sequence[str]) -> None:
        self._allow = allow
        self.problems: list[str] = []

    def is_allowed(self, *names: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._allow for name in names)

    def add(self, message: str, *names: str) -> None:
        if not self.is_allowed(*names):
            self.problems.append(message)


class _Pair(NamedTuple):
    module_a: str
    module_b: str
    name_a: str
    name_b: str
    a: PlacedRows
    b: PlacedRows


def _pairs(a: Recording, b: Recording, names: NameMap, findings: _Findings) -> Iterator[_Pair]:
    """Every output of both; outputs of only one side become findings."""
    met: set[str] = set()
    used: set[str | None] = set()
    for module, entries in a.outputs.items():
        source, targets = names.targets(module, entries)
        for name, outputs in targets.items():
            met.add(name)
            if name not in b.outputs:
                findings.add(f"{_both(module, name)}: missing in b{_why(b, name)}", module, name)
                continue
            used.add(source)
            labels = _paired_labels(outputs, b.outputs[name])
            for label_a, label_b in labels:
                name_a, name_b = _shown(module, label_a, outputs), _shown(name, label_b, b.outputs[name])
                yield _Pair(module, name, name_a, name_b, outputs[label_a], b.outputs[name][label_b])
            for side, own, index, whole in (("b", outputs, 0, module), ("a", b.outputs[name], 1, name)):
                for label in [label for label in own if label not in {pair[index] for pair in labels}]:
                    findings.add(f"{describe(whole, label)}: missing in {side}", module, name)
    for name in [name for name in b.outputs if name not in met]:
        findings.add(f"{describe(name)}: missing in a{_why(a, name)}", name)
    # Never allowed: a misspelled name would compare nothing.
    unused = [source for source in names.pairs if source not in used]
    findings.problems.extend(f"{source!r} in names pairs no two modules" for source in unused)


def _compare_pair(pair: _Pair, a: Recording, b: Recording, findings: _Findings) -> ModuleDifference | None:
    shown, modules = _both(pair.name_a, pair.name_b), (pair.module_a, pair.module_b)
    if row_size(pair.a) != row_size(pair.b):
        shapes = f"{[*pair.a.values.shape[1:]]} and {[*pair.b.values.shape[1:]]}"
        findings.add(f"{shown}: rows of shape {shapes}", *modules)
        return None
    if pair.a.values.dtype != pair.b.values.dtype:
        findings.add(f"{shown}: {pair.a.values.dtype} and {pair.b.values.dtype}", *modules)
    found = row_difference(pair.a, pair.b)
    if not len(found.differs_N):
        findings.add(f"{shown}: no row in common", *modules)
    elif found.num_only_a or found.num_only_b:
        only = f"{found.num_only_a} rows only in a, {found.num_only_b} only in b"
        findings.add(f"{shown}: {only}", *modules)
    inputs = InputDifference(
        a.inputs.get(pair.module_a, {}), b.inputs.get(pair.module_b, {}), any_dtype=findings.is_allowed(*modules)
    )
    uncompared = (*inputs.unpaired, *_skipped_inputs(a, pair.module_a), *_skipped_inputs(b, pair.module_b))
    differing_N = found.differs_N.nonzero()[:, 0]
    is_there_N, differ_N = inputs.up_to(found.sequence_N[differing_N], found.position_N[differing_N])
    culprit_N = differing_N[is_there_N & ~differ_N]
    is_there, differ = bool(inputs.compared), inputs.differ
    if len(differing_N):
        is_there, differ = bool(is_there_N[0]), bool(differ_N[0])
    inputs_equal = False if differ else True if is_there and not uncompared else None
    return ModuleDifference(
        name=pair.name_a,
        other=pair.name_b,
        order=pair.a.order,
        num_rows=len(found.differs_N),
        num_differing=len(differing_N),
        max_abs=found.max_abs,
        max_ulp=found.max_ulp,
        num_nan=found.num_nan,
        first=_first(found, differing_N),
        inputs_equal=inputs_equal,
        compared_inputs=inputs.compared,
        uncompared_inputs=tuple(dict.fromkeys(uncompared)),
        culprit_row=_first(found, culprit_N),
    )


def _first(found: RowDifference, index_N: Tensor) -> Row | None:
    if not len(index_N):
        return None
    return Row(int(found.sequence_N[index_N[0]]), int(found.position_N[index_N[0]]))


def _paired_labels(a: Mapping[str, PlacedRows], b: Mapping[str, PlacedRows]) -> list[tuple[str, str]]:
    """Common labels, and the first with the first if neither is common."""
    pairs = [(label, label) for label in a if label in b]
    if a and b and not {next(iter(a)), next(iter(b))} & {label for label, _ in pairs}:
        pairs.insert(0, (next(iter(a)), next(iter(b))))
    return pairs


def _both(a: str, b: str) -> str:
    return describe(a) if a == b else f"{describe(a)} / {describe(b)}"


def _shown(module: str, label: str, entries: Mapping[str, PlacedRows]) -> str:
    return describe(module, label if len(entries) > 1 else "")


def _why(recording: Recording, module: str) -> str:
    reasons = [
        reason
        for key, reason in recording.skipped.items()
        if key.endswith(" outputs") and key.removesuffix(" outputs").partition("[")[0] == describe(module)
    ]
    return f" ({reasons[0]})" if reasons else ""


def _skipped_inputs(recording: Recording, module: str) -> list[str]:
    start, end = f"{describe(module)}[", "] inputs"
    return [key[len(start) : -len(end)] for key in recording.skipped if key.startswith(start) and key.endswith(end)]


Parts = Callable[[Tensor], Mapping[str, Tensor]]
_PLACEHOLDER = re.compile(r"\\?\{(\w+)\\?\}")


class NameMap:
    """Maps module names of model a to those of model b. A name without a pair maps to itself.

    Args:
        pairs: Maps a name of a, in which ``{layer}`` (or any word, each once) matches one part without a dot, to a name
            of b with the same placeholders. If b splits or permutes the output of one module of a, it maps to a
            function of a's rows ``[N, ...]`` that returns the rows of each module of b, by name. Exact names take
            precedence over patterns, then the first match. The model itself is ``""``. A pair for a later call of a
            module (``name#1``) takes precedence over a pair for all calls.

    Raises:
        ValueError: A target uses a placeholder that its source does not have, or a source has a duplicate or illegal
            placeholder.
    """

    def __init__(self, pairs: Mapping[str, str | Parts]) -> None:
        self.pairs = dict(pairs)
        for source, target in self.pairs.items():
            found = _PLACEHOLDER.findall(target) if isinstance(target, str) else []
            unknown = {*found} - {*_PLACEHOLDER.findall(source)}
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

    def targets(
        self, module: str, entries: Mapping[str, PlacedRows]
    ) -> tuple[str | None, dict[str, Mapping[str, PlacedRows]]]:
        """The pair that matches a module (None: no pair), and its outputs by their module in b.

        A later call (``name#1``) maps to the same call of the counterpart.
        """
        base, mark, call = module.partition("#")
        for name, suffix in ((module, ""), (base, mark + call)):
            for source, pattern in self._patterns.items():
                if match := pattern.fullmatch(name):
                    return source, _split(source, self.pairs[source], match.groupdict(), suffix, entries)
        return None, {module: entries}


def _pattern(source: str) -> re.Pattern[str]:
    names = _PLACEHOLDER.findall(source)
    wrong = sorted({name for name in names if names.count(name) > 1 or not name.isidentifier()})
    if wrong:
        raise ValueError(f"{source!r} in names has placeholders that are duplicate or not words: {wrong}")
    return re.compile(_PLACEHOLDER.sub(r"(?P<\1>[^.#]+)", re.escape(source)))


def _split(
    source: str, target: str | Parts, fields: dict[str, Any], call: str, entries: Mapping[str, PlacedRows]
) -> dict[str, Mapping[str, PlacedRows]]:
    if isinstance(target, str):
        return {target.format(**fields) + call: entries}
    entry = next(iter(entries.values()))
    parts = {part.format(**fields) + call: rows for part, rows in target(entry.values).items()}
    for part, rows in parts.items():
        if rows.shape[:1] != entry.values.shape[:1]:
            raise ValueError(f"{source!r} in names: {part!r} has shape {[*rows.shape]} for {len(entry.values)} rows")
    return {part: {"": entry._replace(values=rows)} for part, rows in parts.items()}
