# SPDX-License-Identifier: Apache-2.0
"""The ``mis-ext`` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence

from mis_ext import __version__
from mis_ext.files import printable, to_jsonable
from mis_ext.tools.cli import check_rollouts, configurations, equality, report
from mis_ext.tools.cli.command import Result, require
from mis_ext.validation import did_you_mean

_MAX_MESSAGE = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit code: 0 passed, 1 failed, 2 wrong usage or unreadable input, 130 interrupted, 141 the output pipe was
            closed.
    """
    # torch warns at its import. Nothing here needs NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    parser = argparse.ArgumentParser(
        prog="mis-ext",
        description="Measure and explain the mismatch between inference engine and trainer.",
    )
    parser.add_argument("--version", action="version", version=f"mis_ext {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for add in (
        equality.add_audit,
        report.add_command,
        configurations.add_explain,
        equality.add_diff,
        check_rollouts.add_command,
        configurations.add_listings,
    ):
        add(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in commands.choices:
        known = ", ".join(commands.choices)
        parser.error(f"unknown command {arguments[0]!r}{did_you_mean(arguments[0], commands.choices)}; known: {known}")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands.choices[parsed.command]
        options = [name for action in command._actions for name in action.option_strings]
        said = (f"{each}{did_you_mean(each.partition('=')[0], options)}" for each in unknown)
        command.error(f"unrecognized arguments: {', '.join(said)}")
    try:
        code = _run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout is gone: discard what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, TypeError, MemoryError, RecursionError) as error:
        parser.exit(2, f"{parser.prog} {parsed.command}: {_one_line(error)}\n")
    return code


def _run(parsed: argparse.Namespace) -> int:
    """Run a command, print its result as text or JSON, and return the exit code."""
    if not parsed.json:
        # Check before the work, because the result needs these packages.
        require(*parsed.shown_with, to_show=True)
    result: Result = parsed.run(parsed)
    if parsed.json:
        print(json.dumps(to_jsonable(result.content), allow_nan=False))
    else:
        result.show()
    return result.code


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    elif isinstance(error, (MemoryError, RecursionError)):
        text = f"{'out of memory' if isinstance(error, MemoryError) else 'nested too deeply'} ({error})"
    else:
        text = "; ".join(str(error).splitlines())
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."
