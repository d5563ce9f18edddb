# SPDX-License-Identifier: Apache-2.0
"""The readers: one response of SGLang or of vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from mis_ext.rollout.generation import AbortedRequest, Generation, LogProbError
from mis_ext.rollout.readers.cross_checks import Choice, Places, check_same, settle
from mis_ext.rollout.readers.json_fields import Field, Json, open_exchange

_SGLANG_ADVICE = "request them with return_token_ids: true, or in a chat stream with return_{}_ids_in_sglext: true"


def read_sglang_generate(request: Json, response: Json, *, request_id: str | None = None) -> Generation:
    """Read the response of ``/generate`` to one prompt.

    The request needs ``return_logprob: true``, and the prompt as ``input_ids``; with ``text`` instead it also needs
    ``return_prompt_token_ids: true`` or ``logprob_start_len: 0``. Read a list of responses (several prompts, or ``n``
    above 1) entry by entry, each with the request of its own prompt.

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
    # Check this first, because an aborted response may lack other fields.
    finish_reason = ending["type"].finish_reason()
    _check_not_replaced(ending.get("matched"))
    # With ``n`` above 1 the server creates the ids of samples, and several prompts have several ids.
    name, parameters = asked.get("rid"), asked.get("sampling_params").value
    several = isinstance(parameters, Mapping) and parameters.get("n", 1) != 1
    if isinstance(name.value, str) and not several:
        check_same(name, meta["id"])
    scored = _scored_by_sglang(meta)
    # The log-probs of the prompt contain its ids if they cover the whole prompt.
    prompt = meta.get("input_token_logprobs")
    whole = prompt and len(prompt.array()) == meta["prompt_tokens"].count()
    return settle(
        answer.request_id,
        # SGLang 0.4 returns them only without its tokenizer.
        sampled_ids=[answer.get("output_ids"), scored.column(1)],
        sampled_counts=[meta["completion_tokens"], ending.get("length")],
        log_probs=[scored.column(0)],
        prompt_ids=[
            asked.get("input_ids"),
            answer.get("prompt_token_ids"),
            prompt.column(1) if whole else None,
        ],
        prompt_counts=[meta["prompt_tokens"]],
        finish_reason=finish_reason,
        stop_matches=[ending.get("matched")],
        text=text.string() if text else None,
        ids_advice="ask for them with return_logprob: true",
        prompt_advice="send the prompt as input_ids, or ask with return_prompt_token_ids: true",
        kept_ids=meta.get("output_token_sampling_mask"),
        versions=meta.get("weight_versions"),
        last_version=meta.get("weight_version"),
    )


def read_sglang_chat(
    request: Json, response: Json, *, choice: int | None = None, request_id: str | None = None
) -> Generation:
    """Read one choice of ``/v1/chat/completions``.

    The request needs ``logprobs: true`` and, for the ids of prompt and response, ``return_token_ids: true``.
    Alternatively, ``return_meta_info: true`` returns the ids of the response, and ``return_prompt_token_ids: true`` or
    a prompt sent as ``input_ids`` gives those of the prompt. A stream has them only with
    ``return_input_ids_in_sglext: true`` and ``return_output_ids_in_sglext: true``.

    Args:
        request: The request as it was sent, decoded.
        response: The response as it came, decoded.
        choice: The position of the choice; None: the only one.
        request_id: Names the request in errors and samples; None: the server's name for it.

    Raises:
        RolloutError: The response proves no sample; the subclass says why.
    """
    found = Choice(request, response, api="chat", choice=choice, request_id=request_id)
    return _read_sglang(found, sampled_ids="response_token_ids", sent_as="input_ids")


def read_sglang_completions(
    request: Json, response: Json, *, choice: int | None = None, request_id: str | None = None
) -> Generation:
    """Read one choice of ``/v1/completions``; the request needs ``logprobs`` and ``return_token_ids: true``.

    Arguments and errors are those of :func:`read_sglang_chat`.
    """
    found = Choice(request, response, api="completions", choice=choice, request_id=request_id)
    return _read_sglang(found, sampled_ids="token_ids", sent_as="prompt")


