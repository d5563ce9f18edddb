"""One test of many rows."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(names: str, rows: Iterable[Any]) -> Callable[[Callable], Callable]:
    """``pytest.mark.parametrize`` as one test, where rows are many, each quicker than what pytest does for a test.

    The row that fails is printed; what fixtures give is the same for all.
    """
    keys, listed = [name.strip() for name in names.split(",")], [*rows]
    assert listed, f"no row of {names}"

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def test_all(**given: Any) -> None:
            for row in listed:
                of_row = dict(zip(keys, row if len(keys) > 1 else [row], strict=True))
                try:
                    test(**given, **of_row)
                except BaseException:
                    print(f"{test.__name__}: {of_row}")
                    raise

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in keys]
        test_all.__signature__ = signature.replace(parameters=left)
        return test_all

    return decorate
