"""The report as one page of HTML that needs nothing else: no network, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files

from mis_ext.diagnosis.cause import Diagnosis
from mis_ext.report.comparison_page import comparison_section
from mis_ext.report.markup import breakable, escape, figure, number, percent, table
from mis_ext.report.plots import pictures
from mis_ext.report.recommendation import Recommendation
from mis_ext.report.references import MEANING, REFERENCES
from mis_ext.report.run import Run
from mis_ext.report.summary import Group, Mismatch, WorstToken
from mis_ext.report.whole_report import Report


def page_of(report: Report) -> str:
    """The report as one HTML page that needs no other file."""
    overall = report.summary.overall
    style = files("mis_ext.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        ("what-to-do", "What to do", _recommendation(report.recommendation)),
        *comparison_section(report),
        ("why", "Why the engines disagree", _diagnoses(report)),
        ("numbers", "The numbers", _numbers(overall) + _references()),
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
    return table("The numbers of all steps", ("number", "value", "meaning, and when to worry"), rows)


def _references() -> str:
    rows = [(f"{each.low:g} to {each.high:g}", each.what, each.source) for each in REFERENCES]
    return table("What k3 is normal", ("k3", "with", "source"), rows)


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