def _read_sglang(found: Choice, *, sampled_ids: str, sent_as: str) -> Generation:
    body = found.body
    _check_not_replaced(body.get("matched_stop"))
    meta = body.get("meta_info")
    # Without ``return_meta_info`` this field and all fields under it are absent.
    ending = scored = meta
    if meta:
        ending, scored = meta["finish_reason"], _scored_by_sglang(meta)
    # In a stream, the sampled ids of all choices are next to the choices.
    extension = found.answer.get("sglext")
    listed = extension.get("output_ids")
    if listed and found.position >= len(listed.array()):
        raise listed.malformed("a list of ids for each choice")
    # The versions in the response are those of its first choice.
    versions = meta if meta or found.position else found.answer.get("metadata")
    return settle(
        body.request_id,
        sampled_ids=[body.get(sampled_ids), scored.column(1), listed and listed.entry(found.position)],
        sampled_counts=[meta and meta["completion_tokens"], ending.get("length")],
        log_probs=[found.log_probs, scored.column(0)],
        prompt_ids=[found.sent(sent_as), body.get("prompt_token_ids"), extension.get("input_ids")],
        prompt_counts=[found.prompt_count, meta and meta["prompt_tokens"]],
        finish_reason=found.finish_reason,
        stop_matches=[body.get("matched_stop"), ending.get("matched")],
        text=found.text,
        ids_advice=_SGLANG_ADVICE.format("output"),
        prompt_advice=_SGLANG_ADVICE.format("input"),
        kept_ids=meta.get("output_token_sampling_mask"),
        versions=versions.get("weight_versions"),
        last_version=versions.get("weight_version"),
    )


def _scored_by_sglang(meta: Field) -> Field:
    scored = meta.get("output_token_logprobs")
    if not scored:
        raise LogProbError(meta.request_id, f"{scored.path} are missing: request them with return_logprob: true")
    return scored


def _check_not_replaced(match: Field) -> None:
    """SGLang treats an id outside the vocabulary as NaN, and replaces the sampled id by an end token."""
    if match.value == "NaN happened":
        raise AbortedRequest(match.request_id, f"{match.path} is {match.value!r}: the last id was never sampled")


def read_vllm_generate(
    request: Json, response: Json, *, choice: int | None = None, request_id: str | None = None
) -> Generation:
    """Read one choice of vLLM's ``/inference/v1/generate``, from a server with ``--enable-scale-out``.

    The request needs ``logprobs`` in its ``sampling_params``. With ``--return-sampling-mask`` the generation has the
    sampling support of each token. Arguments and errors are those of :func:`read_sglang_chat`.
    """
    found = Choice(request, response, api="generate", choice=choice, request_id=request_id)
    # Its text mode has texts next to the log-probs, and no ids.
    ids = found.body["logprobs"]["content"].column("token_id")
    scored_ids = ids if any(value is not None for value in ids.value) else None
    prompt_places = [found.sent("token_ids"), found.answer.get("prompt_token_ids")]
    return _read_vllm(found, prompt_places, scored_ids, kept_ids=found.body.get("sampling_mask"))


def read_vllm_chat(
    request: Json, response: Json, *, choice: int | None = None, request_id: str | None = None
) -> Generation:
    """Read one choice of vLLM's ``/v1/chat/completions``.

    The request needs ``logprobs: true`` and ``return_token_ids: true``. With ``return_weight_versions: true`` the
    generation has the versions of the weights. Arguments and errors are those of :func:`read_sglang_chat`.
    """
    found = Choice(request, response, api="chat", choice=choice, request_id=request_id)
    return _read_vllm(found, [found.answer.get("prompt_token_ids")])


def read_vllm_completions(
    request: Json, response: Json, *, choice: int | None = None, request_id: str | None = None
) -> Generation:
    """Read one choice of vLLM's ``/v1/completions``.

    The request needs ``logprobs`` and ``return_token_ids: true``. With ``return_weight_versions: true`` the generation
    has the versions of the weights. Arguments and errors are those of :func:`read_sglang_chat`.
    """
    found = Choice(request, response, api="completions", choice=choice, request_id=request_id)
    return _read_vllm(found, [found.sent("prompt"), found.body.get("prompt_token_ids")])


def _read_vllm(
    found: Choice, prompt_places: Places, scored_ids: Field | None = None, *, kept_ids: Field | None = None
) -> Generation:
    body = found.body
    return settle(
        body.request_id,
        sampled_ids=[body.get("token_ids"), scored_ids],
        log_probs=[found.log_probs],
        prompt_ids=prompt_places,
        prompt_counts=[found.prompt_count],
        finish_reason=found.finish_reason,
        # For a repetition, stop_reason is not a stop string.
        stop_matches=[None if body["finish_reason"].value == "repetition" else body.get("stop_reason")],
        text=found.text,
        ids_advice="ask for them with return_token_ids: true",
        prompt_advice="ask for them with return_token_ids: true",
        kept_ids=kept_ids,
        versions=body.get("weight_versions"),
        # From a server with vime's patch.
        last_version=found.answer.get("weight_version"),
    )
