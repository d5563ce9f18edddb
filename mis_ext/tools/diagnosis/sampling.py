# SPDX-License-Identifier: Apache-2.0
"""Faults of the distribution: a log-prob is not from the distribution that was sampled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mis_ext.tools.diagnosis import thresholds as limit
from mis_ext.tools.diagnosis.cause import Found, Left, cause
from mis_ext.tools.diagnosis.evidence import Evidence, mean_and_error

OLD_WEIGHTS = "stale weights, or an adapter that one side lacks"
PENALTIES = "penalties or a logits processor of the engine"
CUTS = "top-p, top-k or min-p, or padding of the trainer's vocabulary, alone or together with it"
NOISE = (
    f"a smaller one, together with {OLD_WEIGHTS}, {PENALTIES}, another prompt, chat template or context, low "
    "precision, a mixture of experts, or what begins at a position"
)


def line_of(log_prob: Tensor, difference: Tensor) -> tuple[float, float]:
    """Fit the difference as a line in a log-prob; return its slope and the explained share of the variance."""
    if len(log_prob) < 2:
        return 0.0, 0.0
    x, d = log_prob - log_prob.mean(), difference - difference.mean()
    spread, spread_d, together = float(x @ x), float(d @ d), float(x @ d)
    if spread <= 0.0 or spread_d <= 0.0:
        return 0.0, 0.0
    return together / spread, together**2 / (spread * spread_d)


@cause(
    name="temperature",
    title="another temperature in one of the log-probs",
    looks_like="Differences grow or fall with the log-prob, from the first step. One distribution is a power of the "
    "other",
    advice="Divide the trainer's logits by the sampling temperature, or request log-probs of the sampled distribution "
    "from the engine (vLLM: --logprobs-mode processed_logprobs).",
    is_fault=True,
    is_setting=True,
)
def temperature(left: Left) -> Found | None:
    """One distribution is a power of the other. Other differences add noise to it, or remove a part of it."""
    tokens = left.tokens.uncertain
    engine, trainer = left.powers
    is_doubtful = engine.excess > limit.SAMPLED_ERRORS * engine.excess_error or abs(engine.fit) > limit.FITS
    # If a few ratios dominate the mean, its error says little. So a bad fit also makes the engine's side doubtful.
    is_of_trainer = is_doubtful and abs(trainer.excess) < limit.SAMPLED_FACTOR * engine.excess
    power, side_T, sign = (trainer, tokens.trainer_T, -1.0) if is_of_trainer else (engine, tokens.engine_T, 1.0)
    slope, explained = line_of(side_T, tokens.d_T)
    count, slope = len(tokens), sign * slope
    # Only truncated sampling gives a rising line. Far below a temperature of 1 no sample contains the largest ratios.
    is_cut = power.loses_mass
    least = limit.CUT_EXPLAINED if is_cut and slope > 0.0 else limit.MIN_EXPLAINED
    least = max(least, limit.MIN_SLOPE_ERRORS**2 / max(count, 1))
    if count < limit.MIN_TOKENS or abs(slope) <= limit.MIN_SLOPE or explained <= least:
        return None
    # The share of the variance of log-probs within positions, if nothing else differs.
    within = slope / (power.slope - 1.0) if power.slope != 1.0 else math.nan
    if is_cut:
        if slope < 0.0 and power.fit < -limit.ONE_SIDED:
            return None
    elif not within > limit.MIN_EXPLAINED:
        return None
    is_alone = within >= limit.LEAST_WITHIN and abs(power.slope - 1.0) > limit.SAMPLED_ERRORS * power.error
    # Other differences may have all that the line does not explain, or nothing.
    room = [slope, slope / limit.LEAST_WITHIN]
    near, share = slope / limit.WITHIN, min(explained / limit.WITHIN, 1.0)
    may_have_more = is_alone and explained < limit.MAX_EXPLAINED * limit.MOST_WITHIN
    if is_alone:
        near = power.slope - 1.0
        room = [slope, near + math.copysign(limit.SAMPLED_ERRORS * power.error, near)]
        share = share if is_cut and slope > 0.0 else 1.0
    if near <= limit.SMALLEST_TEMPERATURE - 1.0:
        return None
    is_fit = abs(power.fit) <= limit.FITS
    low, high = (1.0 + max(each, limit.SMALLEST_TEMPERATURE - 1.0) for each in (min(room), max(room)))
    sampled, other = (
        ("the tokens were sampled from the trainer's distribution at a temperature", "that of the engine's log-probs")
        if is_of_trainer
        else ("the differences are those of a sampling temperature", "that of the trainer's log-probs")
    )
    return temperature.found(
        confidence="likely" if is_fit and is_alone and not (is_cut and slope > 0.0) else "possible",
        evidence=f"{sampled} near {1.0 + near:.3g} times {other} ({low:.3g} to {high:.3g}, depending on "
        "other differences)" + ("" if is_fit else f". The fit is bad: {power.fit:+.2f} in [-1, 1], where 0 is exact"),
        k3_share=share,
        is_up_to=may_have_more,
        alternatives=(
            *([] if is_alone else [PENALTIES]),
            *([] if is_fit or is_cut else ["another change of the logits, such as a soft cap"]),
            *([] if is_fit else ["logarithms to another base together with another cause"]),
            *([CUTS] if is_cut and slope > 0.0 else []),
            *([NOISE] if may_have_more else []),
        ),
    )


def stale_words(tokens: Evidence) -> tuple[str, ...]:
    """Describe stale weights of all tokens, from their versions or from the signs of the differences."""
    behind_S = tokens["versions_behind"][tokens.num_S > 0]
    if not len(behind_S):
        return ()
    if not bool((behind_S.isnan() | (behind_S == 0.0)).any()):
        return (f"stale weights: all {len(tokens)} tokens were sampled with weights of another version",)
    if bool((behind_S == 0.0).all()) or not has_learned(tokens):
        return ()
    count, share, _ = tokens.raised
    return (
        f"{OLD_WEIGHTS}, or a penalty: the trainer finds {share:.0%} of {count:.0f} uncertain tokens "
        "more probable than the engine does, as after an update; after rounding it is about half",
    )


def has_learned(tokens: Evidence) -> bool:
    """Return True if the trainer finds most uncertain tokens more probable, as after further updates."""
    count, share, error = tokens.raised
    return count >= limit.MIN_OPEN and share >= limit.RAISED and share - 0.5 >= limit.RAISED_ERRORS * error


def line_words(left: Left) -> tuple[str, ...]:
    """Describe a line in the engine's log-probs that is too uncertain for the cause ``temperature``."""
    tokens = left.tokens.uncertain
    slope, explained = line_of(tokens.engine_T, tokens.d_T)
    least = max(limit.MIN_EXPLAINED * (1.0 - left.explained), limit.MIN_SLOPE_ERRORS**2 / max(len(tokens), 1))
    # Truncated sampling gives a rising line.
    if explained <= least or (slope > 0.0 and left.powers[0].loses_mass):
        return ()
    return (f"a temperature {'above' if slope > 0.0 else 'below'} 1 together with it: a line explains {explained:.0%}",)


