"""Faults of the distribution: the two log-probs are not of what was sampled from."""

from __future__ import annotations

import math

import torch

from mis_ext.diagnosis.cause import Finding
from mis_ext.diagnosis.limits import MIN_TOKENS
from mis_ext.diagnosis.measuring import Measured
from mis_ext.diagnosis.signals import Signals
from mis_ext.diagnosis.size import PENALTIES

MIN_EXPLAINED, MIN_SLOPE, MIN_SLOPE_ERRORS = 0.06, 0.01, 6.0
CUT_EXPLAINED, SURE_EXPLAINED = 0.45, 0.45
"""What a cut (top-p, top-k) or padding leaves looks like a line that rises, too: up to 0.38 of the variance in a
trained model. A repetition penalty, which is a temperature of some tokens, leaves 0.17; with other causes 0.37."""
OF_TEMPERATURE = 0.6
"""A temperature moves a log-prob by its distance from the mean over the vocabulary, which is not known. In a trained
model a line through log-probs explains 0.56 to 0.62 of that variance, and has as much of the slope."""
BASES = (2.0, 10.0)
EXACT, EXACT_BELOW_1 = 0.9, 0.75
"""No temperature explains more: up to 0.73 above 1, with top-k 0.78, with padding 0.87; up to 0.59 below 1."""
BASE_ERROR, FAR_ERROR = 0.04, 0.22
"""Of the logarithm of the factor: what noise makes of it, and another temperature beside it."""
MIN_DEFICIT, MIN_DEFICIT_ERRORS = 1e-3, 8.0
MIN_BELOW = 0.9
SURE, SURE_BOUNDED, BOUNDED = (0.03, 20.0), (0.005, 12.0), 3.0
"""Deficit and standard errors: nothing but a cut or padding lowers the mean ratio by as much, whatever else moves the
log-probs. In a trained model other prompts leave 0.014 and 9, because a sample misses tokens that the trainer finds far
more probable. It misses few where none is far less probable either, by 3 nats: all others stay below 0.003 and 1.5."""
MAX_PADDING_GAP = 0.05
SMALLEST_SHIFT = 1e-5

CUTS = "top-p, top-k or min-p, or padding of the trainer's vocabulary, alone or beside it"
SHIFTS = torch.linspace(0.0, 3.0, 301, dtype=torch.float64)
ASYMMETRY = torch.erf(SHIFTS / math.sqrt(2.0)) + math.sqrt(2.0 / math.pi) * SHIFTS * (-0.5 * SHIFTS**2).exp() / (
    1.0 + SHIFTS**2
)
"""Of the squares of a Gaussian that is moved by so many deviations."""


def temperature(measured: Measured) -> Finding | None:
    """The difference is a multiple of the log-prob."""
    line = measured.tokens.line
    if line.num_tokens < MIN_TOKENS:
        return None
    # Noise does not fall or rise with the log-prob of the side that sampled.
    behavior, proximal = line.on("behavior"), line.on("proximal")
    may_be_cut = measured.signals is None or _loses_mass(measured.signals)
    rises = behavior.slope > 0.0
    # Two texts make the difference fall with one log-prob and rise with the other.
    same_sign = behavior.slope * proximal.slope > 0.0
    least = max(CUT_EXPLAINED if may_be_cut and rises else MIN_EXPLAINED, MIN_SLOPE_ERRORS**2 / line.num_tokens)
    most = EXACT if rises else EXACT_BELOW_1
    if not same_sign or abs(behavior.slope) <= MIN_SLOPE or not least < behavior.explained <= most:
        return None
    factor = 1.0 + max(behavior.slope / OF_TEMPERATURE, -0.99)
    is_sure = not rises or behavior.explained > SURE_EXPLAINED
    return Finding(
        confidence="likely" if is_sure else "possible",
        evidence=f"the difference is {behavior.slope:+.2g} times the engine's log-prob, which explains "
        f"{behavior.explained:.0%} of its variance: as for a sampling temperature near {factor:.3g} times the "
        "trainer's",
        k3_share=min(behavior.explained / OF_TEMPERATURE, 1.0),
        alternatives=(*([] if is_sure else [PENALTIES]), *([CUTS] if may_be_cut and rises else [])),
    )


def other_base(measured: Measured) -> Finding | None:
    """One log-prob is a multiple of the other: no temperature does that, as it moves what all tokens share."""
    line = measured.tokens.line
    fit = line.on("behavior")
    least = EXACT if fit.slope > 0.0 else EXACT_BELOW_1
    if line.num_tokens < MIN_TOKENS or fit.explained <= least or fit.slope <= -1.0:
        return None
    factor = 1.0 / (1.0 + fit.slope)
    bases = [("engine", base, 1.0 / math.log(base)) for base in BASES]
    bases += [("trainer", base, math.log(base)) for base in BASES]
    error, side, base = min((abs(math.log(factor / expected)), side, base) for side, base, expected in bases)
    if error > (FAR_ERROR if fit.explained > EXACT else BASE_ERROR):
        return None
    is_near = error < BASE_ERROR
    return Finding(
        confidence="certain" if is_near else "possible",
        evidence=f"the engine's log-probs are {factor:.3g} times the trainer's, which explains {fit.explained:.1%} of "
        f"the differences: the {side}'s are logarithms to the base {base:g}",
        k3_share=1.0,
        is_all=True,
        alternatives=() if is_near else ("log-probs that are multiplied by another number",),
    )


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
        alternatives=("padding of the trainer's vocabulary", "a temperature above 1 beside it"),
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
    least, errors = SURE_BOUNDED if float(signals.largest[1]) < BOUNDED else SURE
    is_sure = deficit > max(least, errors * error)
    if not is_sure and not (is_one_sided and deficit >= MIN_DEFICIT_ERRORS * error):
        return ""
    share = num_below / max(num_large, 1.0)
    return (
        f"the mean ratio is {1.0 - deficit:.4g}, {deficit / error if error else math.inf:.0f} standard errors below 1, "
        f"and {share:.0%} of the larger differences are below 0: the trainer gives probability to "
        "tokens that the engine cannot sample"
    )


def _one_sided(signals: Signals) -> float:
    """Share of k3 that a cut has beside noise, which alone moves tokens up and down alike.

    A shift of ``x`` deviations of a Gaussian noise has ``x^2 / (1 + x^2)`` of the squares. Then the squares of tokens
    that were moved down exceed those of the others by ``asymmetry(x)`` of all.
    """
    below, above = signals.shifts[:, 1].sum(-1).tolist()
    if not below + above:
        return 0.0
    index = int(torch.searchsorted(ASYMMETRY, (below - above) / (below + above)))
    shift = float(SHIFTS[min(index, len(SHIFTS) - 1)])
    return shift**2 / (1.0 + shift**2)
