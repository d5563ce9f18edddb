# SPDX-License-Identifier: Apache-2.0
"""Stands for numpy 1 where only numpy 2 is: slime's trainer refuses to start without "1." at the front of its version.

Answers that one question.
"""

import numpy


class Version(str):
    """The true version, but for what it begins with."""

    def startswith(self, prefix, *bounds):  # type: ignore[no-untyped-def]
        """Whether the version begins so, or slime asks for numpy 1."""
        return prefix == "1." or super().startswith(prefix, *bounds)


numpy.__version__ = Version(numpy.__version__)
