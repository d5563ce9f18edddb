# SPDX-License-Identifier: Apache-2.0
"""Methods are drawn here with bounds that no one would train with, and of which a gate or weight rightly warns."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of this folder build them; whoever asks for a warning still gets it."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for message in ("a g", "the bounds"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))
