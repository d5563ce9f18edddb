"""The custom generate function for slime and Miles: ``--custom-generate-function-path mis_ext.rollout.generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.custom_generate.chat import encode_prompt, load_tokenizer, template_options
from mis_ext.rollout.custom_generate.episode import Call, Episode, Turn
from mis_ext.rollout.custom_generate.http import host_of
from mis_ext.rollout.custom_generate.sample_fields import append_observation, append_sampled, check_resumable
from mis_ext.rollout.custom_generate.settings import KEY, Settings, check_supported, warn_of_definition
from mis_ext.rollout.text import Tokenizer

UNFINISHED = f"{KEY}_unfinished"
"""Key in ``sample.metadata`` of the turn in which a sample was aborted."""


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """``sample`` with the tokens of a conversation exactly as SGLang sampled them.

    Each request holds the token ids of everything before it, those of earlier turns as they were sampled: no text is
    tokenized twice. The responses are read by :func:`~mis_ext.rollout.read_sglang_generate` and put together by
    :func:`~mis_ext.rollout.build_samples` with the policy ``strict``, whose counts are added to
    ``sample.metadata["on_policy_tokens"]``. Observations get a loss mask of 0.

    A turn that reaches the token limit, and a conversation that reaches ``rollout_max_context_len`` (in evaluation
    ``eval_max_context_len``) or ``max_turns``, make the sample truncated. An aborted request makes it aborted: with
    ``partial_rollout`` it keeps what was sampled, log-probs included, and goes on from there when it comes back;
    otherwise it stays as it came. The limit ``max_new_tokens`` is that of each turn. No token is added to ``sample``
    before the conversation is over.

    The signature is slime's; Miles still calls functions that have it.

    Args:
        args: The host's; of them ``sglang_router_ip``, ``sglang_router_port``, ``hf_checkpoint``, ``partial_rollout``,
            the two limits of the context, ``chat_template_path``, ``apply_chat_template_kwargs`` and the router's
            policy are read, the last six where they exist, and what
            :class:`~mis_ext.rollout.custom_generate.settings.Settings` describes, under ``on_policy_tokens``.
        sample: The host's ``Sample``; ``metadata["tools"]`` goes to the chat template.
        sampling_params: SGLang's, with ``max_new_tokens``.
        evaluation: Nothing will be trained.

    Warns:
        LogProbDefinitionWarning: SGLang's log-probs are not of the distribution that it draws from, as with top-p.

    Raises:
        ConnectionError: The server did not answer, or refused a request.
        RolloutError: A response contradicts itself or its request; the message names sample, turn and values.
        TypeError: A setting has another type.
        ValueError: A setting is out of range, a flag asks for what is not supported, or a resumed sample has tokens
            without log-probs.
    """
    settings = Settings.from_args(args)
    check_supported(args, sample)
    check_resumable(sample)
    if not evaluation:
        warn_of_definition(sampling_params)
    max_context = settings.max_context(args, evaluation=evaluation)
    tokenizer = load_tokenizer(args.hf_checkpoint, getattr(args, "chat_template_path", None), host_of(sample))
    prompt_ids = list(sample.tokens) or encode_prompt(tokenizer, sample.prompt, template_options(args, sample))
    # What the host's own function left unfinished was a first turn.
    first = (0, sample.response_length, sample.response)
    # A host that samples a prompt afresh clears the response and keeps the metadata.
    turn = Turn(*(sample.metadata.get(UNFINISHED, first) if sample.response_length else first))
    episode = Episode(args, sample, sampling_params, settings, tokenizer, max_context)
    calls, turn, cut = await episode.run(prompt_ids, turn)

    aborted = bool(calls) and calls[-1].aborted
    if aborted and not getattr(args, "partial_rollout", False):
        _count(sample, aborted_requests=1, discarded_tokens=sum(len(call.generation.sampled_ids) for call in calls))
        sample.status = sample.Status.ABORTED
        return sample
    sample.tokens = prompt_ids
    # The hosts ask the first sample of a batch whether there are log-probs, also where there was no room for a token.
    sample.rollout_log_probs = sample.rollout_log_probs or []
    _append(args, sample, calls, tokenizer)
    if aborted:
        _count(sample, aborted_requests=1)
        sample.metadata[UNFINISHED] = tuple(turn)
    else:
        sample.metadata.pop(UNFINISHED, None)
    if cut:
        sample.status = sample.Status.TRUNCATED
    return sample


def _append(args: Any, sample: Any, calls: list[Call], tokenizer: Tokenizer) -> None:
    """Append what the calls sampled, and the observations between, to a sample that has what came before."""
    built = build_samples([call.generation for call in calls], policy="strict", tokenizer=tokenizer)
    end = len(sample.tokens)
    token_ids, log_probs = list(sample.tokens), [0.0] * end
    # One at most, as every prompt begins with all that is known; none where nothing was sampled.
    for whole in built.samples:
        token_ids, log_probs = whole.tokens, log_probs + whole.rollout_log_probs
    for call in calls:
        start = len(call.generation.prompt_ids)
        append_observation(args, sample, call.generation.prompt_ids[end:start], call.observation)
        end = start + len(call.generation.sampled_ids)
        append_sampled(args, sample, token_ids[start:end], log_probs[start:end], call)
    _count(sample, **built.metrics())


def _count(sample: Any, **counts: Any) -> None:
    kept = sample.metadata.setdefault(KEY, {})
    for name, count in counts.items():
        kept[name] = kept.get(name, 0) + count
