"""Fills the fields of a host's ``Sample``: through its own method where it has one, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mis_ext.rollout.custom_generate.episode import Call, Observation


def check_resumable(sample: Any) -> None:
    """Refuse a sample whose response so far lacks log-probs, a mask entry or a token.

    Raises:
        ValueError: The message names the field and both lengths.
    """
    length = sample.response_length
    fields = {"rollout_log_probs": sample.rollout_log_probs, "loss_mask": sample.loss_mask, "tokens": sample.tokens}
    if not length:
        return
    for name, values in fields.items():
        # No mask means all ones; the tokens are those of the prompt too.
        if name == "loss_mask" and values is None:
            continue
        found = len(values or [])
        if found < length or (found > length and name != "tokens"):
            raise ValueError(
                f"sample {sample.index} is to be resumed: its {name} have {found} entries, its response {length}"
            )


def append_sampled(args: Any, sample: Any, token_ids: Sequence[int], log_probs: Sequence[float], call: Call) -> None:
    """Append what one request sampled to the sample, with its log-probs and a loss mask of 1.

    The host's own method also takes weight version, status and whatever else it looks for in ``meta_info``.

    Args:
        args: The host's.
        sample: slime's ``Sample`` or Miles'.
        token_ids: The sampled tokens, ``[T]``.
        log_probs: Their log-probs, ``[T]``.
        call: The request.
    """
    if hasattr(sample, "append_response_tokens"):
        sample.append_response_tokens(
            args,
            tokens=list(token_ids),
            log_probs=list(log_probs),
            trainable=True,
            meta_info=dict(call.meta_info),
            text=call.text,
        )
    else:
        _append(sample, token_ids, log_probs, 1, call.text)
        sample.update_from_meta_info(args, dict(call.meta_info))
    versions = call.generation.weight_versions
    # Newer Miles reads the spans of versions by itself; slime knows one per response, and takes the smallest of all.
    if versions is not None and sample.weight_versions and isinstance(sample.weight_versions[-1], str):
        sample.weight_versions[-1:] = dict.fromkeys(versions)


def append_observation(args: Any, sample: Any, observation: Observation) -> None:
    """Append tokens that nobody sampled to the sample, with a loss mask of 0 and log-probs of 0.

    Args:
        args: The host's.
        sample: slime's ``Sample`` or Miles'.
        observation: The tokens, ``[T]``, and their text; nothing happens where there are none.
    """
    text, token_ids = observation
    if not token_ids:
        return
    if hasattr(sample, "append_response_tokens"):
        sample.append_response_tokens(args, tokens=list(token_ids), trainable=False, text=text)
        return
    _append(sample, token_ids, [0.0] * len(token_ids), 0, text)


def _append(sample: Any, token_ids: Sequence[int], log_probs: Sequence[float], mask: int, text: str) -> None:
    # A resumed sample may have no mask, which means all ones.
    loss_mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    sample.tokens = [*sample.tokens, *token_ids]
    sample.response += text
    sample.response_length += len(token_ids)
    sample.loss_mask = [*loss_mask, *[mask] * len(token_ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *log_probs]
