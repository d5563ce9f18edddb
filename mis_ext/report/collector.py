"""Parts in, a summary out: what is kept of a run while its parts come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future

import torch

from mis_ext.correction.config import CorrectionConfig
from mis_ext.diagnosis.cause import Diagnosis
from mis_ext.diagnosis.measuring import Measured, Measuring
from mis_ext.diagnosis.table import search
from mis_ext.methods.method import Method
from mis_ext.report.part import Part
from mis_ext.report.sequences import Sequences
from mis_ext.report.summary import Summary, WorstToken, summary_of, worst_tokens
from mis_ext.report.tally import TokenTally
from mis_ext.report.what_if import Outcome, WhatIf

NUM_WORST = 30
MAX_WAITING = 8
"""Parts that are read before they are counted: a file is read at once, and its parts are counted meanwhile."""


class Collector:
    """Adds up the parts of a run: of each it keeps counts, sums and numbers per sequence, not the tokens.

    Args:
        configs: By name, what to try on them.
        methods: By name, the published method that such a configuration stands beside.
        num_worst: How many tokens and samples are listed.
        pool: Where the independent counts of a part run, while the next part is read; each is the same whoever runs it.
            Torch should then have one thread: its own wait for each other on tensors of this size.
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
        self._running: deque[list[Future[object]]] = deque()
        self._tallies: dict[str, TokenTally] = {}
        self._sequences: dict[str, list[Sequences]] = {}
        self._measuring = Measuring()
        self._worst: list[WorstToken] = []

    def add(self, part: Part) -> None:
        """Add the sums of one more part, and try each configuration on it."""
        counts = [self._count, *(each.add for each in self._what_if.values())]
        if self._pool is None:
            for count in counts:
                count(part)
            return
        before = self._running[-1] if self._running else [None] * len(counts)
        self._running.append(
            [self._pool.submit(_after, last, count, part) for last, count in zip(before, counts, strict=True)]
        )
        self._finish(max_waiting=MAX_WAITING)

    def _finish(self, *, max_waiting: int = 0) -> None:
        while len(self._running) > max_waiting:
            for running in self._running.popleft():
                running.result()

    def _count(self, part: Part) -> None:
        self._count_tokens(part)
        self._count_signals(part)

    @torch.no_grad()
    def _count_tokens(self, part: Part) -> None:
        tally = TokenTally.of(part)
        known = self._tallies.get(part.step)
        self._tallies[part.step] = tally if known is None else known + tally
        self._sequences.setdefault(part.step, []).append(Sequences.of(part))
        worst = self._worst + worst_tokens(part, self._num_worst)
        self._worst = sorted(worst, key=lambda token: -abs(token.log_ratio))[: self._num_worst]

    @torch.no_grad()
    def _count_signals(self, part: Part) -> None:
        self._measuring.add(
            part.tokens,
            part.streams.layout,
            response_mask_R=part.streams.response_mask_R,
            versions_behind=[origin.versions_behind for origin in part.origins],
            has_other_ids=[origin.has_other_ids for origin in part.origins],
            token_ids=[origin.token_ids for origin in part.origins],
            step=part.step,
            position_T=part.position_T,
            turns=part.turns,
        )

    def summary(self) -> Summary:
        """The summary of all parts that were added until now.

        Raises:
            ValueError: There was none.
        """
        self._finish()
        steps = {step: (tally, Sequences.joined(self._sequences[step])) for step, tally in self._tallies.items()}
        return summary_of(steps, worst_tokens=self._worst, max_worst=self._num_worst)

    def diagnoses(self, summary: Summary | None = None) -> list[Diagnosis]:
        """Likely causes; ``summary`` is that of this collector, if it was computed already.

        Raises:
            ValueError: There was no part.
        """
        return self.search(summary)[0]

    def search(self, summary: Summary | None = None) -> tuple[list[Diagnosis], Measured]:
        """:meth:`diagnoses`, and what they leave to explain.

        Raises:
            ValueError: There was no part.
        """
        self._finish()
        summary = self.summary() if summary is None else summary
        typical_gaps = {name: step.abs_p50 for name, step in summary.steps.items()}
        return search(self._measuring.measured(typical_gaps))

    def outcomes(self) -> dict[str, Outcome]:
        """What each configuration kept, removed and left, by its name."""
        self._finish()
        return {name: what_if.outcome() for name, what_if in self._what_if.items()}


def _after(last: Future[object] | None, count: Callable[[Part], object], part: Part) -> None:
    """Count a part when the same count of the part before it is done; earlier ones have begun, so this one can wait."""
    if last is not None:
        last.result()
    count(part)


def summarize(parts: Iterable[Part], *, num_worst: int = NUM_WORST) -> Summary:
    """The summary of a run from its parts.

    Raises:
        ValueError: There is none.
    """
    collector = Collector(num_worst=num_worst)
    for part in parts:
        collector.add(part)
    return collector.summary()
