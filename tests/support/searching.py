# SPDX-License-Identifier: Apache-2.0
"""The number of examples of a property."""

from hypothesis import HealthCheck, settings


def searching(percent: int) -> settings:
    """Different examples in every run: a part of the profile's number, 100 in the test command and 200 in CI.

    A failure prints its example, and pytest at its end the seed that draws it again (``conftest.py``).
    """
    return settings(
        max_examples=settings.default.max_examples * percent // 100,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
