# SPDX-License-Identifier: Apache-2.0
"""``mis-ext report``: inspect a run, and choose a configuration from its data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext.files import write_whole
from mis_ext.rollout.generation import find_illegal_id
from mis_ext.tools.cli.command import Result, require, show, show_grid, show_table, watch

if TYPE_CHECKING:
    from mis_ext.tools.report.recommendation import Recommendation
    from mis_ext.tools.report.whole_report import Report, SideBySide

_SUFFIXES = (".pt", ".jsonl")
_OUT = Path("mismatch_report")


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext report``."""
    parser = subparsers.add_parser(
        "report",
        help="report where trainer and engine differ, the likely cause, and the effect of configurations",
        description=(
            "Report where trainer and engine differ and the likely cause, and rank configurations on your data. "
            "Pass dumps of --dump-details or --save-debug-train-data (the files of all ranks), or .jsonl files with "
            "log_probs, rollout_log_probs, ... The command writes report.html and summary.json. "
            "Exit code: 0 success, 2 a file cannot be read."
        ),
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder with such files")
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        metavar="OTHER",
        help="files of another run, B, to compare with the run A in PATH; the advice is for A",
    )
    parser.add_argument(
        "--config",
        action="append",
        type=Path,
        default=[],
        metavar="YAML",
        help="evaluate this configuration; repeatable",
    )
    parser.add_argument(
        "--preset",
        action="append",
        metavar="NAME",
        help="evaluate this preset; repeatable. Default: all presets",
    )
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="NAME",
        help="evaluate this published method with its defaults, at the first update; repeatable",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"output directory; default {_OUT}. An existing report is replaced. With --json, nothing is written "
        "without this option",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="the tokenizer, to show the text of the worst tokens"
    )
    parser.add_argument(
        "--worst", type=int, default=30, metavar="N", help="number of tokens and samples to list; default %(default)d"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="also read .pt files that contain more than tensors. Such a file can run any code: use only files you "
        "trust",
    )
    parser.set_defaults(run=run, shown_with=("rich", "jinja2"))


def run(parsed: argparse.Namespace) -> Result:
    """Make and write the report of the files."""
    out = _OUT if parsed.out is None and not parsed.json else parsed.out
    if out is not None:
        require("jinja2")
    report = _report(parsed)
    if parsed.tokenizer is not None:
        report = _with_text(report, parsed.tokenizer)
    if out is not None:
        _write(report, out, run=f"{_name_of(parsed.paths)}, {_date_of(*map(Path, report.sources))}")
    return Result(report.to_dict(), lambda: _show_report(report, out or _OUT))


def _name_of(paths: Sequence[Path]) -> str:
    """Return the name of a run: the common end of its paths, ``run7/dumps/train_data``."""
    return "/".join(Path(os.path.commonpath([os.path.abspath(path) for path in paths])).parts[-3:])


def _date_of(*files: Path) -> str:
    """Return the date of the newest file; empty if there is none."""
    written = [file.stat().st_mtime for file in files if file.exists()]
    return datetime.fromtimestamp(max(written)).strftime("%Y-%m-%d %H:%M") if written else ""


def _report(parsed: argparse.Namespace) -> Report:
    from mis_ext.tools.dumps import Dumps
    from mis_ext.tools.report.findings import Collector, read_findings
    from mis_ext.tools.report.recommendation import file_candidate, method_candidate, preset_candidates
    from mis_ext.tools.report.whole_report import make_report

    if parsed.worst < 0:
        raise ValueError(f"--worst must be 0 or more, got {parsed.worst}")
    paths, others = ([*_files(chosen or ())] for chosen in (parsed.paths, parsed.against))
    candidates = [file_candidate(path) for path in parsed.config]
    candidates += [method_candidate(name) for name in parsed.method]
    candidates += preset_candidates(parsed.preset) if parsed.preset or not candidates else []
    dumps, other = (Dumps(each, trust_pickle=parsed.trust_pickle, watch=watch) for each in (paths, others))
    with _pool() as pool:
        options: dict[str, Any] = {"num_worst": parsed.worst, "pool": pool}
        # Read this before the run itself, which takes longer, so that an unreadable file is found early.
        against = read_findings(other, Collector(**options), sources=map(str, others)) if others else None
        return make_report(dumps, candidates, sources=map(str, paths), against=against, **options)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Make a pool with one thread per core. torch uses one thread meanwhile: more are slower here."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = [each for each in path.rglob("*") if each.suffix in _SUFFIXES]
        if not found:
            raise ValueError(f"{path}: the folder has no file that ends in {', '.join(_SUFFIXES)}")
        yield from sorted(found, key=lambda each: (each.parent, len(each.name), each.name))


