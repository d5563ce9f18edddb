# SPDX-License-Identifier: Apache-2.0
"""Scores from hidden states in plain PyTorch, one token after the other.

:mod:`mis_ext.scoring.hidden` computes the same in tiles of many tokens, over ranks, with its own backward pass. A test
compares both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def naive_score_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    temperature: float = 1.0,
    kept: Sequence[Sequence[int] | None] | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``[T]`` each, in nats, with gradient: log-probs of the tokens, and entropy.

    Args:
        hidden: ``[N, E]``, what the head is applied to.
        weight: ``[V, E]``, of the head.
        tokens: The id of each token.
        rows: The hidden state that scores each token; None: each in order.
        temperature: The logits are divided by it.
        kept: For each token the ids from which it was sampled; None for a token without a record. None: all ids.
        vocab_size: Ids from this one on are padding.
        bias: ``[V]``, of the head.
        logit_scale: Factor on the logits with their bias.
        soft_cap: Upper limit of logits.
    """
    log_probs, entropies = [], []
    for i, token in enumerate(tokens):
        logits_V = weight[:vocab_size] @ hidden[i if rows is None else rows[i]]
        if bias is not None:
            logits_V = logits_V + bias[:vocab_size]
        logits_V = logit_scale * logits_V
        if soft_cap is not None:
            logits_V = soft_cap * (logits_V / soft_cap).tanh()
        logits_V = logits_V / temperature
        # H = -sum_v p_v log p_v, over all ids
        log_p_V = logits_V.log_softmax(-1)
        entropies.append(-(log_p_V.exp() * log_p_V).sum())
        ids = None if kept is None else kept[i]
        if ids is not None:
            # Top-p: the log-prob among the kept ids, which always include the token itself.
            is_kept_V = torch.zeros_like(logits_V, dtype=torch.bool)
            is_kept_V[[*ids, token]] = True
            log_p_V = logits_V.masked_fill(~is_kept_V, -math.inf).log_softmax(-1)
        log_probs.append(log_p_V[token])
    return torch.stack(log_probs), torch.stack(entropies)
