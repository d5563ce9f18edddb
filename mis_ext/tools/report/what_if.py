# SPDX-License-Identifier: Apache-2.0
"""Effect of a configuration on the data, computed with the correction itself."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.correct import Batch, Correction, compute_correction
from mis_ext.methods.first_update import FirstUpdate, first_update, looks_at_advantages
from mis_ext.methods.method import Method
from mis_ext.tools.explain import described_gates
from mis_ext.tools.report.part import Part

_TOGETHER = "two or more gates"
_NO_RATIO = "no finite ratio"
_METHOD = "the method"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a configuration. Shares are of response tokens, or of sequences with one; NaN if nothing was counted.

    Attributes:
        kept_tokens: Share of tokens that stay in the mask.
        live_tokens: Share of tokens that also have a policy gradient: weight not 0 and not clipped.
        kept_sequences: Share of sequences with a kept token.
        removed_by: Share of tokens that only this gate removes, that several gates remove, or that have no ratio.
        weight_max: The largest weight of a valid token before normalization (of a method: the factor on the advantage).
        learning_rate: Mean factor on the loss of a response token, with normalization; 1 without correction.
        ess: Kish's effective sample size of this factor, as a share.
        variance: Mean square of the factor on the advantage (on the loss if no advantage is known); 1 without
            correction.
        residual: Mean absolute distance of that factor from the ratio, before normalization: the uncorrected rest of
            each token. Without correction, twice the total variation.
        removed_positive: Share of the tokens with a positive advantage that have no policy gradient.
            ``removed_negative``: the same share of the tokens with a negative advantage.
    """

    kept_tokens: float
    live_tokens: float
    kept_sequences: float
    removed_by: dict[str, float]
    weight_max: float
    learning_rate: float
    ess: float
    variance: float
    residual: float
    removed_positive: float
    removed_negative: float


