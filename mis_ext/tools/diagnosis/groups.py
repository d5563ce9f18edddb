# SPDX-License-Identifier: Apache-2.0
"""Find two groups of responses, of any sizes, and the attribute that separates them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.tools.diagnosis import thresholds as limit
from mis_ext.tools.diagnosis.cause import Cause, Found, Left, cause, percent
from mis_ext.tools.diagnosis.data import share_of
from mis_ext.tools.diagnosis.evidence import Evidence
from mis_ext.tools.diagnosis.sampling import has_learned

MIXED_UP = "samples that were truncated or mixed up"
OTHER_CONTEXT = "another prompt, chat template or context"
PACKED = "packed responses that attend to each other (score one response alone)"


class Groups(NamedTuple):
    """Two groups of responses: which ones are far, by how much, and a description of what separates them."""

    far_S: Tensor
    evidence: str
    apart_by: str
    """``step``, ``version``, ``canary``, ``source``, ``row``, ``length``, ``turns`` or empty."""
    told: str


def groups_of(tokens: Evidence) -> Groups | None:
    """Find a second population of responses, of any share, with few responses in between.

    The measure is ``|d| / (1 - p)``, or this value over the median of the step.
    """
    step_S, values_S = tokens.step_S, tokens.shift_S
    if not len(values_S):
        return None
    typical = torch.stack([values_S[step_S == number].nanmedian() for number in range(1 + int(step_S.max()))])
    return _apart(tokens, values_S) or (_apart(tokens, values_S / typical[step_S]) if len(typical) > 1 else None)


def _apart(tokens: Evidence, values_S: Tensor) -> Groups | None:
    known_S = (values_S > 0.0) & values_S.isfinite()
    if int(known_S.sum()) < limit.MIN_SAMPLES:
        return None
    far_S = torch.zeros_like(known_S)
    far_S[known_S] = _upper(values_S[known_S].log())
    near_S = known_S & ~far_S
    # Repetitive responses are far too, but their k3 is no larger than that of kernels.
    if not tokens.of_samples(far_S).k3 > limit.KERNEL_K3:
        return None
    near, far = (float(tokens.gap_S[each_S].median()) for each_S in (near_S, far_S))
    evidence = (
        f"{percent(int(near_S.sum()) / int(known_S.sum()))} of the {int(known_S.sum())} responses differ by {near:.2g} "
        f"nats per token, the others {far / near:.2g} times as much"
    )
    return Groups(far_S, evidence, *_apart_by(tokens, far_S, near_S))


def _upper(values_N: Tensor) -> Tensor:
    """Select the values of the upper group; none if there are not two groups.

    The split maximizes the likelihood of two Gaussians (Kittler and Illingworth, Minimum error thresholding, 1986).
    There are two groups if the medians are far apart and few values are in the middle third between them.
    """
    x = values_N.sort().values
    count = torch.arange(1, len(x), dtype=torch.float64)
    sums, squares = x.cumsum(0)[:-1], x.square().cumsum(0)[:-1]
    score = torch.zeros(len(x) - 1, dtype=torch.float64)
    for number, total, squared in (
        (count, sums, squares),
        (len(x) - count, x.sum() - sums, x.square().sum() - squares),
    ):
        deviation = (squared / number - (total / number).square()).clamp_min(limit.GROUP_SPREAD**2).sqrt()
        score += number * (deviation.log() - number.log())
    least = limit.MIN_GROUP_SIZE
    score[: least - 1] = score[len(x) - least :] = math.inf
    split = int(score.argmin()) + 1
    low, high = x[:split].median(), x[split:].median()
    third = (high - low) / 3.0
    between = int(((x > low + third) & (x < high - third)).sum())
    is_apart = high - low > math.log(limit.GROUP_FACTOR)
    is_apart &= between <= limit.MAX_BETWEEN * min(split, len(x) - split)
    return values_N > x[split - 1] if is_apart else torch.zeros_like(values_N, dtype=torch.bool)


def _accuracy(label_N: Tensor, far_N: Tensor) -> float:
    """The balanced accuracy of predicting the group from the label, by majority."""
    size = int(label_N.max()) + 1
    share = torch.bincount(label_N, far_N.double(), minlength=size) / torch.bincount(label_N, minlength=size)
    guess_N = share[label_N] > limit.MAIN_SHARE
    return float(guess_N[far_N].double().mean() + (~guess_N[~far_N]).double().mean()) / 2.0


def _apart_by(tokens: Evidence, far_S: Tensor, near_S: Tensor) -> tuple[str, str]:
    """The attribute that separates the groups, and its description; both empty if none does."""
    known_S = far_S | near_S
    far_N = far_S[known_S]
    for name, words, label_N in _attributes(tokens, known_S, far_N):
        # With one response per label, any label separates the groups.
        count = len({*label_N.tolist()})
        if 1 < count <= len(label_N) / 4 and _accuracy(label_N, far_N) >= limit.TELLS_APART:
            return name, words
    return "", ""


def _attributes(tokens: Evidence, known_S: Tensor, far_N: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    def numbered(values: list[object]) -> Tensor:
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        return torch.tensor([numbers[value] for value in values], dtype=torch.int64)[known_S]

    yield "step", "their step separates them", tokens.step_S[known_S]
    versions = numbered([*map(str, tokens["versions_behind"].tolist())])
    yield "version", "their weight version separates them", versions
    yield "canary", "the canary separates them", numbered([*map(str, tokens["has_old_weights"].tolist())])
    yield "source", "their file separates them, as if one rank or engine differs", numbered([*tokens.sources])
    rows = list[tuple[int, Tensor]]()
    for period in range(2, limit.MAX_PERIOD + 1):
        place_N = tokens.ordinal_S[known_S] % period
        shares = [float(far_N[place_N == place].double().mean()) for place in range(period)]
        rows.append((period, (place_N != shares.index(min(shares))).long()))
    period, label_N = max(rows, key=lambda row: _accuracy(row[1], far_N))
    yield "row", f"one in every {period} agrees, like the first response of each packed row of {period}", label_N
    length_N = tokens.num_S[known_S]
    for share in (0.25, 0.5, 0.75):
        is_long_N = (length_N > length_N.quantile(share)).long()
        yield "length", f"their length separates them, at {float(length_N.quantile(share)):.0f} tokens", is_long_N
    several_S = tokens.per_sample(tokens.turn_T > 0) > 0
    yield "turns", "one or several turns separate them", several_S[known_S].long()


@cause(
    name="packed_responses",
    title="packed responses that attend to each other",
    looks_like="Two groups of responses differ by a factor of 3. One in every 2 to 20 responses, the first of a "
    "packed row, agrees",
    advice="Score one response alone and compare: mis_ext.onpolicy.check_packing does both. Reset the recurrent "
    "state, the positions and the attention mask at each boundary of a packed row (cu_seqlens).",
    is_fault=True,
)
def packed(left: Left) -> Found | None:
    groups = groups_of(left.tokens)
    if groups is None or groups.apart_by != "row":
        return None
    return _found(packed, left, groups, (OTHER_CONTEXT, "an engine of several that has other weights"))


@cause(
    name="other_text",
    title="another text on one side: tokenized again, after another prompt or context, or from another sample",
    looks_like="Token IDs differ. Or two groups of responses differ by a factor of 3, and neither step, version, "
    "file, nor packed row separates them",
    advice="Train on the ids that the engine returned: do not decode and encode again. If ids are equal, compare the "
    "context before these responses on both sides (prompt, template, images, tools). Check that each response "
    "has the log-probs of its own request, from its first token on (after an abort, those of a dropped attempt "
    "may come first).",
    is_fault=True,
)
def other_text(left: Left) -> Found | None:
    known_S = ~left.tokens["has_other_ids"].isnan()
    other_S = left.tokens["has_other_ids"] == 1.0
    if bool(other_S.any()):
        taken_T = left.tokens.spread(other_S)
        count, total = int(other_S.sum()), int(known_S.sum())
        return other_text.found(
            confidence="certain",
            evidence=f"in {count} of {total} samples the engine sampled other ids than the trainer scored",
            k3_share=share_of(left.tokens, taken_T),
            is_pattern=count > limit.SUSPICIOUS_SHARE * total,
            taken_T=taken_T,
        )
    groups = None if packed.name in left.found else groups_of(left.tokens)
    of_others = ("step", "version", "canary", "source", "row")
    if groups is None or groups.apart_by in of_others or of_weights(left.tokens, groups):
        return None
    # Responses that stale weights explain are not another text.
    is_near = float(left.tokens.gap_S[groups.far_S].median()) < limit.MAX_STALE_DIFF
    if is_near and has_learned(left.tokens.of_samples(~groups.far_S)):
        return None
    ids = (MIXED_UP,) if not bool(known_S.all()) else ()
    return _found(other_text, left, groups, (*ids, PACKED, "an engine of several that has other weights"))


def _found(row: Cause, left: Left, groups: Groups, alternatives: tuple[str, ...]) -> Found:
    taken_T = left.tokens.spread(groups.far_S)
    return row.found(
        confidence="possible",
        evidence="; ".join(filter(None, (groups.evidence, groups.told))),
        k3_share=share_of(left.tokens, taken_T),
        taken_T=taken_T,
        alternatives=alternatives,
    )


def of_weights(tokens: Evidence, groups: Groups) -> bool:
    """True if weights separate the responses: most responses of their step and version differ more too.

    Another text would be far with any weights, and would not move other responses.
    """
    version_S = tokens["versions_behind"].nan_to_num(-1.0)
    _, number_S = torch.unique(torch.stack([tokens.step_S.double(), version_S]), dim=1, return_inverse=True)
    told_S = ~tokens.shift_S.isnan()
    shift = torch.full((int(number_S.max()) + 1,), math.nan, dtype=torch.float64)
    for number in range(len(shift)):
        of_number_S = told_S & (number_S == number)
        if int(of_number_S.sum()) >= limit.MIN_SAMPLES:
            shift[number] = tokens.shift_S[of_number_S].median()
    floor = float(shift.nan_to_num(math.inf).min())
    moved = shift > limit.MOVED_FACTOR * floor
    still_S = ~moved[number_S]
    count, still = int(groups.far_S.sum()), int((groups.far_S & still_S).sum())
    return still < limit.MIN_STILL * count * float(still_S.double().mean())
