"""``mis-ext check-rollouts``: what logged conversations prove about the sampled tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from mis_ext.rollout.conversations.policies import BehindSplice, Policy

if TYPE_CHECKING:
    from rich.progress import Progress

    from mis_ext.rollout.text import Tokenizer

_MIN_BYTES_FOR_PROGRESS = 1 << 24
_FORMAT = (
    'One call a line: {"conversation": ID, "format": NAME, "request": {...}, "response": {...}}, and, where there is '
    'one, "request_id", "text" (what the agent kept of the response), "choice", "prompt_ids" (vLLM, OpenAI). Formats: '
    "sglang (/generate), sglang-chat, sglang-completions, vllm-chat, vllm-completions, openai-chat, "
    "openai-completions. Calls of one conversation are in order; others may be in between, and files are read as one."
)


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext check-rollouts``."""
    parser = subparsers.add_parser(
        "check-rollouts",
        help="do logged conversations prove which tokens were sampled?",
        description=(
            "Reads logged calls of inference servers, and reports by class what was refused, how each turn continues "
            "those before, and what was done to the texts. Exit code: 0 every response was read, every prompt has "
            "the ids that were sampled before it (or is a retry, a fork or a duplicate), and no text was changed; 1 "
            "not so, or nothing was measured; 2 wrong usage, or a file that cannot be opened."
        ),
        epilog=_FORMAT,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines, plain or gzip")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the server's: a Hugging Face folder or a tokenizer.json; tells why ids differ, and checks texts",
    )
    parser.add_argument(
        "--reasoning",
        nargs=2,
        metavar=("OPENING", "CLOSING"),
        help="the markers of a reasoning block, by default <think> </think>",
    )
    parser.add_argument("--policy", choices=get_args(Policy), help="also report what would be trained under this one")
    parser.add_argument(
        "--behind-splice",
        choices=get_args(BehindSplice),
        help="with --policy correct: what becomes of tokens that the server scored behind other ids (default: mask)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here too")
    parser.add_argument(
        "--samples", type=Path, metavar="PATH", help="write the samples under the policy here, as JSON lines"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Check the logs, show the report; 0 if they passed, else 1."""
    # Before the work: the report is shown with it.
    _require("rich", "mis_ext[cli]")
    if parsed.samples is not None and parsed.policy is None:
        raise ValueError(f"--samples needs --policy: {' | '.join(get_args(Policy))}")
    if parsed.behind_splice is not None and parsed.policy != "correct":
        raise ValueError(f"--behind-splice {parsed.behind_splice} needs --policy correct: nothing else splices")
    if parsed.policy == "correct" and parsed.tokenizer is None:
        raise ValueError("--policy correct needs --tokenizer: where ids differ, only it tells whether the text does")
    if parsed.reasoning is not None and "" in parsed.reasoning:
        raise ValueError("the markers of --reasoning must not be empty")
    for output in (parsed.json, parsed.samples):
        if output is not None and output.exists() and any(output.samefile(log) for log in parsed.files):
            raise ValueError(f"{output} is one of the logs: name another file")
    report = _check(parsed, None if parsed.tokenizer is None else _load_tokenizer(parsed.tokenizer))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    _show(report)
    return 0 if report["passed"] else 1


def _check(parsed: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    from mis_ext.rollout.logs.checks import REASONING, check_conversation
    from mis_ext.rollout.logs.files import RolloutLog
    from mis_ext.rollout.logs.report import LogReport

    opening, closing = parsed.reasoning or REASONING
    report = LogReport([str(path) for path in parsed.files], policy=parsed.policy)
    with ExitStack() as stack:
        log = stack.enter_context(RolloutLog(parsed.files))
        samples = None if parsed.samples is None else stack.enter_context(parsed.samples.open("w"))
        progress = stack.enter_context(_progress(enabled=log.size >= _MIN_BYTES_FOR_PROGRESS))
        task = progress.add_task("reading", total=log.size)
        for num_bytes in log.scan():
            progress.advance(task, num_bytes)
        for problem in log.problems:
            report.add_problem(problem)
        for name in progress.track(log.conversations, description="checking"):
            check = check_conversation(
                log.calls(name),
                tokenizer=tokenizer,
                policy=parsed.policy,
                behind_splice=parsed.behind_splice or "mask",
                reasoning=(opening, closing),
            )
            report.add(check)
            if samples is not None:
                samples.writelines(
                    json.dumps({"conversation": name, **asdict(sample)}) + "\n" for sample in check.samples
                )
    return report.to_dict()


@contextmanager
def _progress(*, enabled: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not enabled) as progress:
        yield progress


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise OSError(f"--tokenizer {path} does not exist")
    _require("transformers", "transformers")
    import transformers

    if path.is_dir():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    else:
        from_file: Any = transformers.PreTrainedTokenizerFast
        tokenizer = from_file(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
    return cast("Tokenizer", tokenizer)


def _require(module: str, requirement: str) -> None:
    try:
        __import__(module)
    except ImportError as error:
        raise OSError(f"mis-ext check-rollouts needs {module}: pip install {requirement}") from error


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    passed = report["passed"]
    console.print(Text("PASSED" if passed else "FAILED", style="bold green" if passed else "bold red"))
    console.print(_grid(_rows(report)))
    for key, title in (("refused", "refused"), ("boundaries", "turn boundaries"), ("texts", "texts")):
        if report[key]:
            console.print(_table(title, report[key]))
    if report["policy"] and report["policy"]["errors"]:
        console.print(_table("refused by the policy", report["policy"]["errors"]))


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("because", reason) for reason in report["reasons"]]
    rows += [(name.replace("_", " "), str(report[name])) for name in ("conversations", "calls", "sampled_tokens")]
    for kind, found in report["weight_versions"].items():
        versions = ", ".join(found["first"]["versions"])
        example = f", the first {found['first']['conversation']!r}{versions and ': '}{versions}"
        rows.append((f"weight versions: {kind}", f"{found['count']} conversations{example}"))
    policy = report["policy"]
    if policy:
        rows += [
            (f"policy {policy['name']}", f"{policy['samples']} samples"),
            ("trained tokens", str(policy["trained_tokens"])),
            ("dropped tokens", str(policy["dropped_tokens"])),
            ("tokens behind other ids", str(policy["tokens_behind_other_ids"])),
            ("actions", ", ".join(f"{action} {count}" for action, count in policy["actions"].items() if count) or "-"),
        ]
    return rows


def _grid(rows: list[tuple[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(_printable(value)))
    return grid


def _table(title: str, classes: Mapping[str, Mapping[str, Any]]) -> Any:
    from rich.table import Column, Table
    from rich.text import Text

    first = Column("first", overflow="fold")
    table = Table("class", "count", "share", "failing", first, title=title, show_lines=True)
    for kind, found in classes.items():
        cells = [kind, str(found["count"]), f"{found['share']:.1%}", str(found["failing"])]
        example = "\n".join(map(_printable, _example_lines(found["first"])))
        table.add_row(*map(Text, cells), Text(example), style="red" if found["failing"] else "")
    return table


def _example_lines(example: Mapping[str, Any]) -> Iterator[str]:
    place = f"{example['file']}, line {example['line']}" if "file" in example else ""
    conversation = f"conversation {example['conversation']!r}" if example["conversation"] is not None else ""
    yield ", ".join(filter(None, (place, conversation)))
    if example.get("position") is not None:
        found = "the prompt ends" if example["found_id"] is None else f"the prompt has {example['found_id']}"
        known = "nothing more" if example["expected_id"] is None else f"id {example['expected_id']}"
        yield f"position {example['position']}: {known} is known, {found}"
    for key, name in (("expected_text", "known: "), ("found_text", "prompt: ")):
        if example.get(key) is not None:
            yield f"{name}{example[key]!r}"
    yield from (example[key] for key in ("message", "detail") if example.get(key))
    if example.get("cure"):
        yield f"cure: {example['cure']}"


def _printable(text: str) -> str:
    """The text, where what a terminal would obey or could not write is escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
