"""``mis-ext check-rollouts``: what logged conversations prove about the sampled tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from mis_ext.cli.needed import require
from mis_ext.cli.progress import bytes_bars
from mis_ext.cli.result import Result
from mis_ext.cli.rollout_report import show
from mis_ext.rollout.conversations.policies import Policy

if TYPE_CHECKING:
    from mis_ext.rollout.logs.checks import ConversationCheck
    from mis_ext.rollout.logs.lines import LoggedCall
    from mis_ext.rollout.text import Tokenizer

_FORMAT = (
    'One call per line: {"conversation": ID, "format": NAME, "request": {...}, "response": {...}}. Optional keys: '
    '"request_id", "text" (the text that the agent kept), "choice", "prompt_ids" (vLLM, OpenAI). Formats: '
    "sglang (/generate), sglang-chat, sglang-completions, vllm (/inference/v1/generate), vllm-chat, vllm-completions, "
    "openai-chat, openai-completions. Calls of one conversation are in order, and calls of others may be in between. "
    "Several files are read as one."
)


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext check-rollouts``."""
    parser = subparsers.add_parser(
        "check-rollouts",
        help="do logged conversations prove which tokens were sampled?",
        description=(
            "Reads logged calls of inference servers. Reports, class by class, what was refused, how each turn "
            "continues the earlier turns, and how texts were changed. Exit code: 0 every response was read, every "
            "prompt has the ids that were sampled before it (or is a retry, a fork or a duplicate), and no text was "
            "changed; 1 one of these is not true, or nothing was measured; 2 wrong usage, or a file cannot be opened."
        ),
        epilog=_FORMAT,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines, plain or gzip")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the server's tokenizer: a Hugging Face folder, or its tokenizer.json, which loads faster. With it the "
        "report says why ids differ, and checks texts",
    )
    parser.add_argument(
        "--reasoning",
        nargs=2,
        metavar=("OPENING", "CLOSING"),
        help="the markers of a reasoning block, by default <think> </think>",
    )
    parser.add_argument("--policy", choices=get_args(Policy), help="also report what this policy would train")
    parser.add_argument(
        "--samples", type=Path, metavar="PATH", help="write the samples under the policy here, as JSON lines"
    )
    parser.set_defaults(run=run, shown_with=("rich",))


def run(parsed: argparse.Namespace) -> Result:
    """Check the logs; the exit code is 0 if they passed, else 1."""
    require("msgspec", install="mis_ext[cli]")
    if parsed.samples is not None and parsed.policy is None:
        raise ValueError(f"--samples needs --policy: {' | '.join(get_args(Policy))}")
    if parsed.reasoning is not None and "" in parsed.reasoning:
        raise ValueError("the markers of --reasoning must not be empty")
    samples = parsed.samples
    if samples is not None and samples.exists() and any(samples.samefile(log) for log in parsed.files):
        raise ValueError(f"{samples} is one of the logs: name another file")
    report = _check(parsed, None if parsed.tokenizer is None else load_tokenizer(parsed.tokenizer))
    return Result(report, lambda: show(report), 0 if report["passed"] else 1)


def _check(parsed: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    from mis_ext.rollout.logs.files import RolloutLog
    from mis_ext.rollout.logs.log_report import LogReport

    report = LogReport([str(path) for path in parsed.files], policy=parsed.policy)
    with ExitStack() as stack:
        log = stack.enter_context(RolloutLog(parsed.files))
        samples = None if parsed.samples is None else stack.enter_context(parsed.samples.open("w"))
        bar = stack.enter_context(bytes_bars(size=log.size))
        advance = bar("reading", log.size)
        for num_bytes in log.scan():
            advance(num_bytes)
        for problem in log.problems:
            report.add_problem(problem)
        sizes = {name: sum(place.size for place in places) for name, places in log.places.items()}
        advance = bar("checking", sum(sizes.values()))
        for name, places in log.places.items():
            found = _check_one(parsed, tokenizer, log.calls(places))
            report.add(found)
            if samples is not None:
                samples.writelines(_sample_lines(name, found))
            advance(sizes[name])
    return report.to_dict()


def _check_one(
    parsed: argparse.Namespace, tokenizer: Tokenizer | None, calls: Iterator[LoggedCall]
) -> ConversationCheck:
    from mis_ext.rollout.logs.checks import REASONING, check_conversation

    opening, closing = parsed.reasoning or REASONING
    return check_conversation(
        calls,
        tokenizer=tokenizer,
        policy=parsed.policy,
        reasoning=(opening, closing),
    )


def _sample_lines(conversation: str, found: ConversationCheck) -> Iterator[str]:
    for sample in found.samples:
        values = {field.name: getattr(sample, field.name) for field in fields(sample)}
        yield json.dumps({"conversation": conversation, **values}) + "\n"


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from a folder or a ``tokenizer.json``.

    Raises:
        OSError: It does not exist, or transformers is not installed.
    """
    if not path.exists():
        raise OSError(f"--tokenizer {path} does not exist")
    require("transformers", install="transformers")
    import transformers

    if path.is_dir():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    else:
        from_file: Any = transformers.PreTrainedTokenizerFast
        tokenizer = from_file(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
    return cast("Tokenizer", tokenizer)
