"""Responses of SGLang: ``/generate``, and its OpenAI-style chat and completions with token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mis_ext.rollout.errors import AbortedRequest, LogProbError
from mis_ext.rollout.generation import Generation
from mis_ext.rollout.readers.cross_checks import (
    Choice,
    agree,
    check_same,
    open_choice,
    sent_ids,
    settle,
    with_kept_ids,
    with_versions,
)
from mis_ext.rollout.readers.json_fields import Field, open_exchange

_ADVICE = "ask for them with return_token_ids: true, or in a stream of chat with return_{}_ids_in_sglext: true"


def read_sglang_generate(
    request: Mapping[str, Any], response: Mapping[str, Any], *, request_id: str | None = None
) -> Generation:
    """What ``/generate`` sampled for one prompt.

    The request needs ``return_logprob: true``, and the prompt as ``input_ids``; with ``text`` instead it also needs
    ``return_prompt_token_ids: true`` or ``logprob_start_len: 0``. A list of responses, for several prompts or for
    ``n`` above 1, is read entry by entry, each with the request of its own prompt.

    Args:
        request: The request as it was sent, decoded.
        response: The response as it came, decoded.
        request_id: Names the request in errors and samples; None: the server's name for it.

    Raises:
        RolloutError: The response proves no sample; the subclass says why.
    """
    asked, answer = open_exchange(request, response, request_id=request_id)
    meta = answer["meta_info"]
    ending, text = meta["finish_reason"], answer.get("text")
    # Before anything else: what was given up may lack the rest.
    finish_reason = ending["type"].finish_reason()
    _check_not_replaced(ending.get("matched"))
    _check_request_id(asked, meta)
    scored = _scored_tokens(meta)
    generation = settle(
        answer.request_id,
        # SGLang 0.4 has them only where it runs without its tokenizer.
        sampled_ids=[answer.get("output_ids"), scored.column(1)],
        sampled_counts=[meta["completion_tokens"], ending.get("length")],
        log_probs=[scored.column(0)],
        prompt_ids=[asked.get("input_ids"), answer.get("prompt_token_ids"), _scored_prompt(meta)],
        prompt_counts=[meta["prompt_tokens"]],
        finish_reason=finish_reason,
        stop_matches=[ending.get("matched")],
        text=None if text is None else text.string(),
        ids_advice="ask for them with return_logprob: true",
        prompt_advice="send the prompt as input_ids, or ask with return_prompt_token_ids: true",
    )
    generation = with_kept_ids(generation, meta.get("output_token_sampling_mask"))
    return with_versions(generation, meta.get("weight_versions"), meta.get("weight_version"))


def read_sglang_chat(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    """What ``/v1/chat/completions`` sampled for one choice.

    The request needs ``logprobs: true`` and, for the ids of prompt and response, ``return_token_ids: true``. Instead,
    ``return_meta_info: true`` has those of the response, and ``return_prompt_token_ids: true`` or a prompt sent as
    ``input_ids`` those of the prompt. A stream has them only with ``return_input_ids_in_sglext: true`` and
    ``return_output_ids_in_sglext: true``.

    Args:
        request: The request as it was sent, decoded.
        response: The response as it came, decoded.
        choice: The position of the choice; None: the only one.
        request_id: Names the request in errors and samples; None: the server's name for it.

    Raises:
        RolloutError: The response proves no sample; the subclass says why.
    """
    found = open_choice(request, response, api="chat", choice=choice, request_id=request_id)
    return _read_choice(found, sampled_ids="response_token_ids", sent_as="input_ids")


def read_sglang_completions(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    choice: int | None = None,
    request_id: str | None = None,
) -> Generation:
    """What ``/v1/completions`` sampled for one choice; the request needs ``logprobs`` and ``return_token_ids: true``.

    Arguments and errors are those of :func:`read_sglang_chat`.
    """
    found = open_choice(request, response, api="completions", choice=choice, request_id=request_id)
    return _read_choice(found, sampled_ids="token_ids", sent_as="prompt")


def _read_choice(found: Choice, *, sampled_ids: str, sent_as: str) -> Generation:
    body = found.body
    _check_not_replaced(body.get("matched_stop"))
    meta = body.get("meta_info")
    ending = scored = None
    if meta is not None:
        ending, scored = meta["finish_reason"], _scored_tokens(meta)
        check_same(body["finish_reason"], ending["type"])
        agree([found.tokens, scored.column(2)], Field.strings)
    # In a stream, the sampled ids of all choices stand beside the choices.
    extension = found.answer.get("sglext")
    listed = extension and extension.get("output_ids")
    if listed is not None and found.position >= len(listed.array()):
        raise listed.malformed("a list of ids for each choice")
    generation = settle(
        body.request_id,
        sampled_ids=[body.get(sampled_ids), scored and scored.column(1), listed and listed.entry(found.position)],
        sampled_counts=[meta and meta["completion_tokens"], ending and ending.get("length")],
        log_probs=[found.log_probs, scored and scored.column(0)],
        prompt_ids=[
            sent_ids(found.asked, sent_as),
            body.get("prompt_token_ids"),
            extension and extension.get("input_ids"),
        ],
        prompt_counts=[found.prompt_count, meta and meta["prompt_tokens"]],
        finish_reason=found.finish_reason,
        stop_matches=[body.get("matched_stop"), ending and ending.get("matched")],
        text=found.text,
        ids_advice=_ADVICE.format("output"),
        prompt_advice=_ADVICE.format("input"),
    )
    # The response's own versions are those of its first choice.
    first = found.answer.get("metadata") if found.position == 0 else None
    if first is not None and meta is not None:
        for key in ("weight_version", "weight_versions"):
            if (one := first.get(key)) is not None and (other := meta.get(key)) is not None:
                check_same(one, other)
    holder = meta or first
    if holder is None:
        return generation
    generation = with_kept_ids(generation, meta and meta.get("output_token_sampling_mask"))
    return with_versions(generation, holder.get("weight_versions"), holder.get("weight_version"))


def _scored_tokens(meta: Field) -> Field:
    scored = meta.get("output_token_logprobs")
    if scored is None:
        where = f"{meta.path}.output_token_logprobs"
        raise LogProbError(meta.request_id, f"{where} are missing: ask for them with return_logprob: true")
    return scored


def _scored_prompt(meta: Field) -> Field | None:
    """The prompt's ids where the log-probs of all of it came back; with none or some of them it is None."""
    scored = meta.get("input_token_logprobs")
    whole = scored is not None and len(scored.array()) == meta["prompt_tokens"].count()
    return scored.column(1) if scored is not None and whole else None


def _check_request_id(asked: Field, meta: Field) -> None:
    """The server gives the samples of ``n`` above 1 names of its own, and several prompts several names."""
    name, parameters = asked.get("rid"), asked.get("sampling_params")
    several = parameters is not None and isinstance(parameters.value, Mapping) and parameters.value.get("n", 1) != 1
    if name is not None and isinstance(name.value, str) and not several:
        check_same(name, meta["id"])


def _check_not_replaced(match: Field | None) -> None:
    """SGLang takes an id outside the vocabulary for NaN, and writes an end token in the sampled one's place."""
    if match is not None and match.value == "NaN happened":
        raise AbortedRequest(match.request_id, f"{match.path} is {match.value!r}: the last id was never sampled")
