# SPDX-License-Identifier: Apache-2.0
"""Proof that weights arrived: the engine's log-probs of one fixed text, from version to version."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mis_ext.validation import MismatchWarning

Verdict = Literal["old", "unknown", "first", "arrived"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""The worst first."""
_KEPT_VERSIONS = 8
# Two scorings of the same weights differ by about the noise.
_NOISE_FACTOR = 2.0
# Two scorings alike prove no noise of 0: under another batch the same weights in bfloat16 may differ by 1e-3 to 1e-2
# nats per token. A choice, not measured between loads.
_MIN_MOVEMENT = 1e-2


class StaleWeightsWarning(MismatchWarning):
    """An engine names a version of its weights, and its log-probs are those of an earlier one."""


class StaleWeightsError(RuntimeError):
    """An engine has the weights of an earlier version under a new name, and the run shall stop."""


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """Result of one scoring of the text.

    Attributes:
        version: What the engine calls its weights.
        verdict: ``"arrived"``; ``"old"``: the log-probs are exactly those of an earlier version; ``"unknown"``: they
            moved by at most 0.01 nats or twice the noise; ``"first"``: nothing to compare with.
        nearest: The version whose log-probs are the nearest of all earlier ones; None for ``"first"``.
        movement: Mean absolute difference, in nats per token, between this scoring and the engine's at ``nearest``.
        noise: The largest such difference between two scorings of one version; NaN where none was scored twice.
    """

    version: str
    verdict: Verdict
    nearest: str | None = None
    movement: float = math.nan
    noise: float = math.nan

    def explain(self) -> str:
        """The verdict in words, with its numbers."""
        noise = "" if math.isnan(self.noise) else f", two scorings of one version {self.noise:.2g}"
        moved = f"{self.movement:.2g} nats per token away{noise}"
        if self.movement > _MIN_MOVEMENT:
            why = f"it moved by less than {_NOISE_FACTOR:g} times what two scorings of one version do"
        else:
            why = f"it moved by at most {_MIN_MOVEMENT:g} nats per token, which kernels alone may do"
        lazy = "or no weight changed, as where a small update is rounded away"
        return {
            "first": f"version {self.version}: the first that is scored",
            "arrived": f"version {self.version} arrived: version {self.nearest} is {moved}",
            "old": f"the weights called {self.version} are those of version {self.nearest} ({lazy}): {moved}",
            "unknown": f"version {self.version} is unresolved: {why}; version {self.nearest} is {moved}",
        }[self.verdict]


class Canary:
    """The log-probs of one fixed text, of some hundred tokens, at every version of the weights.

    The engine scores it as a prompt, which neither SGLang nor vLLM read from their prefix cache: SGLang with
    ``max_new_tokens: 0`` and ``logprob_start_len: 0``, vLLM with ``prompt_logprobs: 0``, an adapter of LoRA with the
    request's own field for it. The first token has no log-prob, and is omitted. Score it twice at a version: the two
    measure the engine's noise, without which every other number looks like new weights. An engine that has weights of
    something else looks as if they had arrived.
    """

    def __init__(self) -> None:
        self._history: dict[str, list[float]] = {}
        self._noise = math.nan

    def check(self, version: str | int, engine: Sequence[float]) -> CanaryResult:
        """Compare a scoring with those of the last eight versions, and keep it.

        Args:
            version: What the engine calls its weights.
            engine: Its log-prob of each token, in nats.

        Raises:
            ValueError: A log-prob is not finite, or above 0, or there are not as many as before, or fewer than two.
        """
        name, scores = str(version), [*engine]
        length = len(next(iter(self._history.values()), scores))
        if not (len(scores) == length > 1 and all(-math.inf < x <= 0.0 for x in scores)):
            raise ValueError(
                f"the engine's log-probs of the canary must be {max(length, 2)} finite numbers of at most 0, got "
                f"{len(scores)}, from {min(scores, default=math.nan):g} to {max(scores, default=math.nan):g}"
            )
        if name in self._history:
            again = _mean_gap(scores, self._history.pop(name))
            self._noise = again if math.isnan(self._noise) else max(again, self._noise)
        gaps = {other: _mean_gap(scores, kept) for other, kept in self._history.items()}
        self._history = dict([*self._history.items(), (name, scores)][-_KEPT_VERSIONS:])
        if not gaps:
            return CanaryResult(version=name, verdict="first")
        nearest = min(gaps, key=lambda other: gaps[other])
        movement = gaps[nearest]
        # Not measured, the noise is NaN, and the larger one is the floor.
        has_moved = movement > max(_MIN_MOVEMENT, _NOISE_FACTOR * self._noise)
        verdict: Verdict = "arrived" if has_moved else "unknown" if movement > 0.0 else "old"
        return CanaryResult(version=name, verdict=verdict, nearest=nearest, movement=movement, noise=self._noise)


def _mean_gap(one: list[float], other: list[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))