@dataclass(eq=False)
class WhatIf:
    """Evaluates one configuration on a stream of parts. Normalization is over each whole step.

    With a method, it evaluates the policy gradient of the method at the first update, when the current policy is the
    proximal policy, with the configuration as correction. Statistics of the method over a batch are over a part.
    """

    config: CorrectionConfig
    method: Method | None = None
    _: KW_ONLY
    name: str = "what is tried"
    _sums: Counter[str] = field(default_factory=Counter)
    _removed: Counter[str] = field(default_factory=Counter)
    _largest: float = -math.inf
    _steps: dict[str, Counter[Any]] = field(default_factory=dict)

    @cached_property
    def gates(self) -> dict[str, CorrectionConfig]:
        """Each gate that removes tokens from the mask, as a separate configuration."""
        return {
            name: CorrectionConfig(weight=None, gates=(gate,))
            for name, gate in described_gates(self.config).items()
            if gate.action == "reject"
        }

    def add(self, part: Part) -> Correction:
        """Add one part. Return its correction, normalized over this part only.

        Raises:
            ValueError: If the method needs advantages, and a trained token has none.
        """
        correction = correct(part, self.config)
        tokens = part.tokens
        response_T, valid_T = tokens.generated, tokens.valid
        kept_T = correction.keep_mask_T
        unscaled_T = weights_T = correction.weights_T / correction.batch.scale
        passed_T = None
        if self.method is not None:
            weights_T, passed_T, kept_T = self._first_update(self.method, part, unscaled_T, correction.keep_mask_T)
        factor_T = torch.where(kept_T, weights_T, 0.0)
        ratio_T, total, squared = part.ratio_T, _sum(factor_T), _sum(factor_T.square())
        valid_weights, distance_T = part.of_valid(weights_T), (factor_T - ratio_T).abs()
        if len(valid_weights):
            self._largest = max(self._largest, float(valid_weights.amax()))
        kept_S, response_S = (count_S > 0 for count_S in part.streams.layout.sums([kept_T, response_T]))
        self._sums.update(
            {
                "sequences": _sum(response_S),
                "kept_sequences": _sum(kept_S),
                "response": _sum(response_T),
                "valid": _sum(valid_T),
                "kept": _sum(kept_T),
                "live": _sum(factor_T != 0.0),
                "residual": _sum(part.of_valid(distance_T)),
            }
        )
        if part.has_advantages:
            self._add_advantages(part, factor_T)
        self._add_removed(part, kept_T, passed_T)
        step = self._steps.setdefault(part.step, Counter())
        step.update({key: float(value) for key, value in correction.batch.of.items()})
        step.update({"factor": total, "squared": squared})
        return correction

    def _first_update(self, method: Method, part: Part, weights_T: Tensor, kept_T: Tensor) -> FirstUpdate:
        is_known_T = part.advantages_T.isfinite()
        num_unknown = _sum(part.tokens.generated & ~is_known_T)
        if num_unknown and looks_at_advantages(method):
            raise ValueError(
                f"{self.name} needs advantages, but {num_unknown:,.0f} trained tokens of step {part.step} "
                "have none: use a dump with advantages"
            )
        corrects = not self.config.metrics_only
        return first_update(
            method,
            proximal_logprobs_T=part.streams.proximal_logprobs_T.float(),
            behavior_logprobs_T=part.streams.behavior_logprobs_T.float(),
            advantages_T=torch.where(is_known_T, part.advantages_T, 1.0),
            response_mask_T=part.tokens.generated,
            layout=part.streams.layout,
            weights_T=weights_T if corrects else None,
            keep_mask_T=kept_T if corrects else None,
        )

    def _add_advantages(self, part: Part, factor_T: Tensor) -> None:
        is_removed_T = factor_T == 0.0
        self._sums.update(part.advantage_sums)
        self._sums.update(
            {
                "removed_positive": _sum((part.advantage_T > 0.0) & is_removed_T),
                "removed_negative": _sum((part.advantage_T < 0.0) & is_removed_T),
                "squared_weighted_advantage": _sum((part.advantage_T * factor_T).square()),
            }
        )

    def _add_removed(self, part: Part, kept_T: Tensor, passed_T: Tensor | None) -> None:
        response_T = part.tokens.generated
        no_ratio_T = part.no_ratio_T
        removed_T = response_T & ~kept_T & ~no_ratio_T
        if len(self.gates) == 1 and passed_T is None:
            (name,) = self.gates
            self._removed.update({name: _sum(removed_T)})
        elif self.gates or passed_T is not None:
            alone = {name: removed_T & ~correct(part, config).keep_mask_T for name, config in self.gates.items()}
            if passed_T is not None:
                alone[_METHOD] = removed_T & ~passed_T
            count_T = torch.stack([*alone.values()]).sum(0)
            self._removed.update({name: _sum(found_T & (count_T == 1)) for name, found_T in alone.items()})
            self._removed.update({_TOGETHER: _sum(count_T > 1)})
        self._removed.update({_NO_RATIO: _sum(no_ratio_T & ~kept_T)})

    def outcome(self) -> Outcome:
        """Return the outcome of the configuration for all parts so far."""
        sums = self._sums

        def per(name: str, over: str) -> float:
            return _divided(sums[name], sums[over])

        weighted, squared = self._normalized()
        variance = _divided(squared, sums["response"])
        if sums["squared_advantage"] > 0 and not self.config.is_scaled:
            variance = per("squared_weighted_advantage", "squared_advantage")
        return Outcome(
            kept_tokens=per("kept", "response"),
            live_tokens=per("live", "response"),
            kept_sequences=per("kept_sequences", "sequences"),
            removed_by={name: _divided(count, sums["response"]) for name, count in self._removed.items() if count},
            weight_max=self._largest if math.isfinite(self._largest) else math.nan,
            learning_rate=_divided(weighted, sums["response"]),
            # Kish: (sum f)^2 / (n sum f^2), with n response tokens; f = 0 for those without a gradient.
            ess=_divided(weighted**2, sums["response"] * squared),
            variance=variance,
            residual=per("residual", "valid"),
            removed_positive=per("removed_positive", "positive"),
            removed_negative=per("removed_negative", "negative"),
        )

    def _normalized(self) -> tuple[float, float]:
        """Sums of the factor and of its square, scaled per step according to the configuration."""
        weighted = squared = 0.0
        for step in self._steps.values():
            scale = 1.0
            if self.config.is_scaled:
                total = {key: torch.tensor(value) for key, value in step.items()}
                scale = float(Batch.over(total, total, self.config).scale)
            weighted += step["factor"] * scale
            squared += step["squared"] * scale**2
        return weighted, squared


def correct(part: Part, config: CorrectionConfig) -> Correction:
    """Return the correction of a part, normalized over this part only. Its keep masks equal those of the hook.

    A dump has versions per response, not per token, so all tokens get the lag of the oldest version.
    """
    layout = part.streams.layout
    lag_S = torch.tensor([origin.versions_behind for origin in part.origins]) if config.staleness else None
    return compute_correction(
        proximal_logprobs_T=part.streams.proximal_logprobs_T,
        behavior_logprobs_T=part.streams.behavior_logprobs_T,
        response_mask_R=part.streams.response_mask_R,
        layout=layout,
        config=config.replace(metrics=(), scope="micro_batch"),
        lag_T=None if lag_S is None else layout.spread(lag_S),
    )


def _sum(values: Tensor) -> float:
    # For a mask this gives the same number in two thirds of the time.
    return float(values.count_nonzero() if values.dtype == torch.bool else values.sum(dtype=torch.float64))


def _divided(total: float, count: float) -> float:
    return total / count if count else math.nan
