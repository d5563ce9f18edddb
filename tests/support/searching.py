# SPDX-License-Identifier: Apache-2.0
"""How many examples a property draws."""

from hypothesis import HealthCheck, settings


def searching(percent: int) -> settings:
    """Other examples in every run: a part of what the profile draws, 100 in the test command and 200 in CI.

    A failure prints its example, and pytest at its end the seed that draws it again (``conftest.py``).
    """
    return settings(
        max_examples=settings.default.max_examples * percent // 100,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
