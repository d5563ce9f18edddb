"""The ``mis-ext`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mis_ext.cli import audit, check_rollouts, convert, diff, explain, methods, presets, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0 passed, 1 did not, 2 wrong usage or unreadable input."""
    parser = argparse.ArgumentParser(
        prog="mis-ext", description="Measures and explains the mismatch of inference and training engines."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (audit, report, explain, diff, check_rollouts, presets, methods, convert):
        module.add_command(commands)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (OSError, ValueError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
