# SPDX-License-Identifier: Apache-2.0
"""Proof that weights arrived: the log-probs of one fixed text, of engine and trainer, from version to version."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Verdict = Literal["first", "arrived", "old", "other", "unknown"]
_KEPT_VERSIONS = 8
# Two scorings of the same weights differ by about the noise; so do stale weights from themselves.
_NOISE_FACTOR = 2.0
# Two scorings alike prove no noise of 0: under another batch the same weights in bfloat16 may differ by 1e-3 to 1e-2
# nats per token. A choice, not measured between loads.
_MIN_MOVEMENT = 1e-2
# Standard errors over the tokens by which one version must be nearer than another one.
_ERRORS = 3.0
# So many times its own history, and more than kernels give in bfloat16: an engine with weights of neither version.
_RISE, _KERNEL_K3 = 10.0, 1e-3


class StaleWeightsWarning(UserWarning):
    """An engine names a version of its weights, and its log-probs are those of an earlier one."""


class StaleWeightsError(RuntimeError):
    """An engine has the weights of an earlier version under a new name, and the run shall stop."""


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """Result of one scoring of the text.

    Attributes:
        version: What the engine calls its weights.
        verdict: ``"arrived"``; ``"old"``: the log-probs are those of an earlier version; ``"other"``: of none that is
            known, as k3 to the trainer is far above its history; ``"unknown"``: the log-probs moved too little
            to tell, without the trainer's by at most 0.01 nats or twice the noise; ``"first"``: nothing to compare
            with.
        nearest: The version whose log-probs are the nearest of all earlier ones; None for ``"first"``.
        movement: Mean absolute difference, in nats per token, between this scoring and the engine's at ``nearest``.
        noise: The largest such difference between two scorings of one version; NaN where none was scored twice.
        k3: k3 per token of the trainer's log-probs against the engine's, at this version; NaN without the trainer's.
        usual_k3: The median of its history; NaN where there is none.
    """

    version: str
    verdict: Verdict
    nearest: str | None = None
    movement: float = math.nan
    noise: float = math.nan
    k3: float = math.nan
    usual_k3: float = math.nan

    def explain(self) -> str:
        """The verdict in words, with its numbers."""
        trainer = "" if math.isnan(self.k3) else f"; k3 to the trainer {self.k3:.2g}, usually {self.usual_k3:.2g}"
        noise = "" if math.isnan(self.noise) else f", two scorings of one version {self.noise:.2g}"
        moved = f"{self.movement:.2g} nats per token away{noise}{trainer}"
        if trainer:
            why = f"the trainer's of then are not known, the same, or as near to it within {_ERRORS:g} standard errors"
        elif self.movement > _MIN_MOVEMENT:
            why = f"it moved by less than {_NOISE_FACTOR:g} times what two scorings of one version do"
        else:
            why = f"it moved by at most {_MIN_MOVEMENT:g} nats per token, which kernels alone may do"
        lazy = " (or no weight changed, as where a small update is rounded away)" if math.isnan(self.k3) else ""
        return {
            "first": f"version {self.version}: the first that is scored{trainer}",
            "arrived": f"version {self.version} arrived: version {self.nearest} is {moved}",
            "old": f"the weights called {self.version} are those of version {self.nearest}{lazy}: {moved}",
            "other": f"the weights called {self.version} are neither the trainer's nor older ones of it: {moved}",
            "unknown": f"version {self.version} is unresolved: {why}; version {self.nearest} is {moved}",
        }[self.verdict]


class _Scores(NamedTuple):
    engine: list[float]
    trainer: list[float] | None


class Canary:
    """The log-probs of one fixed text, of some hundred tokens, at every version of the weights.

    The engine scores it as a prompt, which neither SGLang nor vLLM read from their prefix cache: SGLang with
    ``max_new_tokens: 0`` and ``logprob_start_len: 0``, vLLM with ``prompt_logprobs: 0``, an adapter of LoRA with the
    request's own field for it. The first token has no log-prob, and is omitted. Score it twice at a version: the two
    measure the engine's noise, without which every other number looks like new weights.
    """

    def __init__(self) -> None:
        self._history: dict[str, _Scores] = {}
        self._k3s: list[float] = []
        self._noise = math.nan

    def check(
        self, version: str | int, engine: Sequence[float], *, trainer: Sequence[float] | None = None
    ) -> CanaryResult:
        """Compare a scoring with those of the last eight versions, and keep it.

        Args:
            version: What the engine calls its weights.
            engine: Its log-prob of each token, in nats.
            trainer: The trainer's, at the same temperature, of the weights that it sent under this name. Without it an
                engine that has weights of something else looks as if they had arrived.

        Raises:
            ValueError: A log-prob is not finite, or above 0, or there are not as many as before, or fewer than two.
        """
        name, scores = str(version), _Scores([*engine], None if trainer is None else [*trainer])
        length = len(next(iter(self._history.values()), scores).engine)
        for side, values in scores._asdict().items():
            if values is not None and not (len(values) == length > 1 and all(-math.inf < x <= 0.0 for x in values)):
                raise ValueError(
                    f"the {side}'s log-probs of the canary must be {max(length, 2)} finite numbers of at most 0, got "
                    f"{len(values)}, from {min(values, default=math.nan):g} to {max(values, default=math.nan):g}"
                )
        if name in self._history:
            again = _mean_gap(scores.engine, self._history.pop(name).engine)
            self._noise = again if math.isnan(self._noise) else max(again, self._noise)
        result = self._compare(name, scores)
        self._history = dict([*self._history.items(), (name, scores)][-_KEPT_VERSIONS:])
        if result.verdict not in ("old", "other") and not math.isnan(result.k3):
            self._k3s = [*self._k3s, result.k3][-_KEPT_VERSIONS:]
        return result

    def _compare(self, name: str, scores: _Scores) -> CanaryResult:
        k3 = math.nan if scores.trainer is None else _k3(scores.engine, scores.trainer)
        usual = statistics.median(self._k3s) if self._k3s else math.nan
        if not self._history:
            return CanaryResult(version=name, verdict="first", k3=k3, usual_k3=usual)
        gaps = {other: _mean_gap(scores.engine, kept.engine) for other, kept in self._history.items()}
        margins = {
            other: _margin(scores.engine, scores.trainer, kept.trainer)
            for other, kept in self._history.items()
            if scores.trainer is not None and kept.trainer is not None and kept.trainer != scores.trainer
        }
        found = margins or gaps
        # To the trainer's numbers it matters how far it moved: an engine may round a small update away.
        equal = [other for other in gaps if gaps[other] == 0.0 and scores.trainer is None]
        nearest = equal[0] if equal else min(found, key=lambda other: found[other])
        # Not measured, the noise is NaN, and the larger one is the floor.
        far = margins[nearest] > _ERRORS if margins else gaps[nearest] > max(_MIN_MOVEMENT, _NOISE_FACTOR * self._noise)
        verdict: Verdict = "arrived" if far else "unknown"
        if equal or (margins and margins[nearest] < -_ERRORS):
            verdict = "old"
        elif k3 > max(_RISE * usual, _KERNEL_K3):
            verdict = "other"
        return CanaryResult(
            version=name,
            verdict=verdict,
            nearest=nearest,
            movement=gaps[nearest],
            noise=self._noise,
            k3=k3,
            usual_k3=usual,
        )


def _margin(engine: list[float], now: list[float], before: list[float]) -> float:
    """By how many standard errors the engine is nearer to the trainer's version of now than to the one before.

    Token by token, so that what kernels do to a token is on both sides, and only the update is not.
    """
    excess = [abs(b - e) - abs(n - e) for e, n, b in zip(engine, now, before, strict=True)]
    mean, error = statistics.fmean(excess), statistics.stdev(excess) / math.sqrt(len(excess))
    return mean / error if error else math.copysign(math.inf, mean)


def _mean_gap(one: list[float], other: list[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def _k3(engine: list[float], trainer: list[float]) -> float:
    """The mean of ``exp(d) - 1 - d``, with ``d`` the trainer's log-prob minus the engine's."""
    return statistics.fmean(math.expm1(t - e) - (t - e) for e, t in zip(engine, trainer, strict=True))
