# SPDX-License-Identifier: Apache-2.0
"""The endpoint that samples for a framework: its request, its response, and the client that sends and receives them.

slime and Miles use SGLang's ``/generate``, vime uses ``/inference/v1/generate`` of vLLM. The samples of all frameworks
read a ``meta_info`` with SGLang's names; this module creates it for vLLM.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, cast

from mis_ext.frameworks import Framework, find_framework
from mis_ext.rollout.readers.servers import read_sglang_generate, read_vllm_generate

_Json = dict[str, Any]
# vLLM's names of the frameworks' sampling parameters, if they differ.
_VLLM_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
}
# If a model repeats itself, it has not ended its turn.
_ENDINGS = {"abort": "abort", "length": "length", "repetition": "length"}


class Endpoint:
    """An endpoint behind a router.

    Attributes:
        server: The engine, which is the prefix of the arguments with the router's address.
        path: The path of the endpoint.
        session_header: The header that makes the router keep a conversation on one engine.
    """

    server: str
    path: str
    session_header: str

    def url(self, args: Any) -> str:
        """Address at which the router accepts requests."""
        return f"{self.router(args)}{self.path}"

    def router(self, args: Any) -> str:
        """The address of the router."""
        host, port = (getattr(args, f"{self.server}_router_{part}") for part in ("ip", "port"))
        return f"http://{host}:{port}"


class Sglang(Endpoint):
    """The endpoint of slime and Miles."""

    server, path, session_header = "sglang", "/generate", "X-SMG-Routing-Key"
    read = staticmethod(read_sglang_generate)

    def request(self, _model: str, ids: list[int], params: Mapping[str, Any], num_rows: int | None) -> _Json:
        """The request that continues a prompt's ids, with ``num_rows`` known rows of experts; None: without experts."""
        request = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        if num_rows is not None:
            request |= {"return_routed_experts": True, "routed_experts_start_len": num_rows}
        return request

    def meta_info(self, response: _Json) -> Mapping[str, Any]:
        """The metadata of a response."""
        return response.get("meta_info") or {}

    def finished(self, request: _Json, response: _Json, length: int) -> _Json:
        """The response of an aborted request, changed as if it had reached its token limit after ``length`` tokens."""
        # A request that was aborted while it waited after a retraction has no prompt_tokens.
        ending = {"finish_reason": {"type": "length", "length": length}}
        return {
            **response,
            "meta_info": {"prompt_tokens": len(request["input_ids"]), **response["meta_info"], **ending},
        }


class Vllm(Endpoint):
    """The endpoint of vime."""

    server, path, session_header = "vllm", "/inference/v1/generate", "x-session-id"
    read = staticmethod(read_vllm_generate)

    def request(self, model: str, ids: list[int], params: Mapping[str, Any], num_rows: int | None) -> _Json:
        """As for SGLang; the start of the rows of experts is in the parameters."""
        parameters = vllm_parameters(params)
        # Servers without this parameter send all rows.
        if num_rows:
            parameters["routed_experts_prompt_start"] = num_rows
        return {"model": model, "token_ids": ids, "sampling_params": parameters}

    def meta_info(self, response: _Json) -> Mapping[str, Any]:
        """The metadata of a response, with SGLang's names."""
        choice, usage = (response.get("choices") or [{}])[0], response.get("usage") or {}
        reason, ids = choice.get("finish_reason"), choice.get("token_ids") or ()
        rows = (choice.get("logprobs") or {}).get("content") or ()
        spans = choice.get("weight_versions")
        meta = {
            "finish_reason": {"type": _ENDINGS.get(reason, "stop")},
            "prompt_tokens": usage.get("prompt_tokens", 0),
            "completion_tokens": usage.get("completion_tokens", 0),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            "output_token_logprobs": [[row.get("logprob"), token] for row, token in zip(rows, ids, strict=False)],
            "routed_experts": choice.get("routed_experts"),
            "weight_versions": spans,
            "weight_version": spans[-1]["version"] if spans else response.get("weight_version"),
        }
        if kept := choice.get("sampling_mask"):
            meta["top_p_token_ids"] = [token for row in kept for token in row]
            meta["top_p_token_offsets"] = [*accumulate(map(len, kept), initial=0)]
        return {name: value for name, value in meta.items() if value is not None}

    def finished(self, _request: _Json, response: _Json, _length: int) -> _Json:
        """As for SGLang."""
        return {**response, "choices": [{**choice, "finish_reason": "length"} for choice in response["choices"]]}


