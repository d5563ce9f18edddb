"""Trust regions around what sampled: a token outside has no policy gradient, those inside their importance ratio."""

from __future__ import annotations

from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import STALENESS, TOTAL
from mis_ext.correction.weights import Weight
from mis_ext.methods.kl_terms import KlTerm
from mis_ext.methods.method import Method
from mis_ext.methods.published import Bound, ExcessBound, FromOne, NotNegative, UpToOne, published
from mis_ext.methods.surrogates import Ratio, Score

_W = Ratio(pair=TOTAL)


def _region(*, low: float, high: float) -> tuple[Gate, Gate]:
    """What stops a token that has become too likely, and one that has become too unlikely; 1 is no bound."""
    low, high = min(low, 1.0), min(high, 1.0)
    return (
        Gate(pair=TOTAL, statistic="probability_gain", high=high, when="positive", action="zero"),
        Gate(pair=TOTAL, statistic="probability_gain", low=-low, when="negative", action="zero"),
    )


@published(
    formula="w A 1[KL(p, q) <= phi] 1[KL(q, p) <= phi], KL of this token against all others",
    paper="Ling Team, KPop (report), 2026",
)
def kpop(*, phi: Bound = 0.1) -> Method:
    """A band in binary KL: tight where the token was likely, wide where it was rare.

    When: a band of ratios masks rare tokens and lets confident ones drift.
    Claims: IcePop masks fewer tokens while the gap widens; KPop does not.
    Counter-claims: the weight of a rare token may be ten or more: its ratio has no bound of its own.
    """
    gates = (Gate(pair=TOTAL, statistic=name, high=phi, action="zero") for name in ("binary_kl", "reverse_binary_kl"))
    return Method(surrogate=_W, factors=tuple(gates))


@published(
    formula="w A 1[low <= w <= high] 1[min over the sequence of w >= veto]",
    paper="Prime Intellect, INTELLECT-3, arXiv:2512.16144",
)
def intellect_3(*, low: UpToOne = 0.5, high: FromOne = 5.0, veto: UpToOne = 1e-5) -> Method:
    """IcePop's band on the total ratio, and a veto.

    When: asynchronous training of mixture-of-experts models.
    Claims: no reward collapse over long runs.
    Counter-claims: as ``icepop`` and ``veto``.
    """
    return Method(
        surrogate=_W, factors=(Gate(pair=TOTAL, low=low, high=high), Gate(pair=TOTAL, reduce="min", low=veto))
    )


@published(
    formula="A log pi 1[low <= w <= high] 1[low_sequence <= exp(mean log w) <= high_sequence]",
    paper="StepFun, Step-3.5-Flash (MIS-PO), arXiv:2602.10604",
)
def mis_po(
    *, low: UpToOne = 0.5, high: FromOne = 2.0, low_sequence: UpToOne = 0.996, high_sequence: FromOne = 1.001
) -> Method:
    """Filters of tokens and of sequences, and no weight: kept tokens count as on-policy.

    When: the variance of weights is too large.
    Claims: less gradient noise than importance weights at equal stability.
    Counter-claims: in a replication at staleness 256 the token filter alone reached 59 %, both 3 %, random rejection of
    as many sequences 41 %. The band of tokens is from mis_ext; the paper's is not known.
    """
    sequences = Gate(pair=TOTAL, reduce="mean", low=low_sequence, high=high_sequence)
    return Method(surrogate=Score(), factors=(Gate(pair=TOTAL, low=low, high=high), sequences))


@published(
    formula="sg(min(w, cap)) A log pi, 0 where A > 0, p - q > delta or A < 0, p - q < -delta",
    paper="Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879",
)
def dppo_tv(*, delta: ExcessBound = 0.15, cap: Bound = 20.0) -> Method:
    """A trust region of probabilities: it stops only updates that move further outside.

    When: instead of PPO's clip, with the behavior policy as centre.
    Claims: ratio clips constrain rare tokens too much and likely ones too little; stable without routing replay.
    Counter-claims: a rare token's probability can grow a hundredfold inside the region.
    """
    return Method(surrogate=Score(), factors=(Weight(pair=TOTAL, high=cap), *_region(low=delta, high=delta)))


@published(
    formula="sg(min(w, cap)) A log pi, 0 where KL(q, p) > delta and the update moves w away from 1",
    paper="Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879",
)
def dppo_kl(*, delta: Bound = 0.05, cap: Bound = 20.0) -> Method:
    """As ``dppo_tv``, with the binary KL from behavior to current policy.

    When: tokens that have become very unlikely should be protected: KL grows there, total variation does not.
    Claims: as ``dppo_tv``.
    Counter-claims: one sampled token says little about a distribution.
    """
    gate = Gate(pair=TOTAL, statistic="reverse_binary_kl", high=delta, when="outward", action="zero")
    return Method(surrogate=Score(), factors=(Weight(pair=TOTAL, high=cap), gate))


