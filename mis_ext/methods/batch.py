"""What a method looks at: log-probs of up to four policies, advantages and masks of one call, finite everywhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mis_ext.correction.formula import NamedValues
from mis_ext.correction.statistics import STATISTICS, TOKEN_FORMULAS, Pair, Policy, Reduce, When
from mis_ext.methods.reductions import Reductions


class Batch:
    """One call's tokens. A token without a finite log-prob of every policy that is used is not ``valid_T``.

    Args:
        log_probs: ``[T]`` per policy that the method uses, nats, detached.
        advantages_T: ``[T]``.
        response_mask_T: ``[T]`` bool, the tokens that the policy generated.
        state_values_T: ``[T]``, what the advantage is on average in the token's state; None if nothing asks for it.
        reductions: How tokens become sequences.
        whole_sequences: Whether a token without a value takes its sequence with it.
    """

    def __init__(
        self,
        log_probs: Mapping[Policy, Tensor],
        *,
        advantages_T: Tensor,
        response_mask_T: Tensor,
        reductions: Reductions,
        whole_sequences: bool,
        state_values_T: Tensor | None = None,
    ) -> None:
        self.reductions = reductions
        self.response_T = response_mask_T
        values = () if state_values_T is None else (state_values_T,)
        rows = torch.stack([advantages_T, *values, *log_probs.values()])
        # What is not finite minus itself is NaN: few launches for all rows together.
        self._zero_or_nan_T = (rows - rows).sum(0)
        valid_T = response_mask_T & (self._zero_or_nan_T == 0.0)
        if whole_sequences:
            valid_T = response_mask_T & (reductions.count(response_mask_T != valid_T) == 0.0)
        self.valid_T = valid_T
        finite = torch.where(valid_T, rows, 0.0).unbind()
        self.advantages_T = finite[0]
        self._state_values_T = finite[1] if values else None
        self._log_probs = dict(zip(log_probs, finite[1 + len(values) :], strict=True))
        self._position_T: Tensor | None = None
        self._statistics: dict[Pair, NamedValues] = {}
        self._reduced: dict[tuple[str, Pair, Reduce, When], Tensor] = {}

    def log_prob(self, policy: Policy) -> Tensor:
        """The log-probs ``[T]`` of a policy in nats, 0 where a token is not valid."""
        return self._log_probs[policy]

    @property
    def state_values_T(self) -> Tensor:
        """The critic's values ``[T]``, in units of the advantage, 0 where a token is not valid."""
        assert self._state_values_T is not None
        return self._state_values_T

    def log_ratio(self, pair: Pair, reduce: Reduce = "token") -> Tensor:
        """``[T]`` log of numerator / denominator, or what a reduction makes of it."""
        return self.statistic("ratio", pair, reduce)

    def statistic(self, name: str, pair: Pair, reduce: Reduce = "token", *, of: When = "always") -> Tensor:
        """``[T]`` on the scale of its bounds (a ratio: its log), over the valid tokens that ``of`` means."""
        key = (name, pair, reduce, of)
        if key not in self._reduced:
            values_T = self._values(pair)[STATISTICS[name].token]
            mask_T = self.valid_T if of == "always" else self.valid_T & self.when(of, pair)
            self._reduced[key] = self.reductions.reduce(values_T, mask_T, reduce)
        return self._reduced[key]

    def worst(self, name: str, pair: Pair, reduce: Reduce, *, of: When = "always") -> Tensor:
        """``[T]``: :meth:`statistic` of a minimum or maximum; NaN where a response token of the sequence is not valid.

        A minimum with a NaN is NaN, so that one reduction finds both.
        """
        values_T = self._values(pair)[STATISTICS[name].token] + self._zero_or_nan_T
        mask_T = self.response_T
        if of != "always":
            mask_T = mask_T & (self.when(of, pair) | ~self.valid_T)
        return self.reductions.reduce(values_T, mask_T, reduce)

    def when(self, when: When, pair: Pair) -> Tensor:
        """``[T]`` bool: tokens for which the condition holds, by advantage or by the move of the ratio away from 1."""
        if when == "always":
            return torch.ones_like(self.valid_T)
        if when == "positive":
            return self.advantages_T > 0.0
        if when == "negative":
            return self.advantages_T < 0.0
        log_ratio_T = self.log_ratio(pair)
        return ((self.advantages_T > 0.0) & (log_ratio_T > 0.0)) | ((self.advantages_T < 0.0) & (log_ratio_T < 0.0))

    def by_sign(self, positive: float, negative: float) -> Tensor:
        """``[T]``: one number where the advantage is positive, another elsewhere."""
        is_positive_T = (self.advantages_T > 0.0).to(self.advantages_T.dtype)
        return is_positive_T * positive + (1.0 - is_positive_T) * negative

    @property
    def position_T(self) -> Tensor:
        """``[T]``: its place among the valid tokens of its response, from 1."""
        if self._position_T is None:
            position_T = self.reductions.position(self.valid_T).clamp_min(1)
            self._position_T = position_T.to(self.advantages_T.dtype)
        return self._position_T

    def _values(self, pair: Pair) -> NamedValues:
        if pair not in self._statistics:
            numerator_T, denominator_T = map(self.log_prob, pair)
            given = {"log_ratio": numerator_T - denominator_T, "proximal": numerator_T, "behavior": denominator_T}
            self._statistics[pair] = NamedValues(given, TOKEN_FORMULAS)
        return self._statistics[pair]
