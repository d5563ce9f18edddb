# SPDX-License-Identifier: Apache-2.0
"""Decoded JSON of an inference server. Every inconsistency is an error with the request and both values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mis_ext.rollout.generation import (
    LARGEST_ID,
    MINUS_INFINITY,
    AbortedRequest,
    FinishReason,
    LogProbError,
    MalformedResponse,
    NotASample,
    find_illegal_id,
)

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    # vLLM detected a repetition: the generation is complete, but the model did not end it.
    "repetition": "length",
}
# A decoded request or response.
Json = Mapping[str, Any]
_GIVEN_UP = ("abort", "error", "content_filter")


# Not frozen: a response has about thirty fields, and setting frozen attributes takes a third of its reading time.
@dataclass(kw_only=True, slots=True, eq=False)
class Field:
    """A value inside decoded JSON, with its path and its request.

    A value that is absent or null is falsy, and so are all fields under it. Methods with the name of a type return the
    value, which must have that type.

    Attributes:
        value: The value; None if it is absent.
        path: Its path, such as ``response.meta_info``.
        request_id: The request id for errors.
        suffix: For a column of a list of rows, the text after the position in errors, such as ``[1]``.
    """

    value: Any
    path: str
    request_id: str
    suffix: str = ""

    def __bool__(self) -> bool:
        return self.value is not None

    def __getitem__(self, key: str) -> Field:
        """Return the value under ``key``; absent and null are errors."""
        found = self.get(key)
        if not found:
            raise MalformedResponse(self.request_id, f"{found.path} is missing")
        return found

    def get(self, key: str) -> Field:
        """Return the value under ``key``, which may be absent."""
        if self and not isinstance(self.value, Mapping):
            raise self.malformed("an object")
        value = self.value.get(key) if self else None
        return Field(value=value, path=f"{self.path}.{key}", request_id=self.request_id)

    def entry(self, position: int) -> Field:
        """Return the entry at ``position``, which must exist."""
        path = f"{self.path}[{position}]{self.suffix}"
        return Field(value=self.value[position], path=path, request_id=self.request_id)

    def entries(self) -> list[Field]:
        """Return the entries of a list in order; none if it is absent."""
        return [self.entry(position) for position in range(len(self.array()))] if self else []

    def column(self, key: int | str) -> Field:
        """The values at ``key`` of a list of rows: lists of three, or objects, where an absent value is None."""
        if not self:
            return self
        rows = self.array()
        is_object = isinstance(key, str)
        kinds, expected = ((dict,), "an object") if is_object else ((list, tuple), "a list of three")
        # Whole-list operations; a Python loop runs only to find the position.
        if not (set(map(type, rows)) <= {*kinds} and (is_object or set(map(len, rows)) <= {3})):
            for position, row in enumerate(rows):
                if not isinstance(row, kinds) or (not is_object and len(row) != 3):
                    raise self.entry(position).malformed(expected)
        values = [row.get(key) for row in rows] if is_object else [*map(itemgetter(key), rows)]
        suffix = f".{key}" if is_object else f"[{key}]"
        return Field(value=values, path=self.path, request_id=self.request_id, suffix=suffix)

    def array(self) -> list[Any]:  # noqa: D102
        if not isinstance(self.value, (list, tuple)):
            raise self.malformed("a list")
        return self.value if isinstance(self.value, list) else list(self.value)

    def count(self) -> int:  # noqa: D102
        if type(self.value) is not int or self.value < 0:
            raise self.malformed("an integer of 0 or more")
        return self.value

    def string(self) -> str:  # noqa: D102
        if not isinstance(self.value, str):
            raise self.malformed("a string")
        return self.value

    def token_or_text(self) -> int | str:  # noqa: D102
        value: int | str = self.value
        if not isinstance(value, str) and find_illegal_id([value]) is not None:
            raise self.malformed("a token id or a string")
        return value

    def token_ids(self) -> list[int]:  # noqa: D102
        ids = self.array()
        wrong = find_illegal_id(ids)
        if wrong is not None:
            raise self.entry(wrong).malformed(f"a token id, an integer in [0, {LARGEST_ID}]")
        return ids

    def prompt_ids(self) -> list[int]:
        """The ids of one prompt. Only the first is checked here; later readers check the rest."""
        ids = self.array()
        if ids and type(ids[0]) is not int:
            raise self.malformed("the token ids of one prompt")
        return ids

    def log_probs(self) -> list[float]:
        """Log-probs, finite and at most 0."""
        values = self.array()
        # Whole-list operations, as in ``column``; a sum with NaN or an infinity is not finite.
        is_plain = set(map(type, values)) == {float} and math.isfinite(sum(values))
        if is_plain and max(values) <= 0 and min(values) > MINUS_INFINITY:
            return values
        for position, value in enumerate(values):
            # The comparisons are false for NaN.
            if type(value) not in (float, int) or not MINUS_INFINITY < value <= 0:
                stand_in = ", the placeholder for minus infinity" if value == MINUS_INFINITY else ""
                legal = f"must be a log-prob, finite and at most 0, got {reprlib.repr(value)}{stand_in}"
                found = "is missing" if value is None else legal
                raise LogProbError(self.request_id, f"{self.entry(position).path} {found}")
        return list(map(float, values))

    def finish_reason(self) -> FinishReason:
        """A finish reason of a complete generation."""
        reason = self.string()
        if reason in _GIVEN_UP:
            raise AbortedRequest(self.request_id, f"{self.path} is {reason!r}")
        if reason not in _FINISH_REASONS:
            raise self.malformed(" | ".join(_FINISH_REASONS))
        return _FINISH_REASONS[reason]

    def malformed(self, expected: str) -> MalformedResponse:
        """The error with the expected and the found value."""
        return MalformedResponse(self.request_id, f"{self.path} must be {expected}, got {reprlib.repr(self.value)}")


def open_exchange(request: Any, response: Any, *, request_id: str | None) -> tuple[Field, Field]:
    """Request and response as fields, with ``request_id`` or, if it is None, the id that they contain."""
    name = request_id or _find_id(request, response)
    asked = Field(value=request, path="request", request_id=name)
    answer = Field(value=response, path="response", request_id=name)
    if isinstance(response, list):
        advice = "read each of its entries, with the request of its own prompt"
        raise MalformedResponse(name, f"response is a list of {len(response)} responses: {advice}")
    for field in (asked, answer):
        if not isinstance(field.value, Mapping):
            raise field.malformed("an object")
    error = answer if response.get("object") == "error" else answer.get("error")
    if error:
        raise AbortedRequest(name, f"the server returned an error: {str(error.value)[:500]}")
    # The best of several is more likely than a sample, and its log-probs do not show by how much.
    for parameters in (asked, asked.get("sampling_params")):
        if not isinstance(parameters.value, Mapping):
            continue
        harmless: dict[str, list[Any]] = {
            "use_beam_search": [False],
            "beam_width": [1],
            # All samples are returned.
            "best_of": [1, parameters.value.get("n")],
            # vLLM returns these instead of a sample.
            "trace_decode_token_ids": [[]],
        }
        for key, values in harmless.items():
            found = parameters.get(key)
            if found and found.value not in values:
                problem = f"{found.path} is {reprlib.repr(found.value)}, so the response is not a sample of the policy"
                raise NotASample(name, f"{problem}: remove this parameter")
    return asked, answer


def _find_id(request: Any, response: Any) -> str:
    meta = response.get("meta_info") if isinstance(response, Mapping) else None
    names = (meta, "id"), (response, "id"), (response, "request_id"), (request, "rid"), (request, "request_id")
    for holder, key in names:
        name = holder.get(key) if isinstance(holder, Mapping) else None
        if isinstance(name, str) and name:
            return name
    return "unnamed"
