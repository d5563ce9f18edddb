# SPDX-License-Identifier: Apache-2.0
"""A method: a surrogate that carries the gradient, factors that weigh it, and additive terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.methods.batch import WHOLE_SEQUENCE, Batch, Policy, Reduce, Reductions
from mis_ext.methods.parts import Factor, Penalty, Slope, Surrogate, Term
from mis_ext.validation import check_choice, check_instance, check_tensors

NormalizeOver = Literal["tokens", "all_tokens", "sequences"]
_POLICIES: tuple[Policy, ...] = get_args(Policy)

_PRODUCTS = frozenset({"sum", "prefix", "segment_sum"})
_OF_SEQUENCES = WHOLE_SEQUENCE | {"min", "max"}


class MethodResult(NamedTuple):
    """Result of a method for each local token, ``[T]``; all fields except ``loss_T`` are detached.

    ``coefficient_T``: the factor of ``grad log pi`` in gradient ascent on the objective, before any denominator.
    ``loss_T``: the loss per token; its gradient is minus the coefficient. Both are 0 for a token that is not valid. If
    the tokens of a sequence share one ratio, the coefficient is a mean over the sequence, and is valid for a sum of
    losses in which all tokens of a sequence have the same weight. ``kept_T``: bool, valid and not rejected.
    ``valid_T``: bool, a response token with finite log-probs. ``clipped_T``: bool, valid, and a bound of the surrogate
    stopped its gradient. ``num_invalid``: 0-dim, local response tokens that are not valid.
    """

    loss_T: Tensor
    coefficient_T: Tensor
    kept_T: Tensor
    valid_T: Tensor
    clipped_T: Tensor
    num_invalid: Tensor


class Evaluation(NamedTuple):
    """``[T]`` each, without gradient: the loss of a method per token; 0 or False for a token that is not valid.

    ``policy``: loss of the policy gradient, and its slope in log pi before :meth:`slope` spreads it over a sequence
    whose tokens share one ratio (``surrogate``). ``penalty``: value and slope of all terms, or None. ``live_T``: no
    factor drops the token. ``kept_T``: no factor and no correction rejects it.
    """

    batch: Batch
    policy: Penalty
    surrogate: Slope
    penalty: Penalty | None
    live_T: Tensor
    kept_T: Tensor

    @property
    def loss_T(self) -> Tensor:
        """``[T]``: policy gradient and penalty."""
        return self.policy.value_T if self.penalty is None else self.policy.value_T + self.penalty.value_T

    def slope(self, share_T: Tensor | float = 1.0) -> Tensor:
        """``[T]``: the derivative by each log-prob of the sum of all losses, each times its share."""
        slope_T = self.surrogate.spread(share_T * self.policy.slope_T, self.batch)
        return slope_T if self.penalty is None else slope_T + share_T * self.penalty.slope_T


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """``objective_t = A_t * surrogate_t * product of factors_t - sum of terms_t``.

    Args:
        surrogate: The part with gradient.
        factors: Its weights and gates, without gradient.
        terms: Penalties that are subtracted.
        normalize_over: Divide the weights by their mean over the ``tokens`` of all ranks that no factor drops, or over
            the ``sequences`` with such tokens: self-normalized importance sampling. A single sequence is then not
            corrected. ``all_tokens``: over all valid tokens, where a dropped token counts as 0.
    """

    surrogate: Surrogate
    factors: tuple[Factor, ...] = ()
    terms: tuple[Term, ...] = ()
    normalize_over: NormalizeOver | None = None

    def __post_init__(self) -> None:
        check_instance("surrogate", self.surrogate, Surrogate)
        for key, parts, kind in (("factors", self.factors, Factor), ("terms", self.terms, Term)):
            for i, part in enumerate(check_instance(key, parts, tuple)):
                check_instance(f"{key}[{i}]", part, kind)
        if self.normalize_over is not None:
            check_choice("normalize_over", self.normalize_over, get_args(NormalizeOver))

    @property
    def _parts(self) -> tuple[Surrogate | Factor | Term, ...]:
        return (self.surrogate, *self.factors, *self.terms)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies whose log-probs it needs, always with the current policy."""
        pairs = [factor.pair for factor in self.factors]
        pairs += chain.from_iterable(term.pairs for term in self.terms)
        used = {"current", *chain.from_iterable(pairs), *(self.surrogate.pair or ())}
        return tuple(policy for policy in _POLICIES if policy in used)

    @property
    def reduces(self) -> frozenset[Reduce]:
        """Reductions of surrogate and factors over a sequence."""
        return frozenset((self.surrogate.reduce, *(factor.reduce for factor in self.factors)))

    @property
    def weighs_behavior(self) -> bool:
        """True if the behavior policy weights the gradient, so that another such weight would correct twice."""
        pairs = [self.surrogate.pair or ()]
        pairs += [factor.pair for factor in self.factors if factor.action is None]
        pairs += chain.from_iterable(term.pairs for term in self.terms if term.needs_state_values)
        return any("behavior" in pair for pair in pairs)

    @property
    def averages_over_batch(self) -> bool:
        """True if it uses a value over all tokens of all ranks."""
        return self.normalize_over is not None or any(part.reduce == "batch_mean" for part in self._parts)

    @property
    def is_of_tokens(self) -> bool:
        """True if each token's coefficient depends only on its own log-probs."""
        is_token = self.surrogate.spread == "token" and all(part.reduce == "token" for part in self._parts)
        return is_token and self.normalize_over is None

    @property
    def multiplies_ratios(self) -> bool:
        """True if a product of behavior ratios over many tokens weights or rejects them."""
        parts: tuple[Surrogate | Factor, ...] = (self.surrogate, *self.factors)
        return any("behavior" in (part.pair or ()) and part.reduce in _PRODUCTS for part in parts)

    @property
    def judges_sequences(self) -> bool:
        """True if a factor rejects tokens by a value of their sequence."""
        return any(factor.action is not None and factor.reduce in _OF_SEQUENCES for factor in self.factors)

    @property
    def needs_state_values(self) -> bool:
        """True if it needs ``state_values_T``."""
        return any(term.needs_state_values for term in self.terms)

    def __call__(
        self,
        *,
        current_logprobs_T: Tensor,
        behavior_logprobs_T: Tensor | None = None,
        proximal_logprobs_T: Tensor | None = None,
        reference_logprobs_T: Tensor | None = None,
        advantages_T: Tensor,
        state_values_T: Tensor | None = None,
        response_mask_T: Tensor,
        layout: PackedLayout,
        cp_group: Group | None = None,
        dp_group: Group | None = None,
    ) -> MethodResult:
        """Compute coefficient and loss of each local token, without a device synchronization or a loop over sequences.

        Args:
            current_logprobs_T: ``[T]``, nats, with gradient if the loss needs one.
            behavior_logprobs_T: ``[T]``, nats, of the policy that sampled the tokens; required if it is one of
                :attr:`policies`.
            proximal_logprobs_T: ``[T]``, nats, scored by the trainer before the update; required likewise.
            reference_logprobs_T: ``[T]``, nats; required likewise.
            advantages_T: ``[T]``.
            state_values_T: ``[T]``, the mean advantage in the token's state; required if :attr:`needs_state_values`.
            response_mask_T: ``[T]``, nonzero on tokens that the policy generated.
            layout: Lengths and positions of the local tokens.
            cp_group: Ranks that hold other parts of the same sequences; None for one rank.
            dp_group: Ranks that hold other sequences, for statistics of the batch; None for one rank.

        Raises:
            ValueError: The log-probs of a policy or the state values are missing, or the length of a tensor does not
                fit the layout.
        """
        given = {
            "behavior": behavior_logprobs_T,
            "proximal": proximal_logprobs_T,
            "current": current_logprobs_T,
            "reference": reference_logprobs_T,
        }
        if self.needs_state_values and state_values_T is None:
            raise ValueError("this method uses the value of each token's state: pass state_values_T")
        log_probs: dict[Policy, Tensor] = {}
        for policy in self.policies:
            values_T = given[policy]
            if values_T is None:
                raise ValueError(f"this method compares with the {policy} policy: pass {policy}_logprobs_T")
            log_probs[policy] = values_T
        tensors = {"advantages_T": advantages_T, "response_mask_T": response_mask_T}
        tensors |= {f"{policy}_logprobs_T": values_T for policy, values_T in log_probs.items()}
        tensors |= {} if state_values_T is None else {"state_values_T": state_values_T}
        check_tensors(tensors)
        check_instance("layout", layout, PackedLayout)
        for name, values_T in tensors.items():
            if values_T.shape != (layout.num_local_tokens,):
                raise ValueError(
                    f"{name} has the shape {tuple(values_T.shape)}, but the layout has {layout.num_local_tokens} tokens"
                )
        with torch.no_grad():
            batch = self.batch_of(
                log_probs,
                advantages_T=advantages_T,
                response_mask_T=response_mask_T.bool(),
                reductions=Reductions(layout, cp_group=cp_group, dp_group=dp_group),
                state_values_T=state_values_T,
            )
            found = self.evaluate(batch)
            slope_T = found.slope()
        loss_T: Tensor = LossOfSlopes.apply(found.loss_T, current_logprobs_T, slope_T, None, None)  # type: ignore[no-untyped-call]
        return MethodResult(
            loss_T=loss_T,
            coefficient_T=-slope_T,
            kept_T=found.kept_T,
            valid_T=batch.valid_T,
            clipped_T=found.surrogate.is_clipped_T & batch.valid_T,
            num_invalid=(batch.response_T != batch.valid_T).sum(),
        )

    def batch_of(
        self,
        log_probs: Mapping[Policy, Tensor],
        *,
        advantages_T: Tensor,
        response_mask_T: Tensor,
        reductions: Reductions,
        state_values_T: Tensor | None = None,
    ) -> Batch:
        """Return the inputs of this method; for the arguments see :class:`~mis_ext.methods.batch.Batch`."""
        return Batch(
            {name: _detached(values_T) for name, values_T in log_probs.items()},
            advantages_T=_detached(advantages_T),
            response_mask_T=response_mask_T,
            reductions=reductions,
            whole_sequences=not self.reduces.isdisjoint(WHOLE_SEQUENCE),
            state_values_T=_detached(state_values_T)
            if self.needs_state_values and state_values_T is not None
            else None,
        )

    def weigh(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """``[T]`` each: the product of all weights, whether no factor drops the token, and whether none rejects it."""
        live_T = kept_T = batch.valid_T
        weight_T: Tensor | None = None
        for factor in self.factors:
            found_T = factor.evaluate(batch)
            if factor.action is None:
                weight_T = found_T if weight_T is None else weight_T * found_T
            else:
                live_T = live_T & found_T
                kept_T = kept_T & found_T if factor.action == "reject" else kept_T
        if weight_T is None:
            weight_T = torch.ones_like(batch.advantages_T)
        if self.normalize_over is not None:
            counted_T = batch.valid_T if self.normalize_over == "all_tokens" else live_T
            share_T = torch.ones_like(weight_T)
            if self.normalize_over == "sequences":
                # The weight of a sequence counts once, for any number of tokens.
                share_T = batch.reductions.count(counted_T).to(weight_T.dtype).clamp_min(1.0).reciprocal()
            total = batch.reductions.batch_total(weight_T * share_T, live_T)
            weight_T = weight_T / (total / batch.reductions.batch_total(share_T, counted_T).clamp_min(1.0))
        return weight_T, live_T, kept_T

    def evaluate(
        self, batch: Batch, *, weights_T: Tensor | None = None, keep_mask_T: Tensor | None = None
    ) -> Evaluation:
        """The loss per token, with the weights and the mask of a correction if there is one."""
        weight_T, live_T, kept_T = self.weigh(batch)
        paid_T, weighed_T = batch.valid_T, live_T
        if keep_mask_T is not None:
            paid_T, weighed_T, kept_T = paid_T & keep_mask_T, live_T & keep_mask_T, kept_T & keep_mask_T
        if weights_T is not None:
            weight_T = weight_T * weights_T
        cost_T = torch.where(weighed_T, weight_T * -batch.advantages_T, 0.0)
        surrogate = self.surrogate.evaluate(batch)
        penalty: Penalty | None = None
        for term in self.terms:
            own = Penalty(*(torch.where(paid_T, term.scale * each_T, 0.0) for each_T in term.evaluate(batch)))
            penalty = own if penalty is None else Penalty(*(a_T + b_T for a_T, b_T in zip(penalty, own, strict=True)))
        policy = Penalty(cost_T * surrogate.value_T, cost_T * surrogate.slope_T)
        return Evaluation(batch, policy, surrogate, penalty, live_T, kept_T)


class LossOfSlopes(torch.autograd.Function):
    """A loss whose derivatives by log-probs and entropy are known: one value, or one per token."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        _log_prob_T: Tensor,
        slope_T: Tensor,
        _entropy_T: Tensor | None,
        entropy_slope_T: Tensor | None,
    ) -> Tensor:
        """The given loss itself, which Megatron divides in place. Other ranks are not notified of an error here."""
        ctx.save_for_backward(slope_T, entropy_slope_T)
        ctx.mark_dirty(loss)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, Tensor | None, None]:
        """The gradient by log-probs and entropy: ``grad`` times the slopes that the forward saved."""
        slope_T, entropy_slope_T = ctx.saved_tensors
        return None, grad * slope_T, None, None if entropy_slope_T is None else grad * entropy_slope_T, None


def _detached(values_T: Tensor) -> Tensor:
    """Return a detached float32 tensor; float64 stays float64."""
    return values_T.detach().to(torch.promote_types(values_T.dtype, torch.float32))
