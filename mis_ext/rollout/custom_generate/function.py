# SPDX-License-Identifier: Apache-2.0
"""The custom generate function for slime, vime, and Miles, for ``--custom-generate-function-path``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mis_ext.frameworks import find_framework
from mis_ext.rollout.builder import build_samples
from mis_ext.rollout.canary import VERDICTS
from mis_ext.rollout.custom_generate.endpoints import VLLM, endpoint_of, post_json, was_aborted
from mis_ext.rollout.custom_generate.engine_weights import EngineWeights, engine_weights
from mis_ext.rollout.custom_generate.host import (
    CANARY,
    KEY,
    VERSIONS,
    Messages,
    Settings,
    abort_flag,
    check_supported,
    load_tokenizer,
    render_messages,
    stores_versions,
    warn_of_definition,
)
from mis_ext.rollout.custom_generate.routed_experts import FLAG, join_rows, known_rows, read_rows
from mis_ext.rollout.generation import Generation, MalformedResponse, Tokenizer

if TYPE_CHECKING:
    from mis_ext.rollout.custom_generate.routed_experts import Rows

UNFINISHED = f"{KEY}_unfinished"
"""Key in ``sample.metadata`` of the turn in which a sample was aborted."""


async def generate(
    input: Any, sample: Any = None, sampling_params: Mapping[str, Any] | None = None, evaluation: bool = False
) -> Any:
    """Fill ``sample`` with the tokens of a conversation exactly as the engine sampled them: SGLang, or vLLM in vime.

    Each request contains the token ids of the whole conversation before it, with the sampled ids of earlier turns, so
    no text is tokenized twice. :func:`~mis_ext.rollout.read_sglang_generate` (in vime
    :func:`~mis_ext.rollout.read_vllm_generate`) reads the responses. :func:`~mis_ext.rollout.build_samples` joins them
    with the policy ``strict``, and its counts are added to ``sample.metadata["on_policy_tokens"]``. Observations get a
    loss mask of 0.

    A turn that reaches the token limit, and a conversation that reaches ``rollout_max_context_len`` (in evaluation
    ``eval_max_context_len``) or ``max_turns``, make the sample truncated. The sample is aborted if a request is
    aborted, or if the framework aborts its rollout during the environment's turn; then no further request is sent. With
    ``partial_rollout`` the sample keeps the sampled tokens with their log-probs, and continues from there when it is
    resumed. Otherwise it does not change. The limit ``max_new_tokens`` is per turn. No token is added to ``sample``
    before the conversation ends.

    With ``use_rollout_routing_replay`` the sample gets ``rollout_routed_experts``: the experts of each token when it
    was sampled, over all turns, and over the aborts of a partial rollout. Tokens of an aborted request without experts
    are not kept.

    Args:
        input: slime's or vime's ``args``. The function reads the address of the router (``sglang_router_ip`` and
            ``_port``, or ``vllm_router_ip`` and ``_port``), ``hf_checkpoint``, ``partial_rollout``, the two limits of
            the context, ``chat_template_path``, ``apply_chat_template_kwargs``, the router's policy, SGLang's
            speculative decoding, ``use_rollout_routing_replay``, and with it the layers and experts of the model. The
            last nine are optional. It also reads :class:`~mis_ext.rollout.custom_generate.host.Settings` under
            ``on_policy_tokens``. If the first parameter has this name, Miles passes only its ``GenerateFnInput``, which
            holds ``args``, the other arguments, and the state of its rollout.
        sample: The framework's ``Sample``; ``metadata["tools"]`` goes to the chat template.
        sampling_params: The framework's parameters, with ``max_new_tokens``; for vLLM they are renamed.
        evaluation: The sample is not trained.

    Returns:
        ``sample``; to Miles, its ``GenerateFnOutput``.

    Warns:
        LogProbDefinitionWarning: The log-probs are not those of the distribution that the engine samples
            from, for example with SGLang's top-p; or SGLang decodes speculatively.

    Raises:
        ConnectionError: The server did not respond, or refused a request.
        RolloutError: A response contradicts itself or its request; the message names sample, turn and values.
        TypeError: A setting has a wrong type.
        ValueError: A setting is out of range, a flag is not supported, or a resumed sample has tokens without
            log-probs.
    """
    if sample is not None and sampling_params is not None:
        return await _generate(input, sample, sampling_params, evaluation=evaluation, state=None)
    filled = await _generate(
        input.args, input.sample, input.sampling_params, evaluation=input.evaluation, state=input.state
    )
    return sys.modules[type(input).__module__].GenerateFnOutput(samples=filled)


async def _generate(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], *, evaluation: bool, state: Any | None
) -> Any:
    settings = Settings.from_args(args)
    check_supported(args, sample, settings)
    check_resumable(sample)
    if not evaluation:
        warn_of_definition(args, sample, sampling_params)
    max_context = settings.max_context(args, evaluation=evaluation)
    tokenizer = load_tokenizer(args.hf_checkpoint, getattr(args, "chat_template_path", None), find_framework(sample))
    rows = known_rows(sample) if getattr(args, FLAG, False) and not evaluation else None
    render = partial(render_messages, tokenizer, args, sample, evaluation=evaluation)
    prompt_ids = list(sample.tokens)
    if not prompt_ids:
        # If the prompt is a text, the framework has already applied the template.
        text = sample.prompt if isinstance(sample.prompt, str) else render(sample.prompt)
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    # A sample of the framework's own function is in its first turn.
    first = (0, sample.response_length, sample.response)
    # A framework that samples a prompt again clears the response and keeps the metadata.
    is_resumed = sample.response_length > 0
    turn = Turn(*(sample.metadata.get(UNFINISHED, first) if is_resumed else first))
    flag = abort_flag(args, sample, state)
    num_rows = None if rows is None else sum(map(len, rows))
    episode = Episode(args, sample, sampling_params, settings, tokenizer, max_context, flag, render)
    ended = await episode.run(prompt_ids, turn, num_rows)
    if not evaluation:
        returned = (call.meta_info for call in ended.calls if call.generation.sampled_ids)
        warn_of_definition(args, sample, sampling_params, returned)
    num_aborted = sum(call.aborted for call in ended.calls)
    num_discarded = sum(call.num_discarded for call in ended.calls)
    if ended.aborted and not getattr(args, "partial_rollout", False):
        num_discarded += sum(len(call.generation.sampled_ids) for call in ended.calls)
        _count(sample, aborted_requests=num_aborted, discarded_tokens=num_discarded)
        sample.status = sample.Status.ABORTED
        return sample
    sample.tokens = prompt_ids
    # The frameworks check the first sample of a batch for log-probs, even if it had no room for a token.
    sample.rollout_log_probs = sample.rollout_log_probs or []
    _append_calls(args, sample, ended, tokenizer)
    if rows is not None:
        rows += [call.rows for call in ended.calls if call.rows is not None]
        if rows or not ended.aborted:
            sample.rollout_routed_experts = join_rows(args, sample, rows)
        _count(sample, retracted_requests=sum(bool(call.meta_info.get("num_retractions")) for call in ended.calls))
    _note_weights(sample, ended, is_resumed=is_resumed, evaluation=evaluation)
    if ended.aborted:
        _count(sample, aborted_requests=num_aborted, **({"discarded_tokens": num_discarded} if num_discarded else {}))
        sample.metadata[UNFINISHED] = tuple(ended.turn)
        sample.status = sample.Status.ABORTED
        return sample
    sample.metadata.pop(UNFINISHED, None)
    if ended.cut:
        sample.status = sample.Status.TRUNCATED
    elif not ended.calls:
        # Only the reply of the environment was missing.
        sample.status = sample.Status.COMPLETED
    return sample


def _append_calls(args: Any, sample: Any, ended: Ended, tokenizer: Tokenizer) -> None:
    """Append the sampled tokens of the calls, and the observations between them, to a sample."""
    built = build_samples([call.generation for call in ended.calls], policy="strict", tokenizer=tokenizer)
    # Tokens of the framework's own function have no stored version. Excess entries are from an earlier attempt.
    stores = stores_versions(args)
    before = (getattr(sample, VERSIONS, None) or [])[: sample.response_length] if stores else []
    version_of_each: list[float] = [*before, *[math.nan] * (sample.response_length - len(before))]
    for call in ended.calls:
        generation = call.generation
        _append(args, sample, *call.observation)
        # slime's method would use only the experts of this request; both methods would use the version of dropped
        # tokens.
        left_out = ["routed_experts"]
        if call.num_discarded:
            left_out += ["weight_version", "weight_versions"]
        meta_info = {key: value for key, value in call.meta_info.items() if key not in left_out}
        _append(args, sample, call.text, generation.sampled_ids, generation.log_probs, meta_info)
        version_of_each += [math.nan] * len(call.observation.token_ids) + _version_numbers(generation)
        versions = generation.weight_versions
        # Newer Miles reads the spans of versions itself. slime stores one version per response, and uses the smallest.
        if versions is not None and sample.weight_versions and isinstance(sample.weight_versions[-1], str):
            sample.weight_versions[-1:] = dict.fromkeys(versions)
    _append(args, sample, *ended.unsent)
    if stores:
        setattr(sample, VERSIONS, [*version_of_each, *[math.nan] * len(ended.unsent.token_ids)])
    _count(sample, **built.metrics())


def _version_numbers(generation: Generation) -> list[float]:
    """The version that sampled each token; NaN without a version or with a non-number, as before the first update."""
    count = len(generation.sampled_ids)
    names: Sequence[str | None] = generation.weight_versions or [generation.weight_version] * count
    return [float(name) if name is not None and name.isdecimal() else math.nan for name in names]


def _append(
    args: Any,
    sample: Any,
    text: str,
    token_ids: Sequence[int],
    log_probs: Sequence[float] = (),
    meta_info: Mapping[str, Any] | None = None,
) -> None:
    """Append tokens to the framework's sample: a response with its ``meta_info``, or tokens that were not sampled.

    The framework's own method also reads the weight version, the status and other fields from ``meta_info``.
    """
    if meta_info is None and not token_ids:
        return
    if hasattr(sample, "append_response_tokens"):
        sampled = {} if meta_info is None else {"log_probs": list(log_probs), "meta_info": dict(meta_info)}
        trainable = meta_info is not None
        sample.append_response_tokens(args, tokens=list(token_ids), trainable=trainable, text=text, **sampled)
        return
    # A resumed sample may have no mask, which means all ones.
    loss_mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    sample.tokens = [*sample.tokens, *token_ids]
    sample.response += text
    sample.response_length += len(token_ids)
    sample.loss_mask = [*loss_mask, *[0 if meta_info is None else 1] * len(token_ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *(log_probs or [0.0] * len(token_ids))]
    if meta_info is not None:
        sample.update_from_meta_info(args, dict(meta_info))


def _note_weights(sample: Any, ended: Ended, *, is_resumed: bool, evaluation: bool) -> None:
    """Count the checks of the engines' weights, and store the canary's verdict in a field of the framework's dump."""
    verdicts = [call.weights.verdict for call in ended.calls if call.weights is not None and call.weights.verdict]
    counts = {f"canary_{verdict}": verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    if any(call.is_outdated for call in ended.calls):
        counts["outdated_prefixes"] = sum(call.is_outdated for call in ended.calls)
    _count(sample, **counts)
    known = dict(getattr(sample, "train_metadata", None) or {})
    before = known.pop(CANARY, None)
    if is_resumed and before is not None:
        verdicts.append(before)
    # Drop the verdict of tokens that the framework has cleared.
    if not evaluation and (verdicts or before is not None):
        sample.train_metadata = {**known, CANARY: min(verdicts, key=VERDICTS.index)} if verdicts else known


def _count(sample: Any, **counts: int) -> None:
    kept = sample.metadata.setdefault(KEY, {})
    for name, count in counts.items():
        kept[name] = kept.get(name, 0) + count


def check_resumable(sample: Any) -> None:
    """Refuse a sample whose response so far lacks log-probs, a mask entry or a token."""
    length = sample.response_length
    # No mask means all ones. The tokens include the prompt.
    loss_mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    fields = {"rollout_log_probs": sample.rollout_log_probs, "loss_mask": loss_mask, "tokens": sample.tokens}
    for name, values in fields.items() if length else ():
        found = len(values or [])
        if found < length or (found > length and name != "tokens"):
            raise ValueError(
                f"sample {sample.index} cannot be resumed: its {name} have {found} entries, but its response has "
                f"{length}"
            )


# --- an episode between SGLang and an environment, in token ids: sampled ids are sent back unchanged

# With these policies the router sends an episode to the server that has its prefix cached.
_STICKY_POLICIES = ("consistent_hash", "consistent_hashing", "manual")
# A placeholder for an assistant's turn, to find the beginning of the template's text after it.
_MARK = "\N{REFERENCE MARK}assistant\N{REFERENCE MARK}"


class Turn(NamedTuple):
    """A turn of the model, which may be sampled in several requests after aborts.

    Attributes:
        number: The number of earlier turns of the model.
        num_sampled: The number of its tokens so far.
        text: Its text so far.
        ended: The model ended it, and the environment has not replied yet.
        end_id: The token with which the model ended it; None if it did not end it, or with a stop string.
    """

    number: int = 0
    num_sampled: int = 0
    text: str = ""
    ended: bool = False
    end_id: int | None = None

    def after(self, call: Call) -> Turn:
        """The turn after one more request."""
        sampled, match = call.generation.sampled_ids, call.generation.stop_match
        ended = not call.aborted and call.generation.finish_reason != "length"
        # vLLM reports no match if the model ended its turn with its own end token.
        end_id = sampled[-1] if sampled and (match == sampled[-1] or (ended and match is None)) else None
        return Turn(self.number, self.num_sampled + len(sampled), self.text + call.text, ended, end_id)


class Observation(NamedTuple):
    """Text and token ids of the environment after a turn, with the text of the template around it."""

    text: str = ""
    token_ids: Sequence[int] = ()


class Call(NamedTuple):
    """One request and its result. For an aborted request, the generation has the tokens up to the abort.

    ``rows``: the experts of its tokens and of earlier tokens without experts, if they are requested. ``weights``: those
    of the engines before the request, if a setting requires them. ``is_outdated``: the engine received new weights
    afterwards, but read cached keys and values of the previous weights.
    """

    generation: Generation
    text: str
    meta_info: Mapping[str, Any]
    observation: Observation
    rows: Rows | None = None
    weights: EngineWeights | None = None
    is_outdated: bool = False

    @property
    def aborted(self) -> bool:
        """True if the server aborted the request."""
        return was_aborted(self.meta_info)

    @property
    def num_discarded(self) -> int:
        """Sampled tokens that were dropped because they came without experts."""
        return len(self.meta_info.get("output_token_logprobs") or ()) - len(self.generation.sampled_ids)


class Ended(NamedTuple):
    """A finished or aborted episode of one sample.

    Attributes:
        calls: All requests, in order; none if there was no room for a token.
        turn: The last turn of the model.
        cut: The context or the limit of turns ended it, not the model, the server or the environment.
        aborted: The server aborted a request, or the framework its rollout.
        unsent: The observation after the last request, if the framework aborted its rollout before the next request.
    """

    calls: list[Call]
    turn: Turn
    cut: bool = False
    aborted: bool = False
    unsent: Observation = Observation()


@dataclass(frozen=True)
class Episode:
    """Constants of all turns; see :func:`mis_ext.rollout.generate`."""

    args: Any
    sample: Any
    sampling_params: Mapping[str, Any]
    settings: Settings
    tokenizer: Tokenizer
    max_context: int | None
    is_aborted: Callable[[], bool]
    render: Callable[[Messages], str]

    async def run(self, prompt_ids: list[int], turn: Turn, num_rows: int | None = None) -> Ended:
        """Run the episode to its end, from a prompt that may contain a part of ``turn``, or all of it without a reply.

        ``num_rows``: the number of tokens whose experts are known; None: experts are not requested.
        """
        step = self.settings.load_environment()
        calls: list[Call] = []
        known_ids, observation = prompt_ids, Observation()
        while True:
            if not turn.ended:
                if self.is_aborted():
                    return Ended(calls, turn, aborted=True, unsent=observation)
                max_new_tokens = self.sampling_params["max_new_tokens"] - turn.num_sampled
                if self.max_context is not None:
                    max_new_tokens = min(max_new_tokens, self.max_context - len(known_ids))
                if max_new_tokens <= 0:
                    return Ended(calls, turn, cut=True)
                call = await self._request(known_ids, turn, max_new_tokens, observation, num_rows)
                if call is None:
                    return Ended(calls, turn, aborted=True, unsent=observation)
                calls.append(call)
                known_ids, turn = known_ids + call.generation.sampled_ids, turn.after(call)
                num_rows = num_rows if call.rows is None else len(known_ids) - 1
                if not turn.ended:
                    return Ended(calls, turn, aborted=call.aborted)
            # The model has ended its turn. The environment replies before the next turn.
            if step is None:
                return Ended(calls, turn)
            if self.is_aborted():
                return Ended(calls, turn, aborted=True)
            started = time.monotonic()
            said = await step(self.sample, turn.text)
            self.sample.non_generation_time += time.monotonic() - started
            if said is None:
                return Ended(calls, turn)
            if turn.number + 1 >= self.settings.max_turns:
                return Ended(calls, turn, cut=True)
            observation = self._observation(said, turn.end_id)
            known_ids, turn = [*known_ids, *observation.token_ids], Turn(turn.number + 1)

    async def _request(
        self, prompt_ids: list[int], turn: Turn, max_new_tokens: int, observation: Observation, num_rows: int | None
    ) -> Call | None:
        """Send the next request and return its result; None if the framework aborted its rollout before it."""
        endpoint = endpoint_of(self.sample)
        params = {**self.sampling_params, "max_new_tokens": max_new_tokens}
        request = endpoint.request(self.args.hf_checkpoint, prompt_ids, params, num_rows)
        policy = getattr(self.args, "router_policy", None) or getattr(self.args, "sglang_router_policy", None)
        key = getattr(self.sample, "routing_key", None) or getattr(self.sample, "session_id", None)
        for is_last in (False, True):
            weights = await engine_weights(self.args, self.settings, self.tokenizer)
            # During the checks of the engines, there was no request that the framework could abort.
            if weights is not None and self.is_aborted():
                return None
            if weights is not None and self.settings.cache_by_version:
                request["extra_key"] = weights.cache_key
            response = await post_json(
                endpoint.url(self.args),
                request,
                framework=find_framework(self.sample),
                max_attempts=self.settings.max_attempts,
                headers={endpoint.session_header: key} if key and policy in _STICKY_POLICIES else {},
            )
            meta_info = endpoint.meta_info(response)
            is_outdated = "extra_key" in request and weights is not None and weights.is_outdated(meta_info)
            # Only the start of the request decides, not its result, so a repetition does not bias the responses.
            # Without a reported start, it would favor short responses.
            if is_last or not is_outdated or was_aborted(meta_info) or not meta_info.get("weight_versions"):
                break
        request_id = f"sample {self.sample.index}, turn {turn.number}"
        if was_aborted(meta_info):
            num_sampled = len(meta_info.get("output_token_logprobs") or ())
            # A retracted request that was waiting has tokens but no experts.
            lacks_experts = num_rows is not None and not meta_info.get("routed_experts")
            if not num_sampled or lacks_experts:
                nothing = Generation(
                    request_id=request_id, prompt_ids=prompt_ids, sampled_ids=[], log_probs=[], finish_reason="length"
                )
                return Call(nothing, "", meta_info, observation, weights=weights, is_outdated=is_outdated)
            # Tokens up to an abort are as valid as tokens up to a token limit.
            response = endpoint.finished(request, response, num_sampled)
        generation = endpoint.read(request, response, request_id=request_id)
        text = generation.text
        if text is None and endpoint is VLLM:
            skips = bool(params.get("skip_special_tokens", True))
            text = self.tokenizer.decode(generation.sampled_ids, skip_special_tokens=skips)
        if text is None:
            raise MalformedResponse(request_id, "response.text is missing: start SGLang with its tokenizer")
        rows = None
        if num_rows is not None and generation.sampled_ids:
            rows = read_rows(self.args, meta_info, generation, num_rows)
        return Call(generation, text, meta_info, observation, rows, weights, is_outdated)

    def _observation(self, said: str | Messages, end_id: int | None) -> Observation:
        """The tokens between a sampled turn and the next one: a text, or messages rendered by the template.

        Messages are rendered after a placeholder for the sampled turn. The end of the turn is omitted if the model
        sampled it as ``end_id``.
        """
        if isinstance(said, str):
            text = said
        else:
            turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}, *said]
            rendered = self.render(turns)
            _, mark, text = rendered.partition(_MARK)
            if not mark:
                raise ValueError(
                    "the chat template changes an assistant's content: let the environment return the text to append, "
                    f"with the template's tokens, instead of messages; it rendered {rendered!r}"
                )
            if end_id is not None:
                text = text.removeprefix(self.tokenizer.decode([end_id], skip_special_tokens=False))
        return Observation(text, self.tokenizer.encode(text, add_special_tokens=False))
