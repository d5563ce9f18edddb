"""Asks the inference server, through the host's own client where there is one, else with the standard library."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

HOSTS = ("slime", "miles")
"""Frameworks whose ``<host>.utils.http_utils.post`` is used for their samples."""

# A request waits in the server's queue and then for its last token; a connection that says nothing longer is dead.
_TIMEOUT_SECONDS = 3600.0
_SECONDS_BETWEEN_ATTEMPTS = 1.0
_BODY_CHARACTERS = 500

# The server is one of ours: a proxy of the environment is for elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def post_json(
    url: str, payload: Mapping[str, Any], *, host: str | None, max_attempts: int, headers: Mapping[str, str]
) -> dict[str, Any]:
    """The server's answer to a request, as decoded JSON.

    Without a host each request waits in a thread of asyncio's default executor, so a handful run at a time.

    Args:
        url: Where to send it.
        payload: Body of the request.
        host: The framework whose client sends it, one of :data:`HOSTS`, or None.
        max_attempts: How often to try while the server cannot be reached or has an error of its own, at least 1. What
            the server refuses (HTTP 4xx) is not tried again, except by a host's client, which knows no difference.
        headers: Sent along.

    Raises:
        ConnectionError: No answer; the message has the URL, the attempts and what the server last said.
    """
    if host is not None:
        client = importlib.import_module(f"{host}.utils.http_utils")
        # Not every version takes headers.
        options: dict[str, Any] = {"headers": dict(headers)} if headers else {}
        try:
            answer = await client.post(url, payload, max_retries=max_attempts, **options)
        except Exception as error:
            raise ConnectionError(f"{url}: no answer after {max_attempts} attempts: {error}") from error
        return _mapping(url, answer)
    body = json.dumps(payload).encode()
    for attempt in range(1, max_attempts + 1):
        try:
            answer = await asyncio.to_thread(_post, url, body, headers)
            break
        except urllib.error.HTTPError as error:
            # Read here: the connection is closed with the error.
            failure = f"HTTP {error.code}: {error.read().decode(errors='replace')[:_BODY_CHARACTERS]}"
            error.close()
            if error.code < 500:
                raise ConnectionError(f"{url} refused the request: {failure}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            failure = str(error) or type(error).__name__
        if attempt < max_attempts:
            await asyncio.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    else:
        raise ConnectionError(f"{url}: no answer after {max_attempts} attempts: {failure}")
    return _mapping(url, answer)


def host_of(sample: object) -> str | None:
    """The framework that defines the class of a sample, or one of its base classes; None for anybody else's."""
    roots = (cls.__module__.partition(".")[0] for cls in type(sample).__mro__)
    return next((root for root in roots if root in HOSTS), None)


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **headers})
    with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return json.loads(answer.read())


def _mapping(url: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise ConnectionError(f"{url}: the answer is no JSON object: {str(answer)[:_BODY_CHARACTERS]!r}")
    return cast(dict[str, Any], answer)