def _with_text(report: Report, path: Path) -> Report:
    from mis_ext.tools.cli.check_rollouts import load_tokenizer

    tokenizer: Any = load_tokenizer(path)
    tokens = []
    for token in report.summary.worst_tokens:
        own = () if token.token_id is None else (token.token_id,)
        before, text, behind = (_decoded(tokenizer, ids) for ids in (token.ids_before, own, token.ids_behind))
        tokens.append(dataclasses.replace(token, text=(before, text, behind)))
    return dataclasses.replace(report, summary=dataclasses.replace(report.summary, worst_tokens=tokens))


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode ids; return them as numbers if one is not a token id, such as -100 for an image."""
    if find_illegal_id([*ids]) is not None:
        return " ".join(map(str, ids))
    text: str = tokenizer.decode([*ids])
    return text


def _write(report: Report, folder: Path, *, run: str) -> None:
    from mis_ext.tools.report.page import render_page

    # Render before writing, so that an error leaves no files.
    summary, page = json.dumps(report.to_dict(), allow_nan=False), render_page(report, run=run)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "summary.json", f"{summary}\n")
    write_whole(folder / "report.html", page)


def _show_report(report: Report, folder: Path) -> None:
    """Print recommendation, causes, numbers, the comparison with another run, and the ranking."""
    _show_causes(report)
    _show_numbers(report)
    if report.against is not None:
        _show_comparison(report, report.against)
    _show_ranking(report.recommendation)
    for skipped in report.skipped[:10]:
        show(f"skipped: {skipped}", "yellow")
    if len(report.skipped) > 10:
        show(f"skipped: {len(report.skipped) - 10} more, see {folder / 'summary.json'}", "yellow")
    show(f"written: {folder / 'report.html'}, summary.json")


def _show_causes(report: Report) -> None:
    found = report.recommendation
    show(found.headline, "bold")
    for reason in found.reasons:
        show(f"  {reason}")
    for diagnosis in report.diagnoses:
        show(f"{diagnosis.confidence}: {diagnosis.title}", "bold yellow")
        for said in filter(None, (diagnosis.evidence, diagnosis.share_in_words, diagnosis.doubt_in_words)):
            show(f"  {said}")
    if report.diagnoses:
        show(report.unexplained.in_words, "dim")


_NUMBERS = ("k3", "reverse_k3", "abs_mean", "abs_p99", "abs_max", "ess_token", "ess_sequence", "k_hat", "ratio_mean")


def _show_numbers(report: Report) -> None:
    from mis_ext.tools.report.page import number

    overall = report.summary.overall
    tokens = f"{overall.num_tokens:,} of {overall.num_sequences:,} responses"
    show_grid([("tokens", tokens), *((name, number(getattr(overall, name))) for name in _NUMBERS)])
    show("  What each number means, and which values are too high: report.html", "dim")


def _show_comparison(report: Report, found: SideBySide) -> None:
    from mis_ext.tools.report.page import CAUSES, NUMBERS, cause_cells, number_cells

    show(found.headline, "bold")
    for letter, run in (("A", report), ("B", found.other)):
        show(f"  {letter}: {run.name}")
    for note in found.notes:
        show(f"  {note}")
    show_table(NUMBERS, map(number_cells, found.numbers))
    show("  change: x is A / B, + and - A - B", "dim")
    show_table(CAUSES, map(cause_cells, found.causes))
    show("  report.html explains the intervals. The following is for A only.", "dim")


def _show_ranking(found: Recommendation) -> None:
    from mis_ext.tools.report.page import number, percent

    rows, has_pitfalls = [], any(ranked.traps for ranked in found.ranking)
    for ranked in found.ranking:
        outcome = ranked.outcome
        numbers = map(number, (outcome.ess, outcome.learning_rate, outcome.residual))
        row = [Path(ranked.name).name, percent(outcome.kept_tokens), *numbers]
        rows.append([*row, "\n".join(ranked.traps)] if has_pitfalls else row)
    styles = ["yellow" if ranked.warnings else "" for ranked in found.ranking]
    titles = ["configuration", "kept", "ESS", "mean", "left", *(["pitfalls"] if has_pitfalls else [])]
    show_table(titles, rows, styles=styles, name="what each configuration would do, the best first")
    show(
        "  kept: share of tokens. ESS, mean: effective sample size and mean of the factor on the gradient, which is "
        "1 without a correction. left: mean distance of this factor from the ratio",
        "dim",
    )
    if has_pitfalls:
        show("  report.html and mis-ext explain CONFIGURATION describe the pitfalls", "dim")
