# SPDX-License-Identifier: Apache-2.0
"""Findings in the files of one run: sums of its parts, the summary, likely causes, and the rest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from mis_ext.correction.config import CorrectionConfig
from mis_ext.files import to_jsonable
from mis_ext.methods.method import Method
from mis_ext.tools.diagnosis.cause import Diagnosis, Left, of_k3, percent
from mis_ext.tools.diagnosis.evidence import Gathering
from mis_ext.tools.diagnosis.table import search
from mis_ext.tools.diagnosis.thresholds import PRETRAINED_K3
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report.part import Part, Parts
from mis_ext.tools.report.summary import Summary, WorstToken, build_summary, worst_tokens
from mis_ext.tools.report.tally import Sequences, TokenTally
from mis_ext.tools.report.what_if import Outcome, WhatIf

NUM_WORST = 30


class Collector:
    """Adds up the parts of a run: of each it keeps counts, sums and numbers per sequence, not the tokens.

    Args:
        configs: By name, what to try on them.
        methods: By name, the published method that such a configuration stands beside.
        num_worst: How many tokens and samples are listed.
        pool: Where the independent counts of a part run. Torch should then have one thread: its own wait for each
            other on tensors of this size.
    """

    def __init__(
        self,
        configs: Mapping[str, CorrectionConfig] | None = None,
        *,
        methods: Mapping[str, Method | None] | None = None,
        num_worst: int = NUM_WORST,
        pool: Executor | None = None,
    ) -> None:
        known = methods or {}
        self._what_if = {name: WhatIf(config, known.get(name), name=name) for name, config in (configs or {}).items()}
        self._num_worst = num_worst
        self._pool = pool
        self._tallies: dict[str, TokenTally] = {}
        self._sequences: dict[str, list[Sequences]] = {}
        self._gathering = Gathering()
        self._worst: list[WorstToken] = []

    def add(self, part: Part) -> None:
        """Add the sums of one more part, and try each configuration on it."""
        counts = [self._count, *(each.add for each in self._what_if.values())]
        run = map if self._pool is None else self._pool.map
        deque(run(lambda count: count(part), counts), maxlen=0)

    @torch.no_grad()
    def _count(self, part: Part) -> None:
        tally = TokenTally.of(part)
        known = self._tallies.get(part.step)
        self._tallies[part.step] = tally if known is None else known + tally
        self._sequences.setdefault(part.step, []).append(Sequences.of(part))
        worst = self._worst + worst_tokens(part, self._num_worst)
        self._worst = sorted(worst, key=lambda token: -abs(token.log_ratio))[: self._num_worst]
        self._gathering.add(part.evidence)

    def summary(self) -> Summary:
        """The summary of all parts that were added until now.

        Raises:
            ValueError: There was none.
        """
        steps = {step: (tally, Sequences.joined(self._sequences[step])) for step, tally in self._tallies.items()}
        return build_summary(steps, worst_tokens=self._worst, max_worst=self._num_worst)

    def diagnoses(self) -> list[Diagnosis]:
        """Likely causes."""
        return self.search()[0]

    @torch.no_grad()
    def search(self) -> tuple[list[Diagnosis], Left]:
        """Likely causes, and what they leave to explain."""
        return search(self._gathering.evidence)

    def outcomes(self) -> dict[str, Outcome]:
        """Tokens that each configuration kept, removed, and left, by its name."""
        return {name: what_if.outcome() for name, what_if in self._what_if.items()}


def summarize(parts: Iterable[Part]) -> Summary:
    """The summary of a run from its parts.

    Raises:
        ValueError: There is none.
    """
    collector = Collector()
    for part in parts:
        collector.add(part)
    return collector.summary()


@dataclass(frozen=True)
class Unexplained:
    """The rest that no cause explains: its share of k3, and its k3 per token; NaN without a token.

    ``is_at_least``: a cause explains up to its share, so that more may be left. ``is_of_rest``: tokens were taken out.
    """

    k3_share: float
    k3: float
    is_at_least: bool = False
    is_of_rest: bool = False

    @property
    def in_words(self) -> str:
        """A sentence for the page."""
        if math.isnan(self.k3):
            return "No token is left to explain."
        if self.k3 == 0.0 and self.k3_share:
            return "There is nothing to explain."
        if self.k3_share == 0.0:
            return f"The causes explain {'up to ' if self.is_at_least else ''}all of {of_k3(self.is_of_rest)}."
        small = f", of the size of kernels in bfloat16 (up to {PRETRAINED_K3:g} in a pretrained model)"
        at_least, size = (
            "at least " if self.is_at_least and self.k3_share >= 0.01 else "",
            small if 0.0 < self.k3 < PRETRAINED_K3 else "",
        )
        share = f"{at_least}{percent(self.k3_share)} of {of_k3(self.is_of_rest)}"
        return f"Left unexplained: {share}, {self.k3:.2g} per token{size}."


@dataclass(frozen=True, eq=False)
class Findings:
    """Findings in files; ``skipped`` says which part of the input is missing or changed, and why."""

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


def read_findings(
    dumps: Dumps,
    collector: Collector | None = None,
    *,
    sources: Iterable[str] = (),
) -> Findings:
    """Read dumps and find their causes."""
    collector = Collector() if collector is None else collector
    parts = Parts(dumps)
    for part in parts:
        collector.add(part)
    summary = collector.summary()
    diagnoses, left = collector.search()
    skipped = [*map(str, dumps.skipped), *parts.skipped]
    return Findings(
        tuple(sources),
        summary,
        tuple(diagnoses),
        Unexplained(
            1.0 - left.explained,
            left.k3,
            is_at_least=any(found.is_up_to for found in diagnoses),
            is_of_rest=any(found.takes_out for found in diagnoses),
        ),
        tuple(skipped),
    )
