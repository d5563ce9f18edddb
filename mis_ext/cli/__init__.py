"""The ``mis-ext`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mis_ext import __version__
from mis_ext.cli import audit, check_rollouts, convert, diff, explain, methods, presets, report
from mis_ext.files import printable

_MAX_MESSAGE = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit code: 0 passed, 1 did not, 2 wrong usage or unreadable input, 130 interrupted, 141 nobody reads on.
    """
    parser = argparse.ArgumentParser(
        prog="mis-ext", description="Measures and explains the mismatch of inference and training engines."
    )
    parser.add_argument("--version", action="version", version=f"mis_ext {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for module in (audit, report, explain, diff, check_rollouts, presets, methods, convert):
        module.add_command(commands)
    parsed = parser.parse_args(arguments)
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whatever is still to be flushed at the end has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, TypeError, MemoryError, RecursionError) as error:
        parser.exit(2, f"{parser.prog} {parsed.command}: {_one_line(error)}\n")
    return code


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    elif isinstance(error, (MemoryError, RecursionError)):
        text = f"{'out of memory' if isinstance(error, MemoryError) else 'nested too deeply'} ({error})"
    else:
        text = str(error)
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."
