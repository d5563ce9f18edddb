# SPDX-License-Identifier: Apache-2.0
"""Findings for one run: sums of its parts, summary, likely causes, and the unexplained rest."""

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
    """Accumulates the parts of a run. It keeps counts, sums and numbers per sequence, not the tokens.

    Args:
        configs: Configurations to evaluate, by name.
        methods: The published method of a configuration, by name.
        num_worst: Number of tokens and samples to list.
        pool: Runs the independent counts of a part. Set torch to one thread then, because its threads wait for each
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
        """Add the sums of one part, and evaluate each configuration on it."""
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
        """The summary of all parts added so far.

        Raises:
            ValueError: If no part was added.
        """
        steps = {step: (tally, Sequences.joined(self._sequences[step])) for step, tally in self._tallies.items()}
        return build_summary(steps, worst_tokens=self._worst, max_worst=self._num_worst)

    def diagnoses(self) -> list[Diagnosis]:
        """Likely causes."""
        return self.search()[0]

    @torch.no_grad()
    def search(self) -> tuple[list[Diagnosis], Left]:
        """Likely causes, and the unexplained rest."""
        return search(self._gathering.evidence)

    def outcomes(self) -> dict[str, Outcome]:
        """The outcome of each configuration by name."""
        return {name: what_if.outcome() for name, what_if in self._what_if.items()}


def summarize(parts: Iterable[Part]) -> Summary:
    """Compute the summary of a run from its parts.

    Raises:
        ValueError: If there is no part.
    """
    collector = Collector()
    for part in parts:
        collector.add(part)
    return collector.summary()


@dataclass(frozen=True)
class Unexplained:
    """The unexplained rest: its share of k3, and its k3 per token; NaN without tokens.

    ``is_at_least``: the share of a cause is an upper limit, so the rest may be larger. ``is_of_rest``: tokens were
    removed.
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
    """Findings in files. ``skipped`` lists missing or changed input, and why."""

    sources: tuple[str, ...]
    summary: Summary
    diagnoses: tuple[Diagnosis, ...]
    unexplained: Unexplained
    skipped: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the run: its file, or its first and last file."""
        if len(self.sources) < 2:
            return "".join(self.sources) or "without a name"
        return f"{self.sources[0]} to {self.sources[-1]}, {len(self.sources)} files"

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON, with None for NaN and a string for infinity."""
        names = ("sources", "skipped", "diagnoses", "unexplained", "summary")
        return {name: to_jsonable(getattr(self, name)) for name in names}


def read_findings(
    dumps: Dumps,
    collector: Collector | None = None,
    *,
    sources: Iterable[str] = (),
) -> Findings:
    """Read dumps, and find likely causes."""
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
