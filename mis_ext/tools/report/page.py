# SPDX-License-Identifier: Apache-2.0
"""Render the report as one self-contained HTML page from ``page.html``. Its script only sorts."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mis_ext.files import printable
from mis_ext.tools.diagnosis.cause import Diagnosis
from mis_ext.tools.diagnosis.evidence import step_order
from mis_ext.tools.diagnosis.thresholds import GROWTH, NOTICED, QUANTIZED_K3
from mis_ext.tools.explain import HARMLESS_K3
from mis_ext.tools.report.noise import MIN_PROMPTS, digits
from mis_ext.tools.report.recommendation import Ranked
from mis_ext.tools.report.summary import WorstToken
from mis_ext.tools.report.whole_report import ComparedCause, ComparedNumber, Report

_SECTIONS = {
    "what-to-do": "What to do",
    "against": "Two runs side by side",
    "why": "Why the engines disagree",
    "numbers": "The numbers",
    "what-if": "What each configuration would have done",
    "groups": "Where the mismatch is",
    "steps": "Steps",
    "tokens": "Worst tokens",
    "samples": "Worst samples",
    "input": "What was read",
}


MEANING = {
    "k3": "KL(behavior, proximal) per token. Too high if it grows, or is far above its value in healthy runs of your "
    "model. With up-to-date weights of SmolLM2: above 1e-2 (fp8: 7e-2, experts: 1e-1).",
    "reverse_k3": "KL(proximal, behavior) per token. Far from k3: a heavy tail on one side.",
    "k1": "-mean d: a noisy KL of any sign. Far above k3: the trainer scores tokens that cannot have been sampled.",
    "abs_mean": "Mean |d| in nats. Above 0.3 the cause is a bug or stale weights, not kernels.",
    "abs_p99": "One token in a hundred differs by more.",
    "abs_max": "The largest |d|. A single token above 20 is a sentinel or another text.",
    "total_variation": "Share of probability that trainer and engine give to different tokens.",
    "ratio_mean": "1 if both score the distribution that was sampled. Below 1: top-p, top-k or padding.",
    "ess_token": "Effective share of tokens if each is weighted by its ratio. Below 0.9 weights add variance.",
    "ess_sequence": "The same for products over responses. Below 0.2 a tenth of them has half of all weight.",
    "k_hat": "Tail of the products: good below 0.5; above 0.7 their mean is unreliable.",
    "zero_share": "Tokens with equal log-probs on both sides. All: true on-policy, or a copy.",
}
"""The numbers of the summary that the page explains, in this order."""


NUMBERS = ("number", "A", "B", "change", "95 % interval")
CAUSES = ("cause", "A", "B", "found in")
"""Titles of the two tables."""

_REMARKS = (
    "Change: x is A / B. Shares, and numbers that may be 0 or negative, show A - B with its sign.",
    "95 % interval: over prompts, because responses to one prompt are correlated. A response with unknown prompt "
    "counts as a prompt. It is Welch's interval, with the standard error of a ratio of two sums (Cochran, Sampling "
    "Techniques, 1977, chapter 6; over clusters: Miller, Adding Error Bars to Evals, arXiv:2411.00640).",
    f"A dash: the number has no interval, or a run has fewer than {MIN_PROMPTS} prompts. An interval with 1 (or 0 of a "
    "difference) in it is not more than noise. Other seeds of one configuration may differ by more.",
)

_STEP = ("k3", "abs_mean", "abs_p99", "abs_max", "ess_token", "ess_sequence", "k_hat", "reward")
_SAMPLE = {
    "step": "step",
    "sample": "sample",
    "tokens": "num_tokens",
    "mean |d|": "mean_abs_difference",
    "mean d": "mean_log_ratio",
    "k3": "k3",
    "reward": "reward",
}
_GROUP = {
    "group": "name",
    "tokens": "num_tokens",
    "mean |d|": "mean_abs_difference",
    "mean d": "mean_log_ratio",
    "k3": "k3",
    "share of k3": "k3_share",
}
_OUTCOME = {
    "tokens kept": "kept_tokens",
    "with gradient": "live_tokens",
    "sequences kept": "kept_sequences",
    "A > 0, no grad": "removed_positive",
    "A < 0, no grad": "removed_negative",
    "mean factor": "learning_rate",
    "ESS": "ess",
    "variance": "variance",
    "left uncorrected": "residual",
    "largest weight, unfiltered": "weight_max",
}
_SHARES = ("k3_share", "kept_tokens", "live_tokens", "kept_sequences", "removed_positive", "removed_negative")
"""Titles of columns, and the numbers below them; shares are in percent."""


def render_page(report: Report, *, run: str = "") -> str:
    """Render the report as one self-contained HTML page. ``run`` is the name and date of the run."""
    summary, ranking, against = report.summary, report.recommendation.ranking, report.against
    rows = {
        "compared": against and [*map(number_cells, against.numbers)],
        "causes": against and [*map(cause_cells, against.causes)],
        "numbers": [(name, number(getattr(summary.overall, name)), text) for name, text in MEANING.items()],
        "ranking": [*map(_ranked_cells, ranking)],
        "groups": {
            title: [[*_cells(group, _GROUP.values())] for group in groups]
            for title, groups in {
                "By probability of the engine": summary.by_probability,
                "By position in the response": summary.by_position,
                "By turn": summary.by_turn,
                "By weight versions": summary.by_version,
            }.items()
        },
        "steps": [(name, *_cells(step, ("num_tokens", *_STEP))) for name, step in summary.steps.items()],
        "tokens": [*map(_token_cells, summary.worst_tokens)],
        "samples": [[*_cells(each, _SAMPLE.values())] for each in summary.worst_samples],
        "pitfalls": _pitfalls(ranking),
    }
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        finalize=_escape,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"breakable": _breakable, "count": "{:,}".format}
    return environment.get_template("page.html").render(
        report=report,
        title=f"Mismatch report: {run}" if run else "Mismatch report",
        rows=rows,
        chart=chart(report),
        tiles=tiles(report),
        sections={name: title for name, title in _SECTIONS.items() if against or name != "against"},
        NUMBERS=NUMBERS,
        CAUSES=CAUSES,
        REMARKS=_REMARKS,
        STEP=_STEP,
        SAMPLE=_SAMPLE,
        GROUP=_GROUP,
        OUTCOME=("configuration", *_OUTCOME, "removed by"),
    )


class Tile(NamedTuple):
    """A number at the top of the page, with its severity (``good``, ``watch``, ``bad``) and description."""

    severity: str
    value: str
    text: str


def tiles(report: Report) -> list[Tile]:
    """Build the first tiles: k3 with its limit, its trend, and the likely cause."""
    k3, steps = report.summary.overall.k3, [*report.summary.steps.values()]
    size = "good" if k3 < HARMLESS_K3 else "watch" if k3 < QUANTIZED_K3 else "bad"
    trend = Tile("good", "one step", "no trend of k3")
    if len(steps) > 1:
        first, last = steps[0].k3, steps[-1].k3
        most = max(step.k3 for step in steps)
        severity = "bad" if most > GROWTH * first else "watch" if most > NOTICED * first else "good"
        trend = Tile(
            severity, f"{number(first)} to {number(last)}", f"k3 over {len(steps)} steps, at most {number(most)}"
        )
    found = report.diagnoses[0] if report.diagnoses else None
    cause = Tile("watch", "no cause", "too few tokens to say")
    if found is not None:
        severity = "bad" if found.is_fault else "good" if found.confidence == "likely" and size == "good" else "watch"
        cause = Tile(severity, found.title.partition(":")[0], _found(found))
    return [Tile(size, number(k3), f"k3 per token (harmless below {HARMLESS_K3:g})"), trend, cause]


class Chart(NamedTuple):
    """A chart of k3 over steps in a box of 100 by 40, on a logarithmic axis of whole decades.

    Attributes:
        lines: For each run its points: x, y, and a text.
        steps: Titles of the axis of steps, each with its x.
        decades: Titles of the axis of k3, each with its y.
    """

    lines: list[list[tuple[float, float, str]]]
    steps: list[tuple[float, str]]
    decades: list[tuple[float, str]]


def chart(report: Report) -> Chart | None:
    """Draw k3 of each step, also of another run; None for one step or equal engines."""
    runs = [run.summary.steps for run in (report, report.against and report.against.other) if run]
    names = sorted({*chain(*runs)}, key=step_order)
    logs = [{step: math.log10(each.k3) for step, each in run.items() if each.k3 > 0.0} for run in runs]
    shown = [*chain(*(run.values() for run in logs))]
    if len(names) < 2 or not shown:
        return None
    low = math.floor(min(shown))
    high = max(math.ceil(max(shown)), low + 1)
    places = {step: round(100 * index / (len(names) - 1), 1) for index, step in enumerate(names)}
    # A character is 2 wide, and a title must not touch the next.
    stride = math.ceil(2 * (max(map(len, names)) + 1) * (len(names) - 1) / 100)
    return Chart(
        [
            [
                (places[step], round(40 * (high - log) / (high - low), 1), f"step {step}: {number(10**log)}")
                for step, log in sorted(run.items(), key=lambda point: places[point[0]])
            ]
            for run in logs
        ],
        [(places[step], step) for step in names[::stride]],
        [(40 * (high - decade) / (high - low), f"1e{decade}") for decade in range(low, high + 1)],
    )


def _pitfalls(ranking: Sequence[Ranked]) -> list[tuple[str, str]]:
    """List each pitfall once, with its configurations."""
    names: dict[str, list[str]] = {}
    for ranked in ranking:
        for text in (*ranked.warnings, *(f"Good to know: {note}" for note in ranked.notes)):
            if ranked.name not in names.setdefault(text, []):
                names[text].append(ranked.name)
    return [(", ".join(each), text) for text, each in names.items()]


def _escape(content: object) -> Markup:
    """Escape text for a browser; names and tokens may contain control bytes."""
    return content if isinstance(content, Markup) else Markup(html.escape(printable(str(content))))


def _breakable(content: object) -> Markup:
    """Escape text, and allow line breaks in long names."""
    return _escape(content).replace("_", Markup("_<wbr>")).replace("/", Markup("/<wbr>"))


def _cells(row: object, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value = getattr(row, name)
        if isinstance(value, float):
            yield percent(value) if name in _SHARES else number(value)
        else:
            yield value if isinstance(value, str) else f"{value:,}"


def _ranked_cells(ranked: Ranked) -> tuple[str, ...]:
    outcome = ranked.outcome
    removed = "; ".join(f"{name}: {share:.2%}" for name, share in outcome.removed_by.items())
    return (ranked.name, *_cells(outcome, _OUTCOME.values()), removed or "-")


def _token_cells(token: WorstToken) -> tuple[object, ...]:
    around = "-"
    if token.text is not None:
        before, own, behind = token.text
        around = f"...{before} [[{own}]] {behind}..."
    elif token.token_id is not None:
        around = " ".join([*map(str, token.ids_before[-4:]), f"[[{token.token_id}]]", *map(str, token.ids_behind[:4])])
    numbers = map(number, (token.proximal, token.behavior, token.log_ratio))
    own_id = "-" if token.token_id is None else token.token_id
    return (token.step, token.sample, token.position, own_id, *numbers, around)


def number_cells(found: ComparedNumber) -> tuple[str, ...]:
    """A row of the table of numbers: name, A, B, change, and the interval of the change."""
    sign = "x " if found.kind == "ratio" else "+" if found.change > 0.0 else ""
    change = f"{sign}{digits(found.change)}"
    return (found.name, number(found.first), number(found.second), change, str(found.interval))


def cause_cells(found: ComparedCause) -> tuple[str, ...]:
    """A row of the table of causes: title, finding in A, finding in B, and which runs have it."""
    where = "both" if found.first and found.second else "A alone" if found.first else "B alone"
    return (found.title, _found(found.first), _found(found.second), where)


def _found(found: Diagnosis | None) -> str:
    return "-" if found is None else ", ".join(filter(None, (found.confidence, found.share_in_words)))


def number(value: float) -> str:
    """Format with three digits; a dash if not measured."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def percent(value: float) -> str:
    """Format as percent with one digit; a dash if not measured."""
    return "-" if math.isnan(value) else f"{value:.1%}"
