"""In which mode vLLM returned its log-probs: no response names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mis_ext.rollout.definitions.sampling_parameters import SamplingParameters

# JSON has no infinity: vLLM writes this in its place.
_MINUS_INFINITY = -9999.0
# A sum of float32 probabilities may exceed 1 by so much.
_MASS_ERROR = 1e-3


def tell_logprobs_mode(
    parameters: SamplingParameters, top_log_probs: Sequence[Sequence[float]]
) -> Literal["raw_logprobs", "processed_logprobs"] | None:
    """The ``--logprobs-mode`` of vLLM, by what a truncation did to the largest log-probs; None if these prove none.

    Processed log-probs of what is not kept are minus infinity; raw ones never are, and there are more than top-k.
    Without a truncation the modes differ by the temperature alone, which a list of the largest ones does not tell.

    Args:
        parameters: Of the request. Ask for more log-probs than ``top_k``: at least one is then not kept.
        top_log_probs: Per token, the largest log-probs that the server returned, in any order.

    Raises:
        ValueError: The numbers are logits, or some tokens prove one mode and others the other one.
    """
    told: set[Literal["raw_logprobs", "processed_logprobs"]] = set()
    for position, row in enumerate(top_log_probs):
        finite = [value for value in row if value > _MINUS_INFINITY]
        if math.fsum(map(math.exp, finite)) > 1.0 + _MASS_ERROR:
            raise ValueError(f"the probabilities of token {position} add up to more than 1: these are logits")
        if len(finite) < len(row):
            told.add("processed_logprobs")
        elif parameters.top_k is not None and len(row) > parameters.top_k:
            told.add("raw_logprobs")
    if len(told) > 1:
        raise ValueError("some tokens have log-probs of a truncated distribution, others of a whole one")
    return next(iter(told), None)