def vllm_parameters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The frameworks' sampling parameters for vLLM. Settings of stop strings are kept only if there is one."""
    given = {_VLLM_NAMES.get(name, name): value for name, value in params.items() if value is not None}
    if not given.get("stop"):
        for name in ("stop", "include_stop_str_in_output"):
            given.pop(name, None)
    return {**given, "logprobs": 1}


SGLANG, VLLM = Sglang(), Vllm()


def endpoint_of(sample: object) -> Sglang | Vllm:
    """The endpoint for the samples of a framework; SGLang's without a framework."""
    framework = find_framework(sample)
    return VLLM if framework is not None and framework.engine == "vllm" else SGLANG


def was_aborted(meta_info: Mapping[str, Any]) -> bool:
    """True if a running or waiting request was aborted. A server error is not an abort."""
    reason = meta_info.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type") == "abort"


# A request waits in the server's queue and then for its last token. A connection that is silent for longer is dead.
_TIMEOUT_SECONDS = 3600.0
# Requests for server information return immediately.
_GET_TIMEOUT_SECONDS = 30.0
_SECONDS_BETWEEN_ATTEMPTS = 1.0
_BODY_CHARACTERS = 500
# The server is part of the run, so ignore proxies of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def post_json(
    url: str, payload: Mapping[str, Any], *, framework: Framework | None, max_attempts: int, headers: Mapping[str, str]
) -> dict[str, Any]:
    """The server's response as decoded JSON, by the client of a framework, or without one by our own client.

    With our own client, each request waits in a thread of asyncio's default executor, so only a few run at a time. It
    makes up to ``max_attempts`` attempts if the server cannot be reached or has an internal error. It does not repeat a
    request that the server refuses (HTTP 4xx); the frameworks' clients do.

    Raises:
        ConnectionError: The server does not respond. The message has the URL, the attempts and the last error.
    """
    if framework is None:
        return await ask_json(url, payload, max_attempts=max_attempts, headers=headers)
    client = importlib.import_module(f"{framework.name}.utils.http_utils")
    # Not every version accepts headers.
    options: dict[str, Any] = {"headers": dict(headers)} if headers else {}
    try:
        answer = await client.post(url, payload, max_retries=max_attempts, **options)
    except Exception as error:
        raise ConnectionError(f"{url}: no response after {max_attempts} attempts: {error}") from error
    return _json_object(url, answer)


def _json_object(url: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise ConnectionError(f"{url}: the response is not a JSON object: {str(answer)[:_BODY_CHARACTERS]!r}")
    return cast(dict[str, Any], answer)


async def ask_json(
    url: str, payload: Mapping[str, Any] | None = None, *, max_attempts: int, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Send JSON like :func:`post_json`, without a framework. Without a payload it sends a GET."""
    body, timeout = None, _GET_TIMEOUT_SECONDS
    if payload is not None:
        body, timeout = json.dumps(payload).encode(), _TIMEOUT_SECONDS
    for attempt in range(1, max_attempts + 1):
        try:
            answer = await asyncio.to_thread(_ask, url, body, headers or {}, timeout)
        except urllib.error.HTTPError as error:
            # Read it here, because the connection is closed with the error.
            failure = f"HTTP {error.code}: {error.read().decode(errors='replace')[:_BODY_CHARACTERS]}"
            error.close()
            if error.code < 500:
                raise ConnectionError(f"{url} refused the request: {failure}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            failure = str(error) or type(error).__name__
        else:
            return _json_object(url, answer)
        if attempt < max_attempts:
            await asyncio.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    raise ConnectionError(f"{url}: no response after {max_attempts} attempts: {failure}")


def _ask(url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **headers})
    with _OPENER.open(request, timeout=timeout) as answer:
        return json.loads(answer.read())
