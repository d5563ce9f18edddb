"""What the comparison of two recordings found, and what to say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mis_ext.onpolicy.recording.row_difference import Row

Verdict = Literal["EXACT", "DIFFERENT", "INVALID"]


@dataclass(frozen=True, kw_only=True)
class ModuleDifference:
    """One output of one module, compared bit for bit.

    Attributes:
        name: The module in a, with the label of the output where it has several; ``(model)`` for the model itself.
        other: The same in b.
        order: Rank of the output in a's order of execution.
        num_rows: Rows compared.
        num_differing: Rows of them with any differing bit.
        num_only_a: Rows without a counterpart.
        num_only_b: Likewise.
        max_abs: Largest absolute difference; NaN where a number stands against a NaN.
        max_ulp: Largest distance in units in the last place, NaNs left aside.
        num_nan: Elements that are NaN on either side. The same NaN on both is no difference, but no number either: it
            makes the verdict INVALID, as in :func:`mis_ext.onpolicy.audit_logprobs`.
        first: The first differing row, by sequence, then position.
        inputs_equal: Whether every input of the module is equal up to the first differing row, in its sequence; where
            no row differs, in all rows. None where none differs, but not all were compared: only one side has an input,
            or that row of it, or it is not by token.
        compared_inputs: Labels, in a, of the inputs that were compared.
        unpaired_inputs: Labels of the inputs that only one side has by token.
        uncompared_inputs: Labels of the inputs that are not by token, and not the same bit for bit on both sides.
        culprit_row: The first row that differs although the inputs that were compared are equal up to it; None where
            there is none, and where a module inside this one has such a row.
    """

    name: str
    other: str
    order: int
    num_rows: int
    num_differing: int
    num_only_a: int
    num_only_b: int
    max_abs: float
    max_ulp: int
    num_nan: int
    first: Row | None
    inputs_equal: bool | None
    compared_inputs: tuple[str, ...]
    unpaired_inputs: tuple[str, ...]
    uncompared_inputs: tuple[str, ...]
    culprit_row: Row | None

    @property
    def is_culprit(self) -> bool:
        """Whether the difference, or one of them, arises in this module."""
        return self.culprit_row is not None

    def __str__(self) -> str:
        return f"{self.name}: equal" if self.first is None else self._at(self.first)

    def blame(self) -> str:
        """The first row whose inputs are equal and whose output differs, as a sentence; else the first that differs."""
        return str(self) if self.culprit_row is None else self._at(self.culprit_row)

    def inputs_besides(self) -> str:
        """The inputs that are left out where those that were compared are equal, as the end of a sentence."""
        rest = {"on one side only": self.unpaired_inputs, "not compared": self.uncompared_inputs}
        told = [f"{', '.join(labels)} ({why})" for why, labels in rest.items() if labels]
        return f" but for {' and '.join(told)}" if told else ""

    def _at(self, row: Row) -> str:
        inputs = {True: "inputs equal", False: "inputs differ", None: "inputs unknown"}[self.inputs_equal]
        if row == self.culprit_row:
            inputs = f"inputs equal{self.inputs_besides()}"
        # Only integers, NaNs and floats of 8 bits differ by no ULP, besides signed zeros.
        by = f"abs {self.max_abs:.3g}" if not self.max_ulp and self.max_abs else f"{self.max_ulp} ULP"
        return f"{self.name} (sequence {row.sequence}, position {row.position}): {inputs}, output differs, max {by}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What :func:`mis_ext.onpolicy.recording.comparison.compare` found.

    Attributes:
        modules: Every output that was compared, in a's order of execution.
        problems: What could not be compared, or was there on one side only, and was not allowed.
        allowed: The same, allowed by name.
        skipped: Outputs that neither side has by token, such as tables of positions: not compared, and no problem.
    """

    modules: tuple[ModuleDifference, ...]
    problems: tuple[str, ...]
    allowed: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def first_divergent(self) -> ModuleDifference | None:
        """The first module in a's order of execution whose output differs; its ``first`` is the position."""
        return next((module for module in self.modules if module.num_differing), None)

    @property
    def culprits(self) -> tuple[ModuleDifference, ...]:
        """Modules whose output differs although their inputs are equal."""
        return tuple(module for module in self.modules if module.is_culprit)

    @property
    def num_rows(self) -> int:
        """How many rows (tokens of an output) were compared, over all outputs."""
        return sum(module.num_rows for module in self.modules)

    @property
    def num_nan(self) -> int:
        """Elements that are NaN on either side, over all outputs."""
        return sum(module.num_nan for module in self.modules)

    @property
    def verdict(self) -> Verdict:
        """EXACT: all there, numbers, and all bits equal; DIFFERENT: some bit differs; INVALID: neither can be said."""
        if self.first_divergent is not None:
            return "DIFFERENT"
        return "INVALID" if self.problems or not self.num_rows or self.num_nan else "EXACT"

    @property
    def passed(self) -> bool:
        """Whether the verdict is EXACT."""
        return self.verdict == "EXACT"

    def summary(self) -> str:
        """The verdict, the first divergence, the culprits and the problems, in plain text."""
        lines = [f"{self.verdict}: {self.num_rows} rows of {len(self.modules)} outputs compared"]
        if self.first_divergent is not None:
            lines.append(f"first divergence: {self.first_divergent}")
            others = [module for module in self.culprits if module is not self.first_divergent]
            lines += [f"culprit: {module.blame()}" for module in others]
            if not self.culprits:
                lines.append(_no_culprit(self.first_divergent))
        lines += [f"{self.num_nan} elements are NaN, first in {self._first_with_nan()}"] if self.num_nan else []
        lines += [f"not compared: {', '.join(self.skipped)}"] if self.skipped else []
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)

    def _first_with_nan(self) -> str:
        return next(module.name for module in self.modules if module.num_nan)


def _no_culprit(first: ModuleDifference) -> str:
    if first.inputs_equal is None and not first.compared_inputs and first.uncompared_inputs:
        return f"no culprit: inputs of the first divergence were not compared: {', '.join(first.uncompared_inputs)}"
    if first.inputs_equal is None:
        return "no culprit: the inputs of the first divergence were not recorded on both sides"
    return "no culprit: the difference arises between the recorded modules, before its first place"
