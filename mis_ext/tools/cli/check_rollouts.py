# SPDX-License-Identifier: Apache-2.0
"""``mis-ext check-rollouts``: what logged conversations prove about the sampled tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from mis_ext.rollout.generation import Policy
from mis_ext.tools.cli.command import Result, require, show, show_grid, show_table

if TYPE_CHECKING:
    from mis_ext.rollout.generation import Tokenizer

_FORMAT = (
    'One call per line: {"conversation": ID, "format": NAME, "request": {...}, "response": {...}}. Optional keys: '
    '"request_id", "text" (the text that the agent kept), "choice". Formats: sglang (/generate), '
    "sglang-chat, sglang-completions, vllm (/inference/v1/generate), vllm-chat, vllm-completions. Calls of one "
    "conversation are in order; calls of other conversations may be in between. Several files are read as one."
)


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext check-rollouts``."""
    parser = subparsers.add_parser(
        "check-rollouts",
        help="check that logged conversations contain the sampled token ids",
        description=(
            "Read logged calls of inference servers. Report rejected calls, turn boundaries, and changed "
            "texts, each by kind. Exit code: 0 every response was read, every "
            "prompt has the ids that were sampled before it (or is a retry, a fork or a duplicate), and no text was "
            "changed; 1 a condition is not met, or nothing was measured; 2 wrong usage, or a file cannot be opened."
        ),
        epilog=_FORMAT,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines, plain or gzip")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the server's tokenizer: a Hugging Face folder, or its tokenizer.json, which loads faster. With it the "
        "report shows texts where ids differ, and checks texts",
    )
    parser.add_argument(
        "--policy", choices=get_args(Policy), help="also report the tokens that this policy would train"
    )
    parser.add_argument(
        "--samples", type=Path, metavar="PATH", help="write the samples of --policy to PATH, as JSON lines"
    )
    parser.set_defaults(run=run, shown_with=("rich",))


def run(parsed: argparse.Namespace) -> Result:
    """Check the logs; the exit code is 0 if they passed, else 1."""
    if parsed.samples is not None and parsed.policy is None:
        raise ValueError(f"--samples needs --policy: {' | '.join(get_args(Policy))}")
    samples = parsed.samples
    if samples is not None and samples.exists() and any(samples.samefile(log) for log in parsed.files):
        raise ValueError(f"{samples} is one of the logs: choose another file")
    report = _check(parsed, None if parsed.tokenizer is None else load_tokenizer(parsed.tokenizer))
    return Result(report, lambda: _show_report(report), 0 if report["passed"] else 1)


def _check(parsed: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    from mis_ext.rollout.rollout_log import LogReport

    report = LogReport(parsed.files, tokenizer=tokenizer, policy=parsed.policy)
    conversations = report.read()
    with nullcontext() if parsed.samples is None else parsed.samples.open("w") as samples:
        for name, lines in conversations.items():
            trained = report.add(lines)
            if samples is not None:
                rows = [{each.name: getattr(sample, each.name) for each in fields(sample)} for sample in trained]
                samples.writelines(json.dumps({"conversation": name, **row}) + "\n" for row in rows)
    return report.to_dict()


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from a folder or a ``tokenizer.json``."""
    if not path.exists():
        raise OSError(f"--tokenizer {path} does not exist")
    require("transformers")
    import transformers

    try:
        if path.is_dir():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        else:
            from_file: Any = transformers.PreTrainedTokenizerFast
            tokenizer = from_file(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
    # The library raises no narrower class for a broken file.
    except Exception as error:
        raise ValueError(f"--tokenizer {path} cannot be read: {error}") from error
    return cast("Tokenizer", tokenizer)


def _show_report(report: Mapping[str, Any]) -> None:
    """Print verdict, counts and tables of a :class:`~mis_ext.rollout.rollout_log.LogReport`."""
    passed, policy = report["passed"], report["policy"]
    show("PASSED" if passed else "FAILED", "bold green" if passed else "bold red")
    show_grid(_rows(report))
    for title, classes in (
        ("refused", report["refused"]),
        ("turn boundaries", report["boundaries"]),
        ("texts", report["texts"]),
        ("refused by the policy", policy and policy["errors"]),
    ):
        if classes:
            _show_classes(title, classes)


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("because", reason) for reason in report["reasons"]]
    rows += [(name.replace("_", " "), str(report[name])) for name in ("conversations", "calls", "sampled_tokens")]
    policy = report["policy"]
    if policy:
        rows += [
            (f"policy {policy['name']}", f"{policy['samples']} samples"),
            ("trained tokens", str(policy["trained_tokens"])),
            ("dropped tokens", str(policy["dropped_tokens"])),
            ("actions", ", ".join(f"{action} {count}" for action, count in policy["actions"].items() if count) or "-"),
        ]
    return rows


def _show_classes(title: str, classes: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        (
            *(kind, str(found["count"]), f"{found['share']:.1%}", str(found["failing"])),
            "\n".join(_example_lines(found["first"])),
        )
        for kind, found in classes.items()
    ]
    show_table(
        ("class", "count", "share", "failing", "first"),
        rows,
        styles=["red" if found["failing"] else "" for found in classes.values()],
        name=title,
        show_lines=True,
    )


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
