"""What is found in the files of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from mis_ext.diagnosis.cause import Diagnosis, percent
from mis_ext.diagnosis.limits import PRETRAINED_K3
from mis_ext.dumps import Dumps
from mis_ext.jsonable import to_jsonable
from mis_ext.report.collector import NUM_WORST, Collector
from mis_ext.report.part import Parts
from mis_ext.report.summary import Summary


@dataclass(frozen=True)
class Unexplained:
    """What no cause explains, of the tokens that are left: its share of k3, and that k3 per token; NaN of no token.

    ``is_at_least``: a cause explains up to its share, so that more may be left.
    """

    k3_share: float
    k3: float
    is_at_least: bool = False

    @property
    def in_words(self) -> str:
        """A sentence for the page."""
        if math.isnan(self.k3):
            return "No token is left to explain."
        if self.k3 == 0.0 and self.k3_share:
            return "There is nothing to explain."
        is_small = 0.0 < self.k3 < PRETRAINED_K3
        small = (
            f", of the size of kernels in bfloat16 (up to {PRETRAINED_K3:g} in a pretrained model)" if is_small else ""
        )
        at_least = "at least " if self.is_at_least else ""
        return f"Left unexplained: {at_least}{percent(self.k3_share)} of k3, {self.k3:.2g} per token{small}."


@dataclass(frozen=True, eq=False)
class Run:
    """What is found in files; ``skipped`` says what of the input is not in it as it was written, and why."""

    sources: tuple[str, ...]
    summary: Summary
    diagnoses: tuple[Diagnosis, ...]
    unexplained: Unexplained
    skipped: tuple[str, ...]

    @property
    def name(self) -> str:
        """By which a reader knows it: its file, or the first and the last of its files."""
        if len(self.sources) < 2:
            return "".join(self.sources) or "without a name"
        return f"{self.sources[0]} to {self.sources[-1]}, {len(self.sources)} files"

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON: NaN is None, a number beyond all bounds a string."""
        names = ("sources", "skipped", "diagnoses", "unexplained", "summary")
        return {name: to_jsonable(getattr(self, name)) for name in names}


def run_of(
    dumps: Dumps,
    collector: Collector | None = None,
    *,
    sources: Iterable[str] = (),
    num_worst: int = NUM_WORST,
    pool: Executor | None = None,
) -> Run:
    """What is found in dumps.

    Args:
        dumps: The files.
        collector: Takes in their parts; a new one by default.
        sources: What to call the files.
        num_worst: How many tokens and samples are listed, by a new collector.
        pool: Where it counts, see :class:`~mis_ext.report.collector.Collector`.

    Raises:
        OSError: A file cannot be opened.
        ValueError: A file cannot be read, or there is no usable token.
    """
    collector = Collector(num_worst=num_worst, pool=pool) if collector is None else collector
    parts = Parts(dumps)
    for part in parts:
        collector.add(part)
    summary = collector.summary()
    diagnoses, left = collector.search(summary)
    skipped = [str(each) for each in dumps.skipped]
    skipped += [f"{each.num_samples} samples, the first {each.first}: {each.reason}" for each in parts.unusable]
    skipped += parts.merged
    return Run(
        tuple(sources),
        summary,
        tuple(diagnoses),
        Unexplained(1.0 - left.explained, left.k3_left, any(found.is_up_to for found in diagnoses)),
        tuple(skipped),
    )
