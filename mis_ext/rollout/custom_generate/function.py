"""The custom generate function for slime and Miles: ``--custom-generate-function-path mis_ext.rollout.generate``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.custom_generate.episode import Ended, Episode, Turn, encode_prompt
from mis_ext.rollout.custom_generate.host import (
    KEY,
    Settings,
    abort_flag,
    check_supported,
    host_name,
    load_tokenizer,
    template_options,
    warn_of_definition,
)
from mis_ext.rollout.generation import Tokenizer

UNFINISHED = f"{KEY}_unfinished"
"""Key in ``sample.metadata`` of the turn in which a sample was aborted."""


async def generate(
    input: Any, sample: Any = None, sampling_params: Mapping[str, Any] | None = None, evaluation: bool = False
) -> Any:
    """``sample`` with the tokens of a conversation exactly as SGLang sampled them.

    Each request holds the token ids of everything before it, those of earlier turns as they were sampled: no text is
    tokenized twice. The responses are read by :func:`~mis_ext.rollout.read_sglang_generate` and put together by
    :func:`~mis_ext.rollout.build_samples` with the policy ``strict``, whose counts are added to
    ``sample.metadata["on_policy_tokens"]``. Observations get a loss mask of 0.

    A turn that reaches the token limit, and a conversation that reaches ``rollout_max_context_len`` (in evaluation
    ``eval_max_context_len``) or ``max_turns``, make the sample truncated. An aborted request makes it aborted, and so
    does a host that aborts its rollout while the environment has its turn: then nothing more is requested. With
    ``partial_rollout`` the sample keeps what was sampled, log-probs included, and goes on from there when it comes
    back; otherwise it stays as it came. The limit ``max_new_tokens`` is that of each turn. No token is added to
    ``sample`` before the conversation is over.

    Args:
        input: slime's ``args``; of them ``sglang_router_ip``, ``sglang_router_port``, ``hf_checkpoint``,
            ``partial_rollout``, the two limits of the context, ``chat_template_path``, ``apply_chat_template_kwargs``
            the router's policy and SGLang's speculative decoding are read, the last seven where they exist, and what
            :class:`~mis_ext.rollout.custom_generate.host.Settings` describes, under ``on_policy_tokens``. Miles
            calls a function whose first parameter has this name with its ``GenerateFnInput`` alone, which holds them,
            the other arguments, and the state of its rollout.
        sample: The host's ``Sample``; ``metadata["tools"]`` goes to the chat template.
        sampling_params: SGLang's, with ``max_new_tokens``.
        evaluation: Nothing will be trained.

    Returns:
        ``sample``; to Miles, its ``GenerateFnOutput``.

    Warns:
        LogProbDefinitionWarning: SGLang's log-probs are not of the distribution that it draws from, as with top-p; or
            it decodes speculatively.

    Raises:
        ConnectionError: The server did not answer, or refused a request.
        RolloutError: A response contradicts itself or its request; the message names sample, turn and values.
        TypeError: A setting has another type.
        ValueError: A setting is out of range, a flag asks for what is not supported, or a resumed sample has tokens
            without log-probs.
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
    check_supported(args, sample)
    check_resumable(sample)
    if not evaluation:
        warn_of_definition(args, sampling_params)
    max_context = settings.max_context(args, evaluation=evaluation)
    tokenizer = load_tokenizer(args.hf_checkpoint, getattr(args, "chat_template_path", None), host_name(sample))
    options = partial(template_options, args, sample, evaluation=evaluation)
    prompt_ids = list(sample.tokens) or encode_prompt(tokenizer, sample.prompt, options)
    # What the host's own function left unfinished was a first turn.
    first = (0, sample.response_length, sample.response)
    # A host that samples a prompt afresh clears the response and keeps the metadata.
    turn = Turn(*(sample.metadata.get(UNFINISHED, first) if sample.response_length else first))
    flag = abort_flag(args, sample, state)
    episode = Episode(args, sample, sampling_params, settings, tokenizer, max_context, flag, options)
    ended = await episode.run(prompt_ids, turn)
    if not evaluation:
        returned = (call.meta_info for call in ended.calls if call.generation.sampled_ids)
        warn_of_definition(args, sampling_params, returned)
    num_aborted = sum(call.aborted for call in ended.calls)
    if ended.aborted and not getattr(args, "partial_rollout", False):
        discarded = sum(len(call.generation.sampled_ids) for call in ended.calls)
        _count(sample, aborted_requests=num_aborted, discarded_tokens=discarded)
        sample.status = sample.Status.ABORTED
        return sample
    sample.tokens = prompt_ids
    # The hosts ask the first sample of a batch whether there are log-probs, also where there was no room for a token.
    sample.rollout_log_probs = sample.rollout_log_probs or []
    _append_calls(args, sample, ended, tokenizer)
    if ended.aborted:
        _count(sample, aborted_requests=num_aborted)
        sample.metadata[UNFINISHED] = tuple(ended.turn)
        sample.status = sample.Status.ABORTED
        return sample
    sample.metadata.pop(UNFINISHED, None)
    if ended.cut:
        sample.status = sample.Status.TRUNCATED
    elif not ended.calls:
        # All that was missing was the environment's word.
        sample.status = sample.Status.COMPLETED
    return sample


