"""Warnings about the log-probs that the host's SGLang returns."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from mis_ext.rollout.definitions.definition import define_log_probs
from mis_ext.rollout.definitions.sampling_parameters import SamplingParameters
from mis_ext.rollout.definitions.servers import Speculation

# slime's SGLang returns the kept ids under one of these.
_KEPT_IDS = ("top_p_token_ids", "top_p_kept_token_ids")


class LogProbDefinitionWarning(UserWarning):
    """The server's log-probs are of another distribution than the one that it draws from."""


def warn_of_definition(
    args: Any, sampling_params: Mapping[str, Any], meta_infos: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Warn, once per process and definition, where SGLang's log-probs are not those of the behavior policy.

    Also where it decodes speculatively. Greedy sampling is for evaluation, and no reason to warn.

    Args:
        args: The host's; those of SGLang's speculative decoding are read, where they exist.
        sampling_params: SGLang's.
        meta_infos: Of the responses that have tokens, as far as there are any.

    Raises:
        TypeError: A sampling parameter has another type.
        ValueError: A sampling parameter is out of range.
    """
    parameters = SamplingParameters.from_request(sampling_params, server="sglang")
    speculation = _speculation(args)
    definition = define_log_probs(parameters, server="sglang", speculation=speculation)
    if definition.is_greedy:
        return
    is_ignored = parameters.returns_kept_ids and definition.returned.truncation is not None
    is_ignored = is_ignored and any(not any(key in meta for key in _KEPT_IDS) for meta in meta_infos)
    if is_ignored or speculation is not None or not (definition.is_behavior and definition.is_comparable):
        _warn_once("; ".join(definition.explain()))


def _speculation(args: Any) -> Speculation | None:
    if not getattr(args, "sglang_speculative_algorithm", None):
        return None
    thresholds = (getattr(args, f"sglang_speculative_accept_threshold_{name}", None) for name in ("single", "acc"))
    single, acc = (1.0 if threshold is None else threshold for threshold in thresholds)
    return Speculation(threshold_single=single, threshold_acc=acc)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, LogProbDefinitionWarning, stacklevel=4)
