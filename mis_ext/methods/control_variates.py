"""Control variates: what is added to every coefficient so that the mismatch pushes the policy nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from mis_ext.correction.formula import bounded_expm1
from mis_ext.correction.statistics import TOTAL, Pair
from mis_ext.methods.batch import Batch
from mis_ext.methods.kl_terms import Penalty, Term
from mis_ext.methods.method import Method
from mis_ext.methods.published import published
from mis_ext.methods.surrogates import Score


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftControl(Term):
    """Adds ``(ratio - 1) V`` to the coefficient of every valid token, ``V`` the value of its state.

    Off-policy the score has a mean: in a state ``s`` the actions of ``mu`` have ``E[grad log pi] = mu - pi`` in the
    logits, not 0. So whatever advantages have in common there, ``V(s)``, pushes the policy by ``V (mu - pi)``. The
    ratio times the score has no mean, hence ``E[(ratio - 1) V grad log pi] = -V (mu - pi)``: the push, taken back by
    the same tokens. The coefficient's own mean stays what it was, because ``E[ratio - 1] = 0``.

    Args:
        pair: The current policy, and the one that sampled.
    """

    pair: Pair = TOTAL
    scale = -1.0
    needs_state_values = True

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token, not yet multiplied by ``scale``."""
        slope_T = bounded_expm1(batch.log_ratio(self.pair)) * batch.state_values_T
        return Penalty(slope_T * batch.log_prob("current"), slope_T)


@published(
    formula="sg(A + (w - 1) V) log pi, V: mean of A in the token's state",
    paper="mis_ext; the drift: Marek, Ryabinin, Score Centering, arXiv:2609.20807, which needs the vocabulary",
)
def drift_control() -> Method:
    """The plain policy gradient without its drift, from sampled tokens only: a token's own advantage is not reweighted.

    When: a mismatch of trainer and engine with advantages that are not centred in every state: a critic, or one reward
    for many turns. Pass its value as ``state_values_T``; with ``V = A`` it is ``reinforce_token_is``, with ``V = 0``
    ``reinforce``.
    Claims: with the mean of ``A`` under what sampled as ``V`` the drift is gone, exactly, and only the part of ``A``
    that depends on the action is off-policy. To shift ``A`` and ``V`` by a number of the state changes no expectation.
    Counter-claims: a wrong ``V`` leaves the drift of its error. No published LLM training uses it. The ratio has no
    bound; with one the identity is lost.
    """
    return Method(surrogate=Score(), terms=(DriftControl(),))


FAMILY = (drift_control,)
