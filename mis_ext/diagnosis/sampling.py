"""Faults of the distribution: the two log-probs are not of what was sampled from."""

from __future__ import annotations

import math

from mis_ext.diagnosis.cause import Finding
from mis_ext.diagnosis.limits import MIN_TOKENS
from mis_ext.diagnosis.measuring import Measured
from mis_ext.diagnosis.signals import Signals

MIN_EXPLAINED, MIN_SLOPE, MIN_SLOPE_ERRORS = 0.06, 0.01, 6.0
CUT_EXPLAINED = 0.3
"""What a cut (top-p, top-k) leaves looks like a line too: up to 0.21 of the variance of a trained model."""
OF_TEMPERATURE = 0.6
"""A temperature moves a log-prob by its distance from the mean over the vocabulary, which is not known. In a trained
model a line through log-probs explains 0.56 to 0.62 of that variance, and has as much of the slope."""
EXACT, BASE_ERROR = 0.98, 0.03
MIN_DEFICIT, MIN_DEFICIT_ERRORS = 1e-3, 8.0
MIN_BELOW = 0.9
SURE_DEFICIT, SURE_ERRORS = 0.03, 20.0
"""Nothing but a cut lowers the mean ratio by as much, whatever else moves the log-probs. In a trained model stale
weights, temperatures and other prompts stay below 0.014 and 9 standard errors; cuts begin at 0.047 and 29."""
MAX_PADDING_GAP = 0.05
SMALLEST_SHIFT = 1e-5


def temperature(measured: Measured) -> Finding | None:
    """The difference is a multiple of the log-prob."""
    line = measured.tokens.line
    if line.num_tokens < MIN_TOKENS:
        return None
    # Noise does not fall or rise with the log-prob of the side that sampled.
    behavior, proximal = line.on("behavior"), line.on("proximal")
    # Two texts make the difference fall with one log-prob and rise with the other.
    same_sign = behavior.slope * proximal.slope > 0.0
    is_cut = measured.signals is None or _loses_mass(measured.signals)
    least = max(CUT_EXPLAINED if is_cut else MIN_EXPLAINED, MIN_SLOPE_ERRORS**2 / line.num_tokens)
    if not same_sign or abs(behavior.slope) <= MIN_SLOPE or not least < behavior.explained <= EXACT:
        return None
    factor = 1.0 + max(behavior.slope / OF_TEMPERATURE, -0.99)
    return Finding(
        confidence="likely",
        evidence=f"the difference is {behavior.slope:+.2g} times the engine's log-prob, which explains "
        f"{behavior.explained:.0%} of its variance: as for a sampling temperature near {factor:.3g} times the "
        "trainer's",
        k3_share=min(behavior.explained / OF_TEMPERATURE, 1.0),
    )


def other_base(measured: Measured) -> Finding | None:
    """One log-prob is a multiple of the other: no temperature does that, as it moves what all tokens share."""
    line = measured.tokens.line
    fit = line.on("behavior")
    if line.num_tokens < MIN_TOKENS or fit.explained <= EXACT or fit.slope <= -1.0:
        return None
    factor = 1.0 / (1.0 + fit.slope)
    for base in (2.0, 10.0):
        for side, expected in (("engine", 1.0 / math.log(base)), ("trainer", math.log(base))):
            if abs(factor / expected - 1.0) < BASE_ERROR:
                return Finding(
                    confidence="certain",
                    evidence=f"the engine's log-probs are {factor:.3g} times the trainer's, which explains "
                    f"{fit.explained:.1%} of the differences: the {side}'s are logarithms to the base {base:g}",
                    k3_share=1.0,
                    is_all=True,
                )
    return None


def padding(measured: Measured) -> Finding | None:
    """All tokens lose a little of their probability."""
    assert measured.signals is not None
    evidence = _deficit(measured.signals)
    lowest = float(measured.signals.largest[1])
    if not evidence or lowest >= MAX_PADDING_GAP:
        return None
    return Finding(
        confidence="possible",
        evidence=f"{evidence}; no token loses more than {lowest:.2g} nats",
        k3_share=_one_sided(measured.signals),
    )


def truncation(measured: Measured) -> Finding | None:
    """The engine samples from a part of what the trainer scores."""
    assert measured.signals is not None
    evidence = _deficit(measured.signals)
    count, excess, _ = measured.signals.ratios.tolist()
    if not evidence or float(measured.signals.largest[1]) < MAX_PADDING_GAP or -excess <= MIN_DEFICIT * count:
        return None
    return Finding(
        confidence="likely",
        evidence=f"{evidence}; on average it keeps a mass of {1.0 + excess / count:.3g}",
        k3_share=_one_sided(measured.signals),
    )


def _loses_mass(signals: Signals) -> bool:
    """Whether the mean ratio is surely below 1: no temperature does that."""
    count, excess, squared = signals.ratios.tolist()
    deficit = -excess / max(count, 1.0)
    return bool(deficit > max(MIN_DEFICIT, MIN_DEFICIT_ERRORS * math.sqrt(squared) / max(count, 1.0)))


def _deficit(signals: Signals) -> str:
    """Evidence that the trainer gives probability to what cannot be sampled; empty where nothing says so."""
    count, excess, squared = signals.ratios.tolist()
    if count < MIN_TOKENS or signals.tokens.line.num_tokens < MIN_TOKENS:
        return ""
    deficit = -excess / count
    error = math.sqrt(max(squared / count - deficit**2, 0.0) / count)
    num_below, num_above = signals.beyond(max(signals.typical_shift(), SMALLEST_SHIFT))[:, 0].tolist()
    num_large = num_below + num_above
    is_one_sided = 0 < MIN_BELOW * num_large <= num_below
    is_sure = deficit > max(SURE_DEFICIT, SURE_ERRORS * error)
    if not is_sure and not (is_one_sided and deficit >= MIN_DEFICIT_ERRORS * error):
        return ""
    share = num_below / max(num_large, 1.0)
    return (
        f"the mean ratio is {1.0 - deficit:.4g}, {deficit / error if error else math.inf:.0f} standard errors below 1, "
        f"and {share:.0%} of the larger differences are below 0: the trainer gives probability to "
        "tokens that the engine cannot sample"
    )


def _one_sided(signals: Signals) -> float:
    """Share of k3 that is not noise, of which a token that was moved up has as much as any other."""
    (num_below, below), (num_above, above) = signals.shifts.sum(-1).tolist()
    noise = above / num_above * (num_below + num_above) if num_above else 0.0
    return max(1.0 - noise / (below + above), 0.0) if below + above else 0.0