@cause(
    name="top_p_or_top_k",
    title="truncated sampling (top-p, top-k or min-p), or padding of the vocabulary, on one side only",
    looks_like="The mean ratio is below 1 and most larger differences are negative, from the first step. Padding: "
    "all differences are small",
    advice="Sample with top_p 1 and no top_k, or give the trainer the kept tokens (mis_ext.rollout.define_log_probs). "
    "vLLM takes parameters that a request omits from the model's generation_config.json: start it with "
    "--generation-config vllm. Padding: set its logits to minus infinity before the log-softmax.",
    is_fault=True,
    is_setting=True,
)
def truncation(left: Left) -> Found | None:
    tokens = left.tokens
    if min(len(tokens), len(tokens.uncertain)) < limit.MIN_TOKENS or tokens.side_worse_than_a_guess:
        return None
    excess, _ = mean_and_error(tokens.d_T.expm1())
    error = float(tokens.d_T.expm1().std(correction=0)) / math.sqrt(len(tokens))
    largest, deficit = float(-tokens.d_T.min()), -excess
    is_padding = largest < limit.MAX_PADDING_GAP
    far = tokens.uncertain.where(tokens.uncertain.shift_T > max(tokens.typical_shift, limit.SMALLEST_SHIFT))
    num_below, num_large = int((far.d_T < 0.0).sum()), len(far)
    is_one_sided = 0 < limit.MIN_BELOW * num_large <= num_below
    least, errors = limit.SURE_BOUNDED if largest < limit.BOUNDED else limit.SURE
    is_sure = deficit > max(least, errors * error)
    if not is_sure and not (is_one_sided and deficit >= limit.MIN_DEFICIT_ERRORS * error):
        return None
    if not is_padding and deficit <= limit.MIN_DEFICIT:
        return None
    slope, explained = line_of(tokens.uncertain.engine_T, tokens.uncertain.d_T)
    is_colder = not is_padding and slope < 0.0 and explained > limit.MIN_EXPLAINED
    others = ("top-p, top-k or min-p",) if is_padding else ("padding of the trainer's vocabulary",)
    colder = ("a temperature below 1 together with it, which moves the same tokens",)
    return truncation.found(
        title="padding of the trainer's vocabulary, which takes a part of the probability"
        if is_padding
        else truncation.title,
        confidence="possible" if is_padding else "likely",
        evidence=f"the mean ratio is {1.0 - deficit:.4g}, {deficit / error if error else math.inf:.0f} standard errors "
        f"below 1, and {num_below / max(num_large, 1):.0%} of the larger differences are below 0: the trainer gives "
        "probability to tokens that the engine cannot sample"
        + (f"; no token loses more than {largest:.2g} nats" if is_padding else "")
        + ("" if is_padding else f"; on average the engine keeps a mass of {1.0 + excess:.3g}"),
        k3_share=_share_of_cut(tokens, excess),
        is_up_to=is_colder,
        alternatives=(
            *others,
            *(colder if is_colder else () if is_padding else ("a temperature above 1 together with it",)),
        ),
    )


