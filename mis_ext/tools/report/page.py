"""The report as one page of HTML that needs nothing else: no network, no script."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from mis_ext.checks.limits import KERNEL_K3, PRETRAINED_K3, QUANTISED_K3
from mis_ext.files import printable
from mis_ext.tools.diagnosis.cause import Diagnosis
from mis_ext.tools.report.comparison import Compared, ComparedCause, Comparison, Found
from mis_ext.tools.report.noise import MIN_PROMPTS, digits
from mis_ext.tools.report.plots import Picture, comparison_pictures, drawn, pictures
from mis_ext.tools.report.recommendation import Recommendation
from mis_ext.tools.report.run import Run
from mis_ext.tools.report.summary import Group, Mismatch, WorstToken
from mis_ext.tools.report.whole_report import Report

_LONG = 20
"""Characters from which on a cell of a table is wrapped."""


class Reference(NamedTuple):
    """A k3 per token that was seen, and where."""

    low: float
    high: float
    what: str
    source: str


REFERENCES = (
    Reference(
        1e-5,
        PRETRAINED_K3,
        "dense models in bfloat16",
        "5e-5 in a toy (bf16.md), 6e-4 with 4B (published.md), 2e-3 with 135M (slime_gpu.md)",
    ),
    Reference(
        KERNEL_K3,
        QUANTISED_K3,
        "fp8 weights or cache",
        "1e-3 to 8e-3 in a toy (fp8_*.md), 7e-3 to 7e-2 pretrained (published.md, pretrained_stories.md). "
        "Qwen2.5 has 0.3 with an e4m3 cache, which no correction saved (README.md)",
    ),
    Reference(4e-4, 1e-1, "mixtures of experts", "4e-4 in a tiny one (moe_mismatch.md), more of slime and Miles users"),
    Reference(
        4e-3,
        3.0,
        "weights 1 to 16 steps old",
        "with 135M 4e-3 at 1 step, up to 5e-2 at 4, 5e-1 at 8 (pretrained_stale.md); 8e-2 and more in a toy",
    ),
)
"""All of fresh weights but the last; files are those of ``lab/evidence``, ``slime_gpu.md`` of ``real_stack``."""

MEANING = {
    "k3": "KL(behavior, proximal) per token. Worry if it grows, or is far above what your model has when healthy. With "
    "fresh weights of SmolLM2: above 1e-2 (fp8: 7e-2, experts: 1e-1).",
    "reverse_k3": "KL(proximal, behavior) per token. Far from k3: a heavy tail on one side.",
    "k1": "-mean d: a noisy KL of any sign. Far above k3: the trainer scores what cannot have been sampled.",
    "abs_mean": "Mean |d| in nats. Above 0.3 it is a mistake or stale weights, not kernels.",
    "abs_p99": "One token in a hundred differs by more.",
    "abs_max": "The largest |d|. A single token above 20 is a sentinel or another text.",
    "total_variation": "Share of probability that trainer and engine give to different tokens.",
    "chi_square": "Variance of token ratios.",
    "ratio_mean": "1 if both score the distribution that was sampled. Below 1: top-p, top-k or padding.",
    "ess_token": "Effective share of tokens if each is weighted by its ratio. Below 0.9 weights add variance.",
    "ess_sequence": "The same for products over responses. Below 0.2 a tenth of them has half of all weight.",
    "ess_geometric": "The same for geometric means.",
    "k_hat": "Tail of the products: below 0.5 it is fine, above 0.7 their mean is unreliable.",
    "perplexity_ratio": "Proximal over behavior perplexity; 1 + k1 where they are close.",
    "zero_share": "Tokens with equal log-probs on both sides. All: true on-policy, or a copy.",
    "above_2_share": "Tokens that an upper bound of 2 truncates.",
    "below_half_share": "Tokens whose ratio is below 1/2.",
}
"""Numbers of the summary that are explained on the page, in this order."""


NUMBERS = ("number", "A", "B", "change", "95 % interval")
CAUSES = ("cause", "A", "B", "found in")
"""Titles of the two tables."""

_VERDICTS = {
    "equal": "equal",
    "noise": "not more than noise",
    "higher": "yes, A is higher",
    "lower": "yes, A is lower",
    "unknown": "-",
}
_REMARKS = (
    "Change: x is A / B. Shares, and what may be 0 or less, have A - B with its sign.",
    "95 % interval: over prompts, because responses to one prompt are alike. A response of unknown prompt counts as a "
    "prompt. It is Welch's, of the standard error of a ratio of two sums (Cochran, Sampling Techniques, 1977, chapter "
    "6; over clusters: Miller, Adding Error Bars to Evals, arXiv:2411.00640).",
    f"A dash: the number has no interval, or a run has fewer than {MIN_PROMPTS} prompts.",
    "The interval knows nothing of other seeds: two runs of one configuration may differ by more.",
)


def page_of(report: Report) -> str:
    """The report as one HTML page that needs no other file."""
    overall = report.summary.overall
    style = files("mis_ext.tools.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        ("what-to-do", "What to do", _recommendation(report.recommendation)),
        *comparison_section(report),
        ("why", "Why the engines disagree", _diagnoses(report)),
        ("numbers", "The numbers", _numbers(overall)),
        ("pictures", "Pictures", "".join(f'<div class="pictures">{"".join(map(figure, pictures(report)))}</div>')),
        ("what-if", "What each configuration would have done", _what_if(report.recommendation)),
        ("groups", "Where the mismatch is", _groups(report)),
        ("steps", "Steps", _steps(report.summary.steps) + _indicators(report)),
        ("tokens", "Worst tokens", _worst_tokens(report.summary.worst_tokens)),
        ("samples", "Worst samples", _worst_samples(report)),
        ("input", "What was read", _input(report)),
    ]
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>' for name, title, content in sections
    )
    subtitle = (
        f"{overall.num_tokens:,} tokens of {overall.num_sequences:,} responses, {len(report.summary.steps)} steps"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>Mismatch report</title><style>{style}</style></head><body>"
        '<a class="skip" href="#what-to-do">Skip to the recommendation</a>'
        f"<header><h1>Mismatch report</h1><p>{escape(subtitle)}. d is the trainer's log-prob minus the engine's, in "
        "nats.</p>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>{body}</main></body></html>\n'
    )


def _recommendation(found: Recommendation) -> str:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons)
    paste = f'<p>To paste:</p><pre tabindex="0">{escape(found.yaml)}</pre>' if found.yaml else ""
    return f'<p class="headline">{escape(found.headline)}</p><ul>{reasons}</ul>{paste}'


def _diagnoses(report: Report) -> str:
    if not report.diagnoses:
        return "<p>Too few tokens to say.</p>"
    return (
        "".join(
            f'<div class="card"><h3>{escape(each.title)} <span class="tag">{escape(each.confidence)}</span></h3>'
            f"<p>{escape(each.evidence)}.</p>{_extra(each)}<p>{escape(each.advice)}</p></div>"
            for each in report.diagnoses
        )
        + f"<p>{escape(report.unexplained.in_words)}</p>"
    )


def _extra(found: Diagnosis) -> str:
    said = filter(None, (found.share_in_words, found.doubt_in_words))
    return "".join(f"<p>{escape(each[0].upper() + each[1:])}.</p>" for each in said)


def _numbers(overall: Mismatch) -> str:
    rows = [(name, number(getattr(overall, name)), text) for name, text in MEANING.items()]
    normal = [(f"{each.low:g} to {each.high:g}", each.what, each.source) for each in REFERENCES]
    return table("The numbers of all steps", ("number", "value", "meaning, and when to worry"), rows) + table(
        "What k3 is normal", ("k3", "with", "source"), normal
    )


def _what_if(found: Recommendation) -> str:
    rows = []
    for ranked in found.ranking:
        outcome = ranked.outcome
        removed = "; ".join(f"{name}: {share:.2%}" for name, share in outcome.removed_by.items())
        numbers = (outcome.learning_rate, outcome.ess, outcome.variance, outcome.residual, outcome.weight_max)
        of_tokens = (outcome.kept_tokens, outcome.live_tokens)
        shares = (*of_tokens, outcome.kept_sequences, outcome.removed_positive, outcome.removed_negative)
        is_known = not math.isnan(outcome.groups)
        groups = f"{outcome.groups_left:,.0f} of {outcome.groups:,.0f}" if is_known else "-"
        rows.append((ranked.name, *map(percent, shares), groups, *map(number, numbers), removed or "-"))
    titles = (
        *("configuration", "tokens kept", "with gradient", "sequences kept", "A > 0, no grad", "A < 0, no grad"),
        "groups left",
        "effective lr",
        *("ESS", "variance", "left uncorrected", "largest weight", "removed by"),
    )
    is_known = not any(math.isnan(ranked.outcome.groups) for ranked in found.ranking)
    groups = (
        "Groups left are groups of one prompt whose kept samples still have different advantages. The other groups "
        "give no gradient."
        if is_known
        else "Groups left: not recorded. It needs group_index or the ids of prompts, and advantages or rewards."
    )
    return (
        "<p>The best first. Masks are those of the hook, bit for bit; for a method, those of the first update. Tokens "
        "with weight 0 are kept, and have no policy gradient. Two columns split them by the sign of A. ESS, variance "
        "and effective learning rate are those of the factor on the loss, which is 1 without correction. Left "
        f"uncorrected is the mean distance of this factor from the ratio. {groups}</p>"
        + table("Configurations, the best first", titles, rows)
        + _remarks(found)
    )


def _remarks(found: Recommendation) -> str:
    """What speaks against each configuration, and what is to be known of it."""
    remarks = {
        ranked.name: [*ranked.warnings, *(f"Good to know: {note}" for note in ranked.notes)] for ranked in found.ranking
    }
    rows = "".join(
        f"<dt>{breakable(name)}</dt>{''.join(f'<dd>{escape(text)}</dd>' for text in texts)}"
        for name, texts in remarks.items()
        if texts
    )
    return f"<h3>What speaks against them</h3><dl>{rows}</dl>" if rows else ""


def _groups(report: Report) -> str:
    summary = report.summary
    groups = (
        ("By probability of the engine", summary.by_probability),
        ("By position in the response", summary.by_position),
        ("By turn", summary.by_turn),
        ("By sign of the advantage", summary.by_sign),
        ("By weight versions", summary.by_version),
    )
    absent = [name for name, rows in groups if not rows]
    said = f"<p>Not recorded: {escape(', '.join(absent).lower())}.</p>" if absent else ""
    return "".join(_group(name, rows) for name, rows in groups if rows) + said


def _group(name: str, rows: Sequence[Group]) -> str:
    cells = [
        (
            *(row.name, f"{row.num_tokens:,}", number(row.mean_abs_difference), number(row.mean_log_ratio)),
            *(number(row.k3), percent(row.k3_share)),
        )
        for row in rows
    ]
    return f"<h3>{escape(name)}</h3>" + table(name, ("", "tokens", "mean |d|", "mean d", "k3", "share of k3"), cells)


def _steps(steps: dict[str, Mismatch]) -> str:
    names = ("k3", "abs_mean", "abs_p99", "abs_max", "ess_token", "ess_sequence", "k_hat", "reward")
    rows = [
        (step, f"{found.num_tokens:,}", *(number(getattr(found, name)) for name in names))
        for step, found in steps.items()
    ]
    return table("Steps", ("step", "tokens", *names), rows)


def _indicators(report: Report) -> str:
    rows = [
        (each.name, f"{each.lag:+d}", number(each.correlation), number(each.correlation_now), each.num_steps)
        for each in report.indicators
    ]
    if not rows:
        return "<p>Fewer than 8 steps with a reward or a logged number: nothing to correlate with k3.</p>"
    titles = ("series", "steps that k3 is ahead", "rank correlation", "without lag", "steps")
    return "<h3>What moves with k3</h3>" + table("What moves with k3", titles, rows)


def _worst_tokens(tokens: Sequence[WorstToken]) -> str:
    rows = [
        (
            *(each.step, each.sample, each.position, "-" if each.token_id is None else each.token_id),
            *(number(value) for value in (each.proximal, each.behavior, each.log_ratio)),
            _context(each),
        )
        for each in tokens
    ]
    titles = ("step", "sample", "position", "token id", "trainer", "engine", "d", "in context")
    return table("Tokens with the largest |d|", titles, rows)


def _context(token: WorstToken) -> str:
    if token.text is not None:
        before, own, behind = token.text
        return f"...{before} [[{own}]] {behind}..."
    if token.token_id is None:
        return "-"
    return " ".join([*map(str, token.ids_before[-4:]), f"[[{token.token_id}]]", *map(str, token.ids_behind[:4])])


def _worst_samples(report: Report) -> str:
    rows = [
        (
            *(each.step, each.sample, f"{each.num_tokens:,}"),
            *map(number, (each.mean_abs_difference, each.mean_log_ratio, each.k3, each.reward)),
        )
        for each in report.summary.worst_samples
    ]
    return table(
        "Samples with the largest mean |d|", ("step", "sample", "tokens", "mean |d|", "mean d", "k3", "reward"), rows
    )


def _input(report: Report) -> str:
    overall = report.summary.overall
    counts = (
        f"<p>{overall.num_tokens:,} tokens were used. {overall.num_masked:,} were masked, "
        f"{overall.num_without_ratio:,} trained tokens had no finite log-prob of both sides.</p>"
    )
    other = "" if report.against is None else _files(report.against.other, " of B")
    return f"{counts}{_files(report)}{other}"


def _files(run: Run, whose: str = "") -> str:
    read = "".join(f"<li>{escape(source)}</li>" for source in run.sources)
    skipped = "".join(f"<li>{escape(each)}</li>" for each in run.skipped) or "<li>nothing</li>"
    return f"<h3>Read{whose}</h3><ul>{read}</ul><h3>Skipped{whose}</h3><ul>{skipped}</ul>"


def comparison_section(report: Report) -> list[tuple[str, str, str]]:
    """The section as its name, title and content, in a list; none without another run."""
    if report.against is None:
        return []
    found = report.against
    rows = ((*number_cells(each), _VERDICTS[each.verdict]) for each in found.numbers)
    numbers = table("Numbers of A and of B", (*NUMBERS, "more than noise?"), rows)
    content = (
        f'<p class="headline">{escape(found.headline)}</p>'
        f"<dl>{_run('A', report)}{_run('B', found.other)}</dl>"
        f"{_list(found.notes)}"
        f'<div class="pictures">{"".join(map(figure, comparison_pictures(report)))}</div>'
        f"{numbers}{_list(_REMARKS)}<h3>Causes</h3>{_causes(found)}"
        "<p>All other sections, the ranking of configurations too, are of A alone.</p>"
    )
    return [("against", "Two runs side by side", content)]


def _list(texts: Iterable[str]) -> str:
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{rows}</ul>" if rows else ""


def _run(letter: str, run: Run) -> str:
    overall = run.summary.overall
    size = (
        f"{overall.num_tokens:,} tokens of {overall.num_sequences:,} responses to {overall.num_prompts:,} prompts, "
        f"{len(run.summary.steps)} steps"
    )
    return f"<dt>{letter}: {escape(run.name)}</dt><dd>{size}</dd>"


def number_cells(found: Compared) -> tuple[str, ...]:
    """A row of the table of numbers, without the verdict: its name, A, B, how they differ, and the interval of that."""
    sign = "x " if found.kind == "ratio" else "+" if found.change > 0.0 else ""
    change = f"{sign}{digits(found.change)}"
    return (found.name, number(found.first), number(found.second), change, str(found.interval))


def cause_cells(found: ComparedCause) -> tuple[str, ...]:
    """A row of the table of causes: what it is, how each run shows it, and which of them does."""
    where = "both" if found.first and found.second else "A alone" if found.first else "B alone"
    return (found.title, _found(found.first), _found(found.second), where)


def _causes(found: Comparison) -> str:
    if not found.causes:
        return "<p>Neither run has enough tokens to name one.</p>"
    return table("Causes in A and in B", CAUSES, map(cause_cells, found.causes))


def _found(found: Found | None) -> str:
    if found is None:
        return "-"
    return f"{found.confidence}, {'up to ' if found.is_up_to else ''}{percent(found.k3_share)} of k3"


def escape(text: str) -> str:
    """What a browser shows as it is; names and tokens may hold bytes that a terminal would obey."""
    return html.escape(printable(text))


def figure(picture: Picture) -> str:
    """A picture with its text, inside the page."""
    content = base64.b64encode(drawn(picture, file_format="svg")).decode()
    text = escape(picture.text)
    return (
        f'<figure><img alt="{escape(picture.title)}. {text}" src="data:image/svg+xml;base64,{content}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def table(title: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in a box that scrolls by itself, also with the keyboard."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(content: object) -> str:
    text = breakable(str(content))
    return f'<td class="long">{text}</td>' if len(str(content)) > _LONG else f"<td>{text}</td>"


def breakable(name: str) -> str:
    """With places where a long name may go on in the next line."""
    return escape(name).replace("_", "_<wbr>").replace("/", "/<wbr>")


def number(value: float) -> str:
    """Three digits; a dash for what was not measured."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def percent(value: float) -> str:
    """A share in percent, with one digit; a dash for what was not measured."""
    return "-" if math.isnan(value) else f"{value:.1%}"
