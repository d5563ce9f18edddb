"""Which tokens top-k, top-p and min-p keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.rollout.definitions.distribution import Truncation

_MASS_OF_NOTHING = 1e-6


def kept_mask(probabilities_TV: Tensor, truncation: Truncation) -> Tensor:
    """``[T, V]``, bool: the tokens that are kept.

    Args:
        probabilities_TV: ``[T, V]``, before truncation.
        truncation: What is kept.
    """
    sorted_TV, order_TV = probabilities_TV.sort(dim=-1, descending=True, stable=True)
    num_kept_T = _num_kept(sorted_TV, truncation)
    rank_V = torch.arange(sorted_TV.shape[1], device=sorted_TV.device)
    return torch.zeros_like(sorted_TV, dtype=torch.bool).scatter(1, order_TV, rank_V < num_kept_T[:, None])


def kept_of_list(top: Sequence[float], truncation: Truncation) -> list[float] | None:
    """The kept ones of the largest log-probs, in descending order; None where the list may end before the last.

    A list that holds all but 1e-6 of the mass counts as whole, as float32 sums of a whole vocabulary are no better: the
    mass of the kept ones is then too low by up to 1e-6.

    Args:
        top: Natural log-probs of the most probable tokens, before truncation, in any order.
        truncation: What is kept.
    """
    ordered = sorted(top, reverse=True)
    if not ordered:
        return None
    probabilities = torch.tensor([ordered], dtype=torch.float64).exp()
    num_kept = int(_num_kept(probabilities, truncation))
    cuts = [num_kept]
    if truncation.top_p < 1.0 and truncation.mass_of != "all":
        cuts.append(int(_num_top_p_is_of(probabilities, truncation)))
    # A cut is proven by the token behind it, or by being the k-th.
    is_whole = probabilities.sum().item() > 1 - _MASS_OF_NOTHING
    k = truncation.top_k if truncation.keeps_ties == "none" else None
    return ordered[:num_kept] if is_whole or all(cut < len(ordered) or cut == k for cut in cuts) else None


def _num_kept(sorted_TV: Tensor, truncation: Truncation) -> Tensor:
    """``[T]``: how many tokens are kept, from probabilities in descending order; at least one."""
    num_kept_T = torch.minimum(_num_in_top_k(sorted_TV, truncation), _num_in_min_p(sorted_TV, truncation))
    if truncation.top_p < 1.0:
        before_TV = sorted_TV.cumsum(-1) - sorted_TV
        limit_T1 = truncation.top_p * _mass_of(sorted_TV, truncation)
        is_kept_TV = before_TV <= limit_T1 if truncation.keeps_next else before_TV < limit_T1
        num_in_top_p_T = is_kept_TV.sum(-1)
        if truncation.keeps_ties == "all":
            num_in_top_p_T = _num_with_ties(sorted_TV, num_in_top_p_T)
        num_kept_T = torch.minimum(num_kept_T, num_in_top_p_T)
    return num_kept_T


def _num_in_top_k(sorted_TV: Tensor, truncation: Truncation) -> Tensor:
    width = sorted_TV.shape[1]
    k = width if truncation.top_k is None else min(truncation.top_k, width)
    num_T = torch.full((len(sorted_TV),), k, device=sorted_TV.device)
    return num_T if truncation.keeps_ties == "none" else _num_with_ties(sorted_TV, num_T)


def _num_with_ties(sorted_TV: Tensor, num_T: Tensor) -> Tensor:
    """``[T]``: as many tokens and those that are as probable as the last of them."""
    return (sorted_TV >= sorted_TV.gather(1, num_T[:, None] - 1)).sum(-1)


def _num_in_min_p(sorted_TV: Tensor, truncation: Truncation) -> Tensor:
    return (sorted_TV >= truncation.min_p * sorted_TV[:, :1]).sum(-1)


def _num_top_p_is_of(sorted_TV: Tensor, truncation: Truncation) -> Tensor:
    num_T = _num_in_top_k(sorted_TV, truncation)
    return num_T if truncation.mass_of == "top_k" else torch.minimum(num_T, _num_in_min_p(sorted_TV, truncation))


def _mass_of(sorted_TV: Tensor, truncation: Truncation) -> Tensor | float:
    """``[T, 1]``: the mass that top-p is a share of."""
    if truncation.mass_of == "all":
        return 1.0
    return sorted_TV.cumsum(-1).gather(1, _num_top_p_is_of(sorted_TV, truncation)[:, None] - 1)
