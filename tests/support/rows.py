# SPDX-License-Identifier: Apache-2.0
"""One test of many rows."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def for_each(names: str, rows: Iterable[Any]) -> Callable[[Callable], Callable]:
    """``pytest.mark.parametrize`` as one test, for many rows that are each faster than pytest's overhead per test.

    All rows are tested. The test fails with the first error, and prints the failed rows. All rows share fixture values,
    so do not use it for a test that changes one. A row must not be skipped.
    """
    keys, listed = [name.strip() for name in names.split(",")], [*rows]
    assert listed, f"no row of {names}"
    assert not any(hasattr(row, "marks") for row in listed), f"pytest.param has no meaning in rows of {names}"

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def test_all(**given: Any) -> None:
            failed: list[tuple[dict[str, Any], Exception]] = []
            for row in listed:
                of_row = dict(zip(keys, row if len(keys) > 1 else [row], strict=True))
                try:
                    test(**given, **of_row)
                except pytest.skip.Exception as error:
                    raise AssertionError(f"{test.__name__} skips a row, and with it all others: {of_row}") from error
                except Exception as error:
                    failed.append((of_row, error))
            if failed:
                print(
                    f"{test.__name__}: {len(failed)} of {len(listed)} rows failed:",
                    *(row for row, _ in failed),
                    sep="\n",
                )
                raise failed[0][1]

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in keys]
        test_all.__signature__ = signature.replace(parameters=left)
        return test_all

    return decorate
