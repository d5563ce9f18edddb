"""What probes of a function found, and what they add up to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["invariant", "rounding", "batch-dependent", "not repeatable", "failed"]
Outcome = Literal["equal", "rounding", "batch-dependent", "not repeatable", "failed", "not run"]
Judge = Literal["float64", "magnitude", "non-finite"]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one probe found: its name, its outcome, and by how much rows differ.

    Attributes:
        name: What was done.
        outcome: "equal" is the only pass.
        num_rows: Distinct rows compared.
        num_different: Those of them with other bits than the reference, in any of the probe's calls.
        first_different: Index of the first of them.
        max_abs_diff: Largest difference; infinite where a number is finite on one side only. None: nothing compared.
        max_ulp: Largest distance in units in the last place, over finite numbers.
        judged_by: What told rounding from true dependence.
        note: The error of a failed probe; why a probe was not run.
    """

    name: str
    outcome: Outcome
    num_rows: int = 0
    num_different: int = 0
    first_different: int | None = None
    max_abs_diff: float | None = None
    max_ulp: int | None = None
    judged_by: Judge | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """All probes of a function, and what they add up to."""

    probes: tuple[Probe, ...]

    @property
    def kind(self) -> Kind:
        """The gravest outcome of all probes.

        - "not repeatable": the same call gave other bits, so nothing else can be told.
        - "batch-dependent": rows truly depend on what else is in the call.
        - "failed": a probe raised, or there was nothing to compare.
        - "rounding": rows differ by rounding only.
        - "invariant": every probe that ran found equal bits.
        """
        outcomes = {probe.outcome for probe in self.probes}
        grave: tuple[Kind, ...] = ("not repeatable", "batch-dependent", "failed", "rounding")
        for kind in grave:
            if kind in outcomes:
                return kind
        return "invariant" if "equal" in outcomes else "failed"

    @property
    def invariant(self) -> bool:
        """Every probe that ran found the bits of the reference, and none failed; see the table for those not run."""
        return self.kind == "invariant"

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for JSON."""
        return {
            "kind": self.kind,
            "invariant": self.invariant,
            "probes": [dataclasses.asdict(probe) for probe in self.probes],
        }

    def __str__(self) -> str:
        table = [("probe", "outcome", "rows", "differ", "first", "max abs", "max ulp", "judged by")]
        table += [
            (
                probe.name,
                probe.outcome,
                _or_dash(probe.num_rows or None),
                _or_dash(probe.num_different if probe.num_rows else None),
                _or_dash(probe.first_different),
                "-" if probe.max_abs_diff is None else f"{probe.max_abs_diff:.3g}",
                _or_dash(probe.max_ulp),
                probe.note or probe.judged_by or "",
            )
            for probe in self.probes
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, (*widths[:-1], 0))).rstrip() for row in table]
        count = {outcome: sum(probe.outcome == outcome for probe in self.probes) for outcome in ("equal", "not run")}
        ran = len(self.probes) - count["not run"]
        skipped = f", {count['not run']} not run" if count["not run"] else ""
        return "\n".join([f"{self.kind}: {count['equal']} of {ran} probes found equal bits{skipped}", *lines])


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
