# SPDX-License-Identifier: Apache-2.0
"""Proof that weights arrived: compares the engine's log-probs of one fixed text between versions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mis_ext.validation import MismatchWarning

Verdict = Literal["old", "unknown", "first", "arrived"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From worst to best."""
_KEPT_VERSIONS = 8
# Two scorings with the same weights differ by about the noise.
_NOISE_FACTOR = 2.0
# Two equal scorings do not prove zero noise: with another batch, the same weights in bfloat16 may differ by 1e-3 to
# 1e-2 nats per token. This value is a choice; it was not measured between loads.
_MIN_MOVEMENT = 1e-2


class StaleWeightsWarning(MismatchWarning):
    """An engine reports a version of its weights, but its log-probs are those of an earlier version."""


class StaleWeightsError(RuntimeError):
    """An engine has the weights of an earlier version under a new name, and the settings stop the run."""


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """Result of one scoring of the text.

    Attributes:
        version: The engine's version of its weights.
        verdict: ``"arrived"``; ``"old"``: the log-probs are exactly those of an earlier version; ``"unknown"``: they
            changed by at most 0.01 nats or twice the noise; ``"first"``: there is no earlier version.
        nearest: The earlier version with the nearest log-probs; None for ``"first"``.
        movement: Mean absolute difference, in nats per token, between this scoring and the engine's at ``nearest``.
        noise: The largest such difference between two scorings of one version; NaN if none was scored twice.
    """

    version: str
    verdict: Verdict
    nearest: str | None = None
    movement: float = math.nan
    noise: float = math.nan

    def explain(self) -> str:
        """The verdict in words, with its numbers."""
        noise = "" if math.isnan(self.noise) else f", two scorings of one version are {self.noise:.2g} apart"
        moved = f"{self.movement:.2g} nats per token away{noise}"
        if self.movement > _MIN_MOVEMENT:
            why = f"the change is less than {_NOISE_FACTOR:g} times the difference of two scorings of one version"
        else:
            why = f"the change is at most {_MIN_MOVEMENT:g} nats per token, which kernels alone can cause"
        lazy = "or no weight changed, for example because a small update was rounded away"
        return {
            "first": f"version {self.version}: the first scored version",
            "arrived": f"version {self.version} arrived: version {self.nearest} is {moved}",
            "old": f"the weights of version {self.version} are those of version {self.nearest} ({lazy}): {moved}",
            "unknown": f"version {self.version} is unresolved: {why}; version {self.nearest} is {moved}",
        }[self.verdict]


class Canary:
    """The log-probs of one fixed text of a few hundred tokens for every version of the weights.

    The engine scores it as a prompt, for which neither SGLang nor vLLM uses its prefix cache: SGLang with
    ``max_new_tokens: 0`` and ``logprob_start_len: 0``, vLLM with ``prompt_logprobs: 0``, and a LoRA adapter with the
    request's own field for it. The first token has no log-prob, and is omitted. Score the text twice per version to
    measure the engine's noise. Without it, every difference looks like new weights. Wrong weights also look as if they
    had arrived.
    """

    def __init__(self) -> None:
        self._history: dict[str, list[float]] = {}
        self._noise = math.nan

    def check(self, version: str | int, engine: Sequence[float]) -> CanaryResult:
        """Compare a scoring with those of the last eight versions, and store it.

        Args:
            version: The engine's version of its weights.
            engine: Its log-prob of each token, in nats.

        Raises:
            ValueError: A log-prob is not finite, or is above 0; their number changed, or there are fewer than two.
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
        # If the noise is not measured, it is NaN, and max() returns the floor.
        has_moved = movement > max(_MIN_MOVEMENT, _NOISE_FACTOR * self._noise)
        verdict: Verdict = "arrived" if has_moved else "unknown" if movement > 0.0 else "old"
        return CanaryResult(version=name, verdict=verdict, nearest=nearest, movement=movement, noise=self._noise)


def _mean_gap(one: list[float], other: list[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))
