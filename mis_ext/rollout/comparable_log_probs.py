# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probs with the definition of the server's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.rollout.definition import Distribution, Truncation


class TrainerLogProbs(NamedTuple):
    """Result of ``trainer_log_probs``.

    Attributes:
        log_probs_T: ``[T]``, nats, with gradient; -inf where ``outside_T``.
        outside_T: ``[T]``, bool: the token is not kept, so its probability under the trainer's policy is 0. The ratio
            is 0, and no gradient can increase it: mask these tokens.
    """

    log_probs_T: Tensor
    outside_T: Tensor


def trainer_log_probs(
    logits_TV: Tensor,
    token_ids: Sequence[int] | Tensor,
    distribution: Distribution,
    *,
    vocab_size: int | None = None,
    kept_ids: Sequence[Sequence[int]] | None = None,
) -> TrainerLogProbs:
    """Compute the trainer's log-probs by a distribution's definition, from the trainer's logits.

    With ``definition.returned`` they are comparable with the server's log-probs. With ``definition.sampled`` they are
    those of the policy that was sampled from. A truncation keeps the trainer's most probable tokens, which may differ
    from the tokens that the server kept: pass ``kept_ids`` if the server returned them.

    Args:
        logits_TV: ``[T, V]``, the trainer's logits before each token, not divided by a temperature. Computed in float64
            if they are float64, else in float32.
        token_ids: ``[T]``.
        distribution: The definition.
        vocab_size: The model's vocabulary; later columns are padding, which is ignored. None: there is no padding.
        kept_ids: For each token, the ids that the server kept (SGLang's ``output_token_sampling_mask``).

    Raises:
        ValueError: Log-probs of single tokens are given instead of logits, shapes differ, an id is outside the
            vocabulary, or the distribution cannot be computed from logits and ids.
    """
    if distribution.unrepeatable:
        raise ValueError(f"the trainer cannot compute this: {'; '.join(distribution.unrepeatable)}")
    ids_T = torch.as_tensor(token_ids, device=logits_TV.device)
    _check_shapes(logits_TV, ids_T, vocab_size)
    dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    scaled_TV = logits_TV[:, :vocab_size].to(dtype)
    if distribution.logit_bias:
        bias_V = scaled_TV.new_zeros(scaled_TV.shape[1])
        for token_id, bias in distribution.logit_bias:
            if not 0 <= token_id < len(bias_V):
                raise ValueError(f"token ids of logit_bias must be in [0, {len(bias_V) - 1}], got {token_id}")
            bias_V[token_id] = bias
        scaled_TV = scaled_TV + bias_V
    scaled_TV = scaled_TV / distribution.temperature
    outside_T = torch.zeros(len(ids_T), dtype=torch.bool, device=ids_T.device)
    if distribution.truncation:
        if kept_ids is None:
            kept_TV = kept_mask(scaled_TV.detach().softmax(-1), distribution.truncation)
        else:
            if len(kept_ids) != len(scaled_TV):
                raise ValueError(
                    f"logits have {len(scaled_TV)} positions, but there are {len(kept_ids)} lists of kept ids"
                )
            kept_TV = torch.zeros_like(scaled_TV, dtype=torch.bool)
            for row_V, ids in zip(kept_TV, kept_ids, strict=True):
                if not ids or not 0 <= min(ids) <= max(ids) < len(row_V):
                    raise ValueError(f"kept ids must be at least one, from 0 to {len(row_V) - 1}, got {list(ids)[:8]}")
                row_V[list(ids)] = True
        scaled_TV = scaled_TV.masked_fill(~kept_TV, -torch.inf)
        outside_T = ~kept_TV.gather(1, ids_T[:, None])[:, 0]
    # log softmax((logits + bias) / temperature) over the kept tokens.
    return TrainerLogProbs(scaled_TV.log_softmax(-1).gather(1, ids_T[:, None])[:, 0], outside_T)


def _check_shapes(logits_TV: Tensor, ids_T: Tensor, vocab_size: int | None) -> None:
    if logits_TV.ndim != 2:
        raise ValueError(
            f"logits of the whole vocabulary [T, V] are needed, got shape {[*logits_TV.shape]}: log-probs of single "
            "tokens cannot be converted to another temperature or another set of tokens, because they do not "
            "contain their normalizer"
        )
    if [*ids_T.shape] != [len(logits_TV)]:
        raise ValueError(f"logits have {len(logits_TV)} positions, but token ids have shape {[*ids_T.shape]}")
    width = logits_TV.shape[1]
    if vocab_size is not None and not 1 <= vocab_size <= width:
        raise ValueError(f"vocab_size must be in [1, {width}], the width of the logits, got {vocab_size}")
    size = width if vocab_size is None else vocab_size
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < size:
        raise ValueError(f"token ids must be in [0, {size - 1}], got {int(ids_T.min())} to {int(ids_T.max())}")


def kept_mask(probabilities_TV: Tensor, truncation: Truncation) -> Tensor:
    """``[T, V]``, bool: the kept tokens for probabilities before truncation; at least one per row."""
    sorted_TV, order_TV = probabilities_TV.sort(dim=-1, descending=True, stable=True)

    def with_ties(num_T: Tensor) -> Tensor:
        return (sorted_TV >= sorted_TV.gather(1, num_T[:, None] - 1)).sum(-1)

    width = sorted_TV.shape[1]
    k = width if truncation.top_k is None else min(truncation.top_k, width)
    in_top_k_T = torch.full((len(sorted_TV),), k, device=sorted_TV.device)
    if truncation.keeps_ties != "none":
        in_top_k_T = with_ties(in_top_k_T)
    kept_T = torch.minimum(in_top_k_T, (sorted_TV >= truncation.min_p * sorted_TV[:, :1]).sum(-1))
    if truncation.top_p < 1.0:
        # top_p is a share of the whole mass, or of the mass that the previous filters keep.
        filtered_T = in_top_k_T if truncation.mass_of == "top_k" else kept_T
        sum_TV = sorted_TV.cumsum(-1)
        mass_T1 = 1.0 if truncation.mass_of == "all" else sum_TV.gather(1, filtered_T[:, None] - 1)
        before_TV, limit_T1 = sum_TV - sorted_TV, truncation.top_p * mass_T1
        in_top_p_T = (before_TV <= limit_T1 if truncation.keeps_next else before_TV < limit_T1).sum(-1)
        if truncation.keeps_ties == "all":
            in_top_p_T = with_ties(in_top_p_T)
        kept_T = torch.minimum(kept_T, in_top_p_T)
    rank_V = torch.arange(width, device=sorted_TV.device)
    return torch.zeros_like(sorted_TV, dtype=torch.bool).scatter(1, order_TV, rank_V < kept_T[:, None])