def _share_of_cut(tokens: Evidence, excess: float) -> float:
    """The share of k3 from truncated sampling. Noise alone moves tokens up and down equally.

    Truncation removes a different mass at each position. Shifts of 0 to ``x`` standard deviations of a Gaussian noise
    have ``x^2 / (3 + x^2)`` of the squares. Then the squares of tokens that moved down exceed those of the other tokens
    by a share ``a`` of all, and shifts have the share ``1 - sqrt(1 - a^2)``, within 0.05. If a few large squares hide
    this, the lower limit is the k3 of tokens that all lose the same.
    """
    k3_T, total = tokens.uncertain.k3_T, float(tokens.uncertain.k3_T.sum())
    if not total:
        return 0.0
    below = float(k3_T[tokens.uncertain.d_T < 0.0].sum()) / total
    moved = 1.0 - math.sqrt(1.0 - max(2.0 * below - 1.0, 0.0) ** 2)
    least = (excess - math.log1p(excess)) / tokens.k3 if -1.0 < excess < 0.0 else 0.0
    return min(max(moved, least), 1.0)


@cause(
    name="penalties",
    title="a penalty of the engine for tokens that occurred before (repetition, presence or frequency)",
    looks_like="The trainer finds tokens that occurred before in the response more probable than the engine does. "
    "Needs token IDs",
    advice="Set repetition_penalty to 1, presence_penalty and frequency_penalty to 0 in the sampling parameters, or "
    "score with the same penalty.",
    is_fault=True,
    is_setting=True,
)
def penalties(left: Left) -> Found | None:
    tokens = left.tokens.uncertain.where(left.tokens.uncertain.d_T != 0.0)
    repeated_T, up_T = tokens.repeated_T == 1, tokens.d_T > 0.0
    sides = [tokens.where(chosen_T) for chosen_T in (repeated_T, tokens.repeated_T == 0)]
    if min(map(len, sides)) < limit.MIN_REPEATED:
        return None
    shares, variances = [], []
    for side in sides:
        up_S, share = side.per_sample(side.d_T > 0.0), float((side.d_T > 0.0).double().mean())
        shares.append(share)
        variances.append(float((up_S - share * side.num_S).square().sum()) / len(side) ** 2)
    apart = shares[0] - shares[1]
    if not apart > max(limit.REPEATED_APART, limit.PLACE_ERRORS * math.sqrt(sum(variances))):
        return None
    # The k3 of tokens that move as with a penalty, minus the k3 of tokens that move the other way.
    sign_T = torch.where(up_T == repeated_T, 1.0, -1.0).double()
    share = float((tokens.k3_T * sign_T).sum() / left.tokens.k3_T.sum())
    return penalties.found(
        confidence="likely",
        evidence=f"the trainer finds {shares[0]:.0%} of the {len(sides[0])} uncertain tokens that occurred before in "
        f"their response more probable than the engine, and {shares[1]:.0%} of the {len(sides[1])} others",
        k3_share=min(max(share, 0.0), 1.0),
        is_up_to=True,
        alternatives=("a logits processor of the engine",),
    )


@cause(
    name="bf16_log_probs",
    title="log-probs rounded to bfloat16",
    looks_like="99 % of the log-probs of one side are bfloat16 values",
    advice="Keep log-probs in float32 from the log-softmax to the dump.",
)
def rounded(left: Left) -> Found | None:
    tokens = left.tokens
    if not len(tokens) or not bool((tokens.d_T != 0.0).any()):
        return None
    expected, sides = 0.0, []
    for side, side_T in tokens.sides.items():
        values = side_T[side_T != 0.0]
        if len(values) < limit.MIN_TOKENS:
            return None
        if float((values.bfloat16().double() == values).double().mean()) > limit.ALL:
            sides.append(side)
            # k3 of a small difference is half its square. The rounding error is uniform.
            expected += float(torch.exp2(values.abs().log2().floor() - 7.0).square().sum()) / 24.0
    if not sides:
        return None
    alone = expected / len(tokens)
    return rounded.found(
        confidence="certain",
        evidence=f"{' and '.join(sides)} log-probs are bfloat16 numbers: that alone gives a k3 near {alone:.1g}",
        k3_share=min(alone / tokens.k3, 1.0) if tokens.k3 else math.nan,
    )
