"""What the weights are scaled by: self-normalisation and denominators, over one call, a group, or a rollout.

Token sums come from per-sequence sums, which are equal on every context-parallel rank: so the data-parallel group,
without context parallelism, is the right one for every total.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from mis_ext.correction.formula import NUM_RESPONSE, Column, Formula, Total, where
from mis_ext.correction.weights import Weight

Scope = Literal["micro_batch", "data_parallel", "rollout"]
NormalizeOver = Literal["kept", "valid"]
Denominator = Literal["fixed", "kept"]


class WeightScale(NamedTuple):
    """The two factors of all weights (0-dim): they are divided by ``mean_weight``, times ``denominator_factor``."""

    mean_weight: Tensor
    denominator_factor: Tensor


def ratio_or_one(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, elementwise; 1 where nothing was counted, so that one of them is 0."""
    counted = (denominator > 0.0) & (numerator > 0.0)
    return where(counted, numerator / where(counted, denominator, 1.0), 1.0)


SCALE_FORMULAS: dict[str, Formula] = {
    "mean_weight": Formula(ratio_or_one, (Total("sum", "weight_sum"), Total("sum", "weight_count"))),
    # `mis_denominator: kept`: the host divides by all response tokens (or samples); times all of them, and divided by
    # what is kept, the loss is a mean over what is kept.
    "denominator_factor": Formula(ratio_or_one, (Total("sum", "original_terms"), Total("sum", "kept_terms"))),
}


def term_formulas(weight: Weight | None, *, over: NormalizeOver | None, per_token_loss: bool) -> dict[str, Formula]:
    """Per sequence: its share of the sum of weights and of their count; its terms in the host's mean, all and kept.

    Args:
        weight: Tokens count one by one at token level, else sequences.
        over: The weights that count: of kept tokens, or of all that have one.
        per_token_loss: The host averages over tokens, not over per-sample means.
    """
    is_counted, mask = ("live_sequence", "live") if over == "kept" else ("usable", "valid")
    num_counted = Column("sum", mask, mask)
    if weight is not None and weight.level == "token":
        terms = {
            "weight_sum": Formula(_where_counted, (is_counted, Column("sum", "token_weight", mask))),
            "weight_count": Formula(_where_counted, (is_counted, num_counted)),
        }
    else:
        terms = {
            "has_counted": Formula(lambda counted, count: counted & (count > 0.0), (is_counted, num_counted)),
            "weight_sum": Formula.of(lambda has_counted, sequence_weight: where(has_counted, sequence_weight, 0.0)),
            "weight_count": Formula.of(lambda has_counted: where(has_counted, 1.0, 0.0)),
        }
    if per_token_loss:
        return terms | {"original_terms": Formula.named(NUM_RESPONSE), "kept_terms": Formula.named("num_kept")}
    # The host gives every response token of a sequence the weight 1 / num_response.
    return terms | {
        "original_terms": Formula.named("has_response"),
        "kept_terms": Formula.of(lambda num_kept, num_response: num_kept / num_response.clamp_min(1.0)),
    }


def _where_counted(counted: Tensor, value: Tensor) -> Tensor:
    return where(counted, value, 0.0)