@published(
    formula="w A, 0 where A > 0, p - q > high or A < 0, p - q < -low; - tau (log w)^2 on all valid tokens",
    paper="Prime Intellect, prime-rl: default loss (code)",
)
def prime_rl(*, low: ExcessBound = 0.2, high: ExcessBound = 0.2, tau: NotNegative = 1e-3) -> Method:
    """DPPO's region with one bound for each sign, a plain ratio and a squared log-ratio as penalty.

    When: asynchronous training with that framework's defaults.
    Claims: default of prime-rl.
    Counter-claims: no bound on the ratio.
    """
    penalty = KlTerm(estimator="squared", scale=tau, pair=TOTAL)
    return Method(surrogate=_W, factors=_region(low=low, high=high), terms=(penalty,))


@published(
    formula="w A 1[abs(p - q) <= delta] - tau (log w)^2",
    paper="Prime Intellect, prime-rl: ipo loss (code)",
)
def ipo(*, delta: Bound = 0.1, tau: NotNegative = 1e-3) -> Method:
    """A band of probability differences, for both signs of the advantage.

    When: the drift itself should stop the gradient, as with ``kimi_k2_5``.
    Claims: later default of prime-rl, with 0.3.
    Counter-claims: a move back is stopped too.
    """
    delta = min(delta, 1.0)
    gate = Gate(pair=TOTAL, statistic="probability_gain", low=-delta, high=delta, action="zero")
    return Method(surrogate=_W, factors=(gate,), terms=(KlTerm(estimator="squared", scale=tau, pair=TOTAL),))


@published(
    formula="sg(w 1[1 - low < w < 1 + high]) A log pi",
    paper="GLM-5 Team, GLM-5: from Vibe Coding to Agentic Engineering, arXiv:2602.15763, equations 3 to 5",
)
def glm_5(*, low: UpToOne = 0.2, high: ExcessBound = 0.28) -> Method:
    """Direct double-sided importance sampling: no proximal policy, a token outside the band is masked.

    When: rollouts that span several versions of the weights, whose exact proximal policy is not known.
    Claims: simpler than IcePop and more stable.
    Counter-claims: a controlled bias, as its authors say; the band also stops moves back. The report gives the band no
    numbers for agents; these are its numbers for reasoning.
    """
    band = Gate(pair=TOTAL, low=1.0 - low, high=1.0 + high, action="zero")
    return Method(surrogate=Score(), factors=(Weight(pair=TOTAL, mode="unbounded"), band))


@published(
    formula="sg(w 1[low <= w <= high]) A log pi, A = sg(log(teacher / current)) (+ the outcome's advantage)",
    paper="Xiaomi, MiMo-V2-Flash (MOPD), arXiv:2601.02780, equations 7 and 8",
)
def mimo_mopd(*, low: UpToOne = 0.5, high: FromOne = 2.0) -> Method:
    """On-policy distillation: pass the teacher's log-ratio as advantage.

    When: teachers of several domains become one student.
    Claims: inherits nearly all of each teacher.
    Counter-claims: the report gives the band no numbers: these are from mis_ext.
    """
    return Method(
        surrogate=Score(),
        factors=(Weight(pair=TOTAL, mode="unbounded"), Gate(pair=TOTAL, low=low, high=high, action="zero")),
    )


@published(
    formula="min(r A, clip(r, 0.8, 1.2) A), 0 where A < 0 and mean log(behavior / current) > delta",
    paper="DeepSeek-AI, DeepSeek-V3.2 (off-policy sequence masking), arXiv:2512.02556",
)
def opsm(*, delta: NotNegative = 0.05) -> Method:
    """Bad sequences that have become unlikely are rejected.

    When: always harmless: positive advantages are never touched.
    Claims: stabilises training that is off-policy because of updates or because of the engine.
    Counter-claims: with the proximal instead of the behavior policy, as some frameworks have it, it does not see the
    mismatch. The paper gives no threshold: this one is from mis_ext.
    """
    gate = Gate(pair=TOTAL, statistic="k1", reduce="mean", high=delta, when="negative")
    return Method(surrogate=Ratio(pair=STALENESS, low=0.8, high=1.2), factors=(gate,))


FAMILY = (kpop, intellect_3, mis_po, dppo_tv, dppo_kl, prime_rl, ipo, glm_5, mimo_mopd, opsm)