def _append_calls(args: Any, sample: Any, ended: Ended, tokenizer: Tokenizer) -> None:
    """Append what the calls sampled, and the observations between, to a sample that has what came before."""
    built = build_samples([call.generation for call in ended.calls], policy="strict", tokenizer=tokenizer)
    token_ids, log_probs = list[int](), list[float]()
    # One at most, as every prompt begins with all that is known; none where nothing was sampled.
    for whole in built.samples:
        known = len(whole.tokens) - whole.response_length
        token_ids, log_probs = whole.tokens, [0.0] * known + whole.rollout_log_probs
    for call in ended.calls:
        start = len(call.generation.prompt_ids)
        sampled = slice(start, start + len(call.generation.sampled_ids))
        _append(args, sample, *call.observation)
        _append(args, sample, call.text, token_ids[sampled], log_probs[sampled], call.meta_info)
        versions = call.generation.weight_versions
        # Newer Miles reads the spans of versions by itself; slime knows one per response, and takes the smallest.
        if versions is not None and sample.weight_versions and isinstance(sample.weight_versions[-1], str):
            sample.weight_versions[-1:] = dict.fromkeys(versions)
    _append(args, sample, *ended.unsent)
    _count(sample, **built.metrics())


def _append(
    args: Any,
    sample: Any,
    text: str,
    token_ids: Sequence[int],
    log_probs: Sequence[float] = (),
    meta_info: Mapping[str, Any] | None = None,
) -> None:
    """Append tokens to the host's sample: those of a response, or without its ``meta_info`` those that nobody sampled.

    The host's own method also takes weight version, status and whatever else it looks for in ``meta_info``.
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


def _count(sample: Any, **counts: int) -> None:
    kept = sample.metadata.setdefault(KEY, {})
    for name, count in counts.items():
        kept[name] = kept.get(name, 0) + count


def check_resumable(sample: Any) -> None:
    """Refuse a sample whose response so far lacks log-probs, a mask entry or a token.

    Raises:
        ValueError: The message names the field and both lengths.
    """
    length = sample.response_length
    # No mask means all ones; the tokens are those of the prompt too.
    loss_mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    fields = {"rollout_log_probs": sample.rollout_log_probs, "loss_mask": loss_mask, "tokens": sample.tokens}
    for name, values in fields.items() if length else ():
        found = len(values or [])
        if found < length or (found > length and name != "tokens"):
            raise ValueError(
                f"sample {sample.index} is to be resumed: its {name} have {found} entries, its response {length}"
            )
