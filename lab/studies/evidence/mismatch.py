# SPDX-License-Identifier: Apache-2.0
"""Where engine and trainer differ, from the log-probs of real rollouts: size, tails, probability, position, length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mis_ext.correction.statistics import OPEN
from mis_ext.tools.diagnosis.size import MIN_OPEN

from .group import Group
from .outcomes import pareto_k
from .pictures import save
from .results import Results

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.3, 0.6, 0.9, 1.0)
BANDS = {
    "product in [1/2, 2]": lambda sums, n: np.abs(sums) < np.log(2),
    "geometric mean within 1 %": lambda sums, n: np.abs(np.expm1(sums / n)) < 0.01,
    "geometric mean within 3 %": lambda sums, n: np.abs(np.expm1(sums / n)) < 0.03,
}


@dataclass(frozen=True)
class Streams:
    """``behavior`` and ``log_ratio`` in nats, and ``mask``; each ``[seeds, B, L]``.

    ``flips``: of a mixture of experts, whether the trainer's routers choose others than the engine's.
    """

    behavior: NDArray[np.float16]
    log_ratio: NDArray[np.float16]
    mask: NDArray[np.bool_]
    flips: NDArray[np.bool_] | None = None


Steps = dict[str, list[Streams]]


def of_groups(groups: Iterable[Group], results: Results) -> dict[str, Steps]:
    """What finished groups kept, by condition and step, over all seeds."""
    merged: dict[str, Steps] = {}
    for group in groups:
        for step, streams in results.log_probs(group).items():
            replays = any(method.replays_routing for method in group.methods)
            name = f"{group.condition}, experts replayed" if replays else group.condition
            merged.setdefault(name, {}).setdefault(step, []).append(Streams(**streams))
    return merged


def section(name: str, conditions: dict[str, Steps], output: Path) -> list[str]:
    """The part of a page about the mismatch itself, and its plots."""
    if not conditions:
        return []
    lines = [
        "",
        "## The mismatch",
        "",
        "| engine | step | tokens | k3 | mean abs d | ratio > 2 | ratio < 1/2 | k-hat, tokens | k-hat, sequences "
        f"| share of k3 where p < 0.1 | tokens there | ratio > 1 where {OPEN[0]:g} < p < {OPEN[1]:g} | tokens there |",
        "|---" * 13 + "|",
    ]
    for condition, steps in conditions.items():
        lines += [
            f"| {condition} | {step.removeprefix('step')} | {_numbers(pieces)} |" for step, pieces in steps.items()
        ]
    lines += ["", *_flips(conditions), f"![where]({name}_where.png)"]
    _plot_where(conditions, output / f"{name}_where.png")
    lines += ["", f"![length]({name}_length.png)", "", *_plot_length(conditions, output / f"{name}_length.png")]
    return lines


def _numbers(pieces: list[Streams]) -> str:
    d = _valid(pieces, "log_ratio")
    probability = np.exp(_valid(pieces, "behavior"))
    k3, rows = np.expm1(d) - d, _rows(pieces)
    rare = probability < 0.1
    shape = ("", "", "")
    if d.any():
        sums = np.nansum(rows[:, : _reach(rows)], 1)
        shape = (f"{pareto_k(np.exp(d)):.2f}", f"{pareto_k(np.exp(sums)):.2f}", f"{k3[rare].sum() / k3.sum():.2f}")
    return " | ".join(
        (
            f"{d.size:,}",
            f"{k3.mean():.1e}",
            f"{np.abs(d).mean():.1e}",
            f"{(d > np.log(2)).mean():.1e}",
            f"{(d < -np.log(2)).mean():.1e}",
            *shape,
            f"{rare.mean():.2f}",
            *_above_one(pieces),
        )
    )


def _above_one(pieces: list[Streams]) -> tuple[str, str]:
    """Of open tokens: the share whose ratio is above 1, with a 95 % interval over responses, and their number.

    An engine's rounding raises and lowers them alike. Weights that have learned since raise most of them.
    """
    by_response = []
    for piece in pieces:
        probability = np.exp(piece.behavior.astype(np.float64))
        is_open = piece.mask & (probability > OPEN[0]) & (probability < OPEN[1]) & (piece.log_ratio != 0)
        both = [is_open & (piece.log_ratio > 0), is_open]
        by_response.append(np.stack([tokens.sum(-1).ravel() for tokens in both]).astype(np.float64))
    above, counts = np.concatenate(by_response, 1)
    total = counts.sum()
    if total < MIN_OPEN:
        return "", f"{total:,.0f}"
    share = above.sum() / total
    error = np.sqrt(((above - share * counts) ** 2).sum()) / total
    return f"{share:.3f} ± {1.96 * error:.3f}", f"{total:,.0f}"


def _flips(conditions: dict[str, Steps]) -> list[str]:
    """A table of tokens whose own position has other experts in some layer, beside all other tokens."""
    lines = []
    for condition, steps in conditions.items():
        for step, pieces in steps.items():
            flips = [piece.flips[piece.mask] for piece in pieces if piece.flips is not None]
            if not flips:
                continue
            d, flipped = _valid(pieces, "log_ratio"), np.concatenate(flips)
            k3 = np.expm1(d) - d
            cells = [f"{flipped.mean():.1e}", f"{k3[flipped].sum() / k3.sum():.2f}"]
            for tokens in (flipped, ~flipped):
                ratio = np.exp(np.abs(d[tokens]))
                cells += (
                    [f"{k3[tokens].mean():.1e}", f"{(ratio > 2).mean():.1e}", f"{ratio.max():.3f}"]
                    if ratio.size
                    else ["", "", ""]
                )
            lines.append(f"| {condition} | {step.removeprefix('step')} | {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "Flipped: the trainer's routers choose other experts than the engine's, in any layer at the token's position.",
        "With replay they would. A ratio below 1 counts as its reciprocal.",
        "",
        "| engine | step | flipped tokens | share of k3 there | k3 there | ratio > 2 there | largest ratio there "
        "| k3 elsewhere | ratio > 2 elsewhere | largest ratio elsewhere |",
        "|---" * 10 + "|",
        *lines,
        "",
    ]


def _plot_where(conditions: dict[str, Steps], path: Path) -> None:
    """Left: log-ratio against probability; middle: k3 by probability; right: k3 by position."""
    figure, axes = plt.subplots(
        len(conditions), 3, figsize=(15, 4 * len(conditions)), squeeze=False, constrained_layout=True
    )
    for (seeds, by_probability, by_position), (condition, steps) in zip(axes, conditions.items(), strict=True):
        first = next(iter(steps.values()))
        d, behavior = _valid(first, "log_ratio"), _valid(first, "behavior")
        limit = max(float(np.quantile(np.abs(d), 0.9995)), 1e-4)
        seeds.hist2d(
            np.exp(behavior),
            d,
            bins=80,
            range=[[0, 1], [-limit, limit]],
            norm=matplotlib.colors.LogNorm(),
            cmap="viridis",
        )
        seeds.set(title=f"{condition}, first rollout", xlabel="probability in the engine", ylabel="log-ratio d, nats")
        for step, pieces in steps.items():
            d, probability = _valid(pieces, "log_ratio"), np.exp(_valid(pieces, "behavior"))
            k3 = np.expm1(d) - d
            bins = np.digitize(probability, PROBABILITY_EDGES[1:-1])
            means = [k3[bins == i].mean() if (bins == i).any() else np.nan for i in range(len(PROBABILITY_EDGES) - 1)]
            by_probability.plot(range(len(means)), means, "o-", label=step)
            by_position.plot(_by_position(pieces), label=step, linewidth=0.8)
        labels = [f"{low:g}-{high:g}" for low, high in pairwise(PROBABILITY_EDGES)]
        by_probability.set_xticks(range(len(labels)), labels)
        by_probability.set(xlabel="probability in the engine", ylabel="mean k3, nats", yscale="log")
        by_position.set(xlabel="position in the response", ylabel="mean k3, nats", yscale="log")
        by_probability.legend(fontsize=7)
    save(figure, path)


def _plot_length(conditions: dict[str, Steps], path: Path) -> list[str]:
    """Acceptance of bands against the length of prefixes, beside the law for independent Gaussian log-ratios.

    Each length has the k3 of its own prefixes: k3 falls with the position. It has the responses that are as long.
    """
    figure, axes = plt.subplots(
        1, len(conditions), figsize=(6 * len(conditions), 4.5), squeeze=False, constrained_layout=True
    )
    lines = ["| engine | step | tokens | their k3 | " + " | ".join(f"{band}: kept (law)" for band in BANDS) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(BANDS))
    for axis, (condition, steps) in zip(axes[0], conditions.items(), strict=True):
        for step, pieces in steps.items():
            rows = _rows(pieces)
            counts, sums = (~np.isnan(rows)).sum(1), np.cumsum(rows, 1)
            lengths = np.unique(np.geomspace(1, _reach(rows), 24).astype(int))
            k3 = [float((np.expm1(d) - d).mean()) for d in (rows[counts >= n, :n] for n in lengths)]
            kept = {band: [_share(sums[counts >= n], n, band) for n in lengths] for band in BANDS}
            law = {band: [_law(of_prefix, n, band) for of_prefix, n in zip(k3, lengths, strict=True)] for band in BANDS}
            is_first = step == next(iter(steps))
            for index, band in enumerate(BANDS):
                if is_first:
                    axis.plot(lengths, kept[band], "o-", color=f"C{index}", markersize=3, label=band)
                    axis.plot(lengths, law[band], "--", color=f"C{index}", linewidth=0.9)
            # A tenth of the longest, three tenths, and all of it.
            for at in (int(np.abs(lengths - share * lengths[-1]).argmin()) for share in (0.1, 0.3, 1.0)):
                cells = [f"{kept[band][at]:.2f} ({law[band][at]:.2f})" for band in BANDS]
                number = step.removeprefix("step")
                lines.append(f"| {condition} | {number} | {lengths[at]} | {k3[at]:.1e} | {' | '.join(cells)} |")
        axis.set(
            title=f"{condition}, first rollout",
            xlabel="tokens",
            ylabel="accepted sequences",
            xscale="log",
            ylim=(0, 1.03),
        )
        axis.legend(fontsize=7)
    save(figure, path)
    return lines


def _share(sums: NDArray[np.float64], length: int, band: str) -> float:
    return float(BANDS[band](sums[:, length - 1], length).mean())


def _law(k3: float, length: int, band: str) -> float:
    """If the log-ratios of tokens were independent with mean -k3 and variance 2 k3."""
    spread = np.sqrt(2 * max(k3, 0.0) * length)
    # Equal log-probs have no spread.
    sums = -k3 * length + spread * stats.norm.ppf((np.arange(2000) + 0.5) / 2000)
    return float(BANDS[band](sums, length).mean())


def _valid(pieces: list[Streams], stream: str) -> NDArray[np.float64]:
    return np.concatenate([getattr(piece, stream)[piece.mask] for piece in pieces]).astype(np.float64)


def _rows(pieces: list[Streams]) -> NDArray[np.float64]:
    """``[sequences, L]``: log-ratios, NaN where the mask is 0."""
    rows = [np.where(piece.mask, piece.log_ratio.astype(np.float64), np.nan) for piece in pieces]
    return np.concatenate([row.reshape(-1, row.shape[-1]) for row in rows])


def _reach(rows: NDArray[np.float64]) -> int:
    """Tokens that all responses have; where some are less than half as long as others, those that a quarter has."""
    counts = (~np.isnan(rows)).sum(1)
    shortest, longest = int(counts.min()), int(counts.max())
    return shortest if 2 * shortest >= longest else int(np.quantile(counts, 0.75, method="lower"))


def _by_position(pieces: list[Streams]) -> NDArray[np.float64]:
    d = _rows(pieces)
    # Behind the longest response there is nothing.
    d = d[:, ~np.isnan(d).all(0)]
    mean: NDArray[np.float64] = np.nanmean(np.expm1(d) - d, 0)
    return mean
