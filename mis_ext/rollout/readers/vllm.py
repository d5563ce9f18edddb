"""Responses of vLLM: ``/inference/v1/generate``, and its OpenAI-style chat and completions with token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mis_ext.rollout.generation import Generation
from mis_ext.rollout.readers.cross_checks import (
    Choice,
    given_ids,
    open_choice,
    sent_ids,
    settle,
    with_kept_ids,
    with_versions,
)
from mis_ext.rollout.readers.json_fields import Field

# Shorter than an int that Python refuses to parse; the range is checked with every other id's.
_TOKEN_ID = re.compile(r"token_id:(0|[1-9][0-9]{0,18})")


def read_vllm_generate(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    """What ``/inference/v1/generate`` of vLLM sampled for one choice, from a server with ``--enable-scale-out``.

    The request needs ``logprobs`` in its ``sampling_params``. With ``--return-sampling-mask`` the generation has the
    ids that each token was drawn from.

    Args:
        request: The request as it was sent, decoded.
        response: The response as it came, decoded.
        choice: The position of the choice; None: the only one.
        request_id: Names the request in errors and samples; None: the server's name for it.

    Raises:
        RolloutError: The response proves no sample; the subclass says why.
    """
    found = open_choice(request, response, api="generate", choice=choice, request_id=request_id)
    ids = found.tokens
    # Its text mode has texts beside the log-probs, and no ids.
    has_ids = any(value is not None for value in ids.value)
    prompt_places = [sent_ids(found.asked, "token_ids"), found.answer.get("prompt_token_ids")]
    return with_kept_ids(_read_choice(found, prompt_places, ids if has_ids else None), found.body.get("sampling_mask"))


def read_vllm_chat(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    prompt_ids: Sequence[int] | None = None,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    """What ``/v1/chat/completions`` of vLLM sampled for one choice.

    The request needs ``logprobs: true`` and ``return_token_ids: true``. Before vLLM had that, it needs
    ``return_tokens_as_token_ids: true``, and the caller ``prompt_ids``, for instance from ``/tokenize``. With
    ``return_weight_versions: true`` it has the versions of the weights.

    Args:
        request: The request as it was sent, decoded.
        response: The response as it came, decoded.
        prompt_ids: The prompt's ids, where the response has none.
        choice: The position of the choice; None: the only one.
        request_id: Names the request in errors and samples; None: the server's name for it.

    Raises:
        RolloutError: The response proves no sample; the subclass says why.
    """
    found = open_choice(request, response, api="chat", choice=choice, request_id=request_id)
    prompt_places = [given_ids(found, prompt_ids), found.answer.get("prompt_token_ids")]
    return _read_choice(found, prompt_places, _ids_in_tokens(found.tokens))


def read_vllm_completions(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    prompt_ids: Sequence[int] | None = None,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    """What ``/v1/completions`` of vLLM sampled for one choice.

    The request needs ``logprobs`` and ``return_token_ids: true``. Before vLLM had that, it needs
    ``return_tokens_as_token_ids: true``, and the prompt as ids or the caller ``prompt_ids``. With
    ``return_weight_versions: true`` it has the versions of the weights. Arguments and errors are those of
    :func:`read_vllm_chat`.
    """
    found = open_choice(request, response, api="completions", choice=choice, request_id=request_id)
    places = [given_ids(found, prompt_ids), sent_ids(found.asked, "prompt"), found.body.get("prompt_token_ids")]
    return _read_choice(found, places, _ids_in_tokens(found.tokens))


def _read_choice(found: Choice, prompt_places: list[Field | None], scored_ids: Field | None) -> Generation:
    generation = settle(
        found.body.request_id,
        sampled_ids=[found.body.get("token_ids"), scored_ids],
        sampled_counts=[],
        log_probs=[found.log_probs],
        prompt_ids=prompt_places,
        prompt_counts=[found.prompt_count],
        finish_reason=found.finish_reason,
        # What it says of a model that repeats itself is no stop string.
        stop_matches=[None if found.body["finish_reason"].value == "repetition" else found.body.get("stop_reason")],
        text=found.text,
        ids_advice="ask for them with return_token_ids: true or return_tokens_as_token_ids: true",
        prompt_advice="ask for them with return_token_ids: true, or give prompt_ids=",
    )
    return with_versions(generation, found.body.get("weight_versions"), None)


def _ids_in_tokens(tokens: Field) -> Field | None:
    """The ids of ``token_id:<int>`` tokens; None where the tokens are text."""
    matches = [_TOKEN_ID.fullmatch(token) for token in tokens.strings()]
    if matches and not any(matches):
        return None
    for position, match in enumerate(matches):
        if match is None:
            raise tokens.entry(position).malformed("token_id:<int> like other tokens of this response")
    return replace(tokens, value=[int(match[1]) for match in matches if match is not None])
