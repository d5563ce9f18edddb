# SPDX-License-Identifier: Apache-2.0
"""Causes that affect some tokens: early in a turn, after a position, or a few tokens anywhere."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import NamedTuple

import torch

from mis_ext.tools.diagnosis import thresholds as limit
from mis_ext.tools.diagnosis.cause import Found, Left, cause
from mis_ext.tools.diagnosis.evidence import Evidence
from mis_ext.tools.diagnosis.sampling import line_words, stale_words

OTHER_CACHES = "another cache of the engine (encoder, multimodal) with results of older weights"


class Place(NamedTuple):
    """Uncertain tokens of one place.

    Their number, the sum of k3, and the means of ``|d| / (1 - p)`` and of k3, both clamped at 1, each with its squared
    standard error.
    """

    num_tokens: int
    k3: float
    shift: tuple[float, float]
    size: tuple[float, float]

    @classmethod
    def of(cls, tokens: Evidence) -> Place:
        """Measure uncertain tokens."""
        means = []
        for values in (tokens.shift_T.clamp_max(1.0), tokens.k3_T.clamp_max(1.0)):
            variance = float(values.var(correction=0)) / len(values) if len(values) else math.nan
            means.append((float(values.mean()) if len(values) else math.nan, variance))
        return cls(len(tokens), float(tokens.k3_T.sum()), *means)

    def stands_out_of(self, other: Place, times: float = 1.0) -> bool:
        """True if its tokens differ more than those of another place. With few tokens, k3 shows it better."""
        is_known = min(self.num_tokens, other.num_tokens) >= limit.MIN_TOKENS
        return is_known and (
            _is_above(self.shift, other.shift, times * limit.PLACE_FACTOR)
            or _is_above(self.size, other.size, times * limit.PLACE_K3_FACTOR)
        )

    def excess_over(self, other: Place) -> float:
        """Its k3 minus the k3 of the same number of tokens of another place."""
        return max(self.k3 - other.k3 / other.num_tokens * self.num_tokens, 0.0)


def _is_above(mean: tuple[float, float], other: tuple[float, float], factor: float) -> bool:
    """Return True if it exceeds another mean by this factor, and by more than chance."""
    error = math.sqrt(mean[1] + other[1])
    return mean[0] > factor * other[0] and mean[0] - other[0] > limit.PLACE_ERRORS * error


_PREFIX_ADVICE = (
    "Flush the engine's prefix cache at every weight update. Or put the weight version in each request: in slime "
    "and Miles with cache_by_version: true under on_policy_tokens, elsewhere as extra_key (SGLang) or cache_salt "
    "(vLLM)."
)


@cause(
    name="stale_prefix_cache",
    title="a prefix in the engine's cache that was computed with stale weights",
    looks_like="The first tokens of a turn differ at least twice as much as later ones, or later turns differ more "
    "than the first",
    advice=_PREFIX_ADVICE,
    is_shape=True,
)
def prefix(left: Left) -> Found | None:
    tokens = left.tokens.uncertain
    total = float(tokens.k3_T.sum())
    later = tokens.where(tokens.turn_T > 0)
    # A prefix shared by all prompts shows in all turns; a prefix of the conversation shows only after the first turn.
    for where, chosen in {"": tokens, " after the first": later}.items():
        begin, end = _ends_of(chosen)
        times = 1.0 if begin == limit.PLACES[3] else limit.SHORT_FACTOR
        fading = ((last, begin, end, times) for last in limit.PLACES[1:3])
        for last, first, behind, factor in (*fading, (limit.STEP[0], *limit.STEP, 1.0)):
            begins, before = (Place.of(chosen.where(chosen.place_T < each)) for each in (last, first))
            ends = Place.of(chosen.where((chosen.place_T >= first) & (chosen.place_T < behind)))
            if begins.stands_out_of(ends, factor):
                return prefix.found(
                    confidence="possible",
                    evidence=f"uncertain tokens differ by {begins.shift[0]:.2g} (1 - p) nats early in a turn{where}, "
                    f"by {ends.shift[0]:.2g} from place {first} on, and have a k3 of {begins.size[0]:.2g} and "
                    f"{ends.size[0]:.2g}",
                    k3_share=before.excess_over(ends) / total if total else math.nan,
                    alternatives=(
                        "another prompt, chat template or context",
                        OTHER_CACHES,
                        "stale weights of the first tokens, where weights change within responses",
                        "other kernels for the prefill",
                        "low precision or stale weights that move the first tokens of a response more than later ones",
                    ),
                )
    others, one = Place.of(later), Place.of(tokens.where(tokens.turn_T == 0))
    if not others.stands_out_of(one):
        return None
    return prefix.found(
        confidence="possible",
        evidence=f"uncertain tokens differ by {one.shift[0]:.2g} (1 - p) nats in the first turn, by "
        f"{others.shift[0]:.2g} in later ones",
        k3_share=others.excess_over(one) / total if total else math.nan,
        advice=f"{_PREFIX_ADVICE} If that is done, check that later turns are scored with the ids that were sampled.",
        alternatives=("turns that were tokenized again", OTHER_CACHES),
    )


def _ends_of(tokens: Evidence) -> tuple[int, int]:
    """The range of places that is the reference for the first tokens: the 65th to 256th, or the end of short turns."""
    *_, short, begin, end = limit.PLACES
    enough = (each for each in (begin, short, short // 2) if int((tokens.place_T >= each).sum()) >= limit.MIN_TOKENS)
    return next(enough, begin), end


def _bins(tokens: Evidence) -> torch.Tensor:
    return ((tokens.position_T.double() + 1.0).log2() * limit.PER_OCTAVE).floor().long()


@cause(
    name="late_positions",
    title="positions that one side treats differently, as with RoPE scaling, a window, a length limit, or decoding",
    looks_like="Tokens after a position differ at least twice as much as those before. Or the first tokens of "
    "responses are equal, and later ones differ",
    advice="Compare rope_scaling, max_position_embeddings and sliding_window of both sides; where first tokens are "
    "equal, prefill and decode of the engine (mis-ext diff).",
    is_shape=True,
)
def late(left: Left) -> Found | None:
    tokens = left.tokens.uncertain
    if found := _decoding(left.tokens):
        return found
    if "stale_prefix_cache" in left.found and bool((tokens.turn_T > 0).any()):
        # The beginning of a later turn is also a late position.
        return None
    bin_T = _bins(tokens)
    total, found_places = float(tokens.k3_T.sum()), list[tuple[bool, float, int, float]]()
    bins = [Place.of(each) for each in tokens.split(bin_T, 1 + int(bin_T.max()) if len(tokens) else 0)]
    for index in range(limit.FIRST_LATE, len(bins)):
        begins = _begins_at(index, bins, tokens, bin_T)
        # Positions far before a step may differ for another reason.
        first = index - limit.PER_OCTAVE if begins else 0
        before = Place.of(tokens.where((bin_T >= first) & (bin_T < index)))
        behind = Place.of(tokens.where(bin_T >= index))
        if not (begins or behind.stands_out_of(before)):
            continue
        excess = behind.excess_over(before)
        if excess > limit.LEAST_LATE * total:
            ratio = behind.shift[0] / before.shift[0] if before.shift[0] else math.inf
            found_places.append((begins, ratio, index, excess))
    if not found_places:
        return None
    _, ratio, index, excess = max(found_places)
    position = math.ceil(math.pow(2.0, index / limit.PER_OCTAVE)) - 1
    return late.found(
        confidence="possible",
        evidence=f"uncertain tokens after position {position} of a response differ {ratio:.2g} times "
        f"as much as those before, and carry {excess / total:.0%} of k3 beyond theirs",
        k3_share=excess / total,
        alternatives=(
            "stale weights of the last tokens, where weights change within responses",
            "low precision or stale weights that move late tokens of a response more than early ones",
        ),
    )


def _begins_at(index: int, bins: list[Place], tokens: Evidence, bin_T: torch.Tensor) -> bool:
    """Return True if tokens differ more after a position, by a step that is not part of a steady rise.

    A difference at all positions can hide the size of a step, but not its position.
    """
    octave = limit.PER_OCTAVE
    around = bins[index - octave : index + octave]
    places = [*takewhile(lambda each: each.num_tokens >= limit.MIN_TOKENS, around)]
    if len(places) < octave + limit.LEAST_BEHIND:
        return False
    # Fit a line with a step to the shifts of bins of equal width.
    rise = torch.arange(len(places), dtype=torch.float64)
    contrast = torch.linalg.pinv(torch.stack([rise**0, rise, (rise >= octave).double()], dim=1))[2].tolist()
    weighted = [*zip(contrast, (each.shift for each in places), strict=True)]
    step = sum(weight * value for weight, (value, _) in weighted)
    variance = sum(weight**2 * error for weight, (_, error) in weighted)
    before = Place.of(tokens.where((bin_T >= index - octave) & (bin_T < index)))
    behind = Place.of(tokens.where((bin_T >= index) & (bin_T < index + len(places) - octave)))
    return _is_above(behind.shift, before.shift, 1.0) and step > limit.PLACE_ERRORS * math.sqrt(variance)


def _decoding(tokens: Evidence) -> Found | None:
    """Find first tokens that are equal while later ones differ."""
    tokens = tokens.where(tokens.engine_T < limit.LOG_NEARLY_CERTAIN)
    first_T, differs_T = tokens.position_T == 0, tokens.d_T != 0.0
    first, later = int(first_T.sum()), int((~first_T).sum())
    later_different = int((~first_T & differs_T).sum())
    if bool((first_T & differs_T).any()) or not later_different:
        return None
    # Add one to the count, so that a few tokens never give certainty.
    share = later_different / (later + 1.0)
    chance = (1.0 - share) ** first
    if chance > limit.MAX_CHANCE:
        return None
    return late.found(
        title="decode or prefix dependence (attention, KV cache)",
        confidence="likely",
        evidence=f"the first tokens of {first} responses are all equal, later ones differ in {share:.0%} of the "
        f"cases (by chance: {chance:.0e})",
        k3_share=1.0,
        is_up_to=True,
    )


def place_words(left: Left) -> tuple[str, ...]:
    """Describe positions whose tokens differ twice as much as those of other positions."""
    tokens = left.tokens.uncertain
    if "late_positions" in left.found or not len(tokens):
        return ()
    bin_T = _bins(tokens)
    places = [Place.of(each) for each in tokens.split(bin_T, 1 + int(bin_T.max()))[limit.FIRST_LATE :]]
    places = [each for each in places if each.num_tokens >= limit.MIN_TOKENS]
    if not places:
        return ()
    most, least = (choose(places, key=lambda each: each.shift[0]) for choose in (max, min))
    return ("what begins at a position, or ends there",) if most.stands_out_of(least) else ()


MORE = "more of the causes already named: their share is an estimate"


def more_words(left: Left) -> tuple[str, ...]:
    """Describe causes that a classification by size may hide."""
    more = (MORE,) if left.explained else ()
    # A temperature that was found already names these.
    lines = () if "temperature" in left.found else line_words(left)
    return (*_unfit_words(left), *more, *lines, *place_words(left))


def _unfit_words(left: Left) -> tuple[str, ...]:
    """Describe that no cause fits: the mean ratio of two policies over sampled tokens is 1, never above."""
    engine, trainer = left.powers
    if any(each.excess <= limit.SAMPLED_ERRORS * each.excess_error for each in (engine, trainer)):
        return ()
    return (
        f"none of these: they fit badly. The mean ratio is {1.0 + engine.excess:.3g}, and that of the reverse "
        f"{1.0 + trainer.excess:.3g}. With two policies, it is not above 1 for tokens that one of them sampled",
    )


@cause(
    name="expert_routing",
    title="most tokens agree and a few differ much, as with different experts in an MoE model",
    looks_like="At most 3 % of the uncertain tokens differ 12 times as much as is typical, and carry at least 60 % "
    "of k3",
    advice="In an MoE model, replay the engine's routing (R3): it reduced k3 from 4e-4 to 5e-5 in a small model, and "
    "from 2.4e-3 to 1.1e-3 in a pretrained one, whose reward stayed the same. Look at the worst tokens. Truncated "
    "token weights (preset mis) limit the effect of each.",
    is_shape=True,
)
def experts(left: Left) -> Found | None:
    tokens = left.tokens.uncertain
    # If typical tokens differ much, a few tokens are not a tail.
    is_far = bool(len(tokens)) and float(left.tokens.d_T.abs().mean()) > limit.MAX_MEAN_ABS_DIFF
    # A larger cause may also have a tail.
    if len(tokens) < limit.MIN_TOKENS or is_far or left.explained >= limit.MAIN_SHARE:
        return None
    different, total = int((tokens.d_T != 0.0).sum()), float(tokens.k3_T.sum())
    if 0 < different <= max(1.0, limit.FEW_SHARE * len(tokens)):
        share, k3_share = different / len(tokens), 1.0
        evidence = f"{different} of {len(tokens)} uncertain tokens differ, the others are equal"
    else:
        typical = left.tokens.typical_shift
        far_T = tokens.shift_T > limit.TAIL_FACTOR * typical
        share = float(far_T.double().mean())
        k3_share = float(tokens.k3_T[far_T].sum()) / total if total else 0.0
        if int(far_T.sum()) < 3 or k3_share < limit.TAIL_K3_SHARE or share > limit.MAX_TAIL_SHARE:
            return None
        evidence = (
            f"{share:.2%} of the uncertain tokens are more than {limit.TAIL_FACTOR:g} times as far apart as is typical "
            f"({typical:.2g} (1 - p) nats), and carry {k3_share:.0%} of k3"
        )
    precision = "low precision, which changes more experts, or has such a tail without experts"
    return experts.found(
        title="a few tokens only" if share < limit.FEW_SHARE else experts.title,
        confidence="likely" if share < limit.FEW_SHARE else "possible",
        evidence=evidence,
        k3_share=k3_share,
        alternatives=(*stale_words(left.tokens), precision),
    )
