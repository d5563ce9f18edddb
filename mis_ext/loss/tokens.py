"""What the loss of a micro-batch is computed from, packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.statistics import Policy


class LossTokens(NamedTuple):
    """One micro-batch of the whole policy loss, packed.

    ``log_probs``: ``[T]`` per policy, nats; the current policy's carries gradient. ``advantages_T``: ``[T]``.
    ``entropy_T``: ``[T]``, nats, with gradient where its coefficient is not 0; None where nobody asks for it.
    ``response_mask_R``: ``[R]``, nonzero on tokens that the policy generated. ``divisor_S``: ``[S]``, what the host
    divides each sample by, at least 1. ``reverse_kl_T``: ``[T]``, of on-policy distillation, to be reported; or None.
    ``layout``, ``cp_group``, ``cp_rank``: where the tokens lie, and who holds the others of the same sequences.
    ``dp_group``: who holds other sequences. ``state_values_T``: ``[T]``, the mean advantage in the token's state; None
    where no method asks for it.
    """

    log_probs: Mapping[Policy, Tensor]
    advantages_T: Tensor
    entropy_T: Tensor | None
    response_mask_R: Tensor
    divisor_S: Tensor
    reverse_kl_T: Tensor | None
    layout: PackedLayout
    cp_group: Group | None = None
    cp_rank: int = 0
    dp_group: Group | None = None
    state_values_T: Tensor | None = None

    def detached(self) -> LossTokens:
        """The same tokens with log-probs and entropy detached from the graph."""
        entropy_T = None if self.entropy_T is None else self.entropy_T.detach()
        log_probs = {policy: values_T.detach() for policy, values_T in self.log_probs.items()}
        return self._replace(log_probs=log_probs, entropy_T=entropy_T)
