"""What is taken from the framework that runs: its client, its tokenizer, its flag of an abort; else our own."""

from __future__ import annotations

import asyncio
import functools
import http.client
import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from mis_ext.rollout.generation import Tokenizer

HOSTS = ("slime", "miles")
"""Frameworks whose ``<host>.utils.http_utils.post`` is used for their samples."""
# A request waits in the server's queue and then for its last token; a connection that says nothing longer is dead.
_TIMEOUT_SECONDS = 3600.0
_SECONDS_BETWEEN_ATTEMPTS = 1.0
_BODY_CHARACTERS = 500
# The server is one of ours: a proxy of the environment is for elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ChatTokenizer(Tokenizer, Protocol):
    """A Hugging Face tokenizer with a chat template."""

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """The conversation as the template renders it."""
        ...


def host_name(sample: object) -> str | None:
    """The framework that defines the class of a sample, or one of its base classes; None for anybody else's."""
    roots = (cls.__module__.partition(".")[0] for cls in type(sample).__mro__)
    return next((root for root in roots if root in HOSTS), None)


@functools.cache
def load_tokenizer(checkpoint: str, chat_template_path: str | None, host: str | None) -> ChatTokenizer:
    """The tokenizer of a checkpoint, by the host's own loader, which may repair it; kept for the next call.

    Args:
        checkpoint: Directory or name, the hosts' ``hf_checkpoint``.
        chat_template_path: File with a chat template in place of the checkpoint's, Miles' flag of that name.
        host: The framework whose ``<host>.utils.processing_utils.load_tokenizer`` is used; None: transformers'.
    """
    if host is not None:
        load = importlib.import_module(f"{host}.utils.processing_utils").load_tokenizer
        options = {} if chat_template_path is None else {"chat_template_path": chat_template_path}
        return cast(ChatTokenizer, load(checkpoint, trust_remote_code=True, **options))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    if chat_template_path is not None:
        tokenizer.chat_template = Path(chat_template_path).read_text()
    return cast(ChatTokenizer, tokenizer)


def abort_flag(args: Any, sample: object, state: Any | None) -> Callable[[], bool]:
    """A function that says whether the host has aborted its rollout; always False where no host runs.

    The host aborts the requests of that moment, once. An episode that was with its environment then has none, and only
    the flag tells it.

    Args:
        args: The host's.
        sample: Its class tells the host.
        state: What newer versions of Miles hand over. None: the host's one ``GenerateState``, if its rollout is loaded.
    """
    if state is None:
        rollout = sys.modules.get(f"{host_name(sample)}.rollout.sglang_rollout")
        if rollout is None:
            return lambda: False
        # The one that exists: its class makes no second one.
        state = rollout.GenerateState(args)
    return lambda: bool(state.aborted)


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
    else:
        answer = await _post_from_thread(url, json.dumps(payload).encode(), max_attempts=max_attempts, headers=headers)
    if not isinstance(answer, dict):
        raise ConnectionError(f"{url}: the answer is no JSON object: {str(answer)[:_BODY_CHARACTERS]!r}")
    return cast(dict[str, Any], answer)


async def _post_from_thread(url: str, body: bytes, *, max_attempts: int, headers: Mapping[str, str]) -> Any:
    for attempt in range(1, max_attempts + 1):
        try:
            return await asyncio.to_thread(_post, url, body, headers)
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
    raise ConnectionError(f"{url}: no answer after {max_attempts} attempts: {failure}")


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **headers})
    with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return json.loads(answer.read())
