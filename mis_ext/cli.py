# SPDX-License-Identifier: Apache-2.0
"""The ``mis-ext`` command: where the console script finds it."""

from mis_ext.tools.cli import main

__all__ = ["main"]
