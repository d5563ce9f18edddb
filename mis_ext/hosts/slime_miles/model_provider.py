# SPDX-License-Identifier: Apache-2.0
"""slime and Miles without logits: the model that their provider makes, and the pass that scores the rollout."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from mis_ext.hosts.megatron import NoLogits, hand_over_hidden_states
from mis_ext.hosts.runs import current_run, read_argument
from mis_ext.hosts.slime_miles.policy_loss import is_miles, scores_without_logits
from mis_ext.keys.run_config import RunConfig

FLAG = "--custom-model-provider-path"
_SCORES = "get_log_probs_and_entropy"


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """The host's own model, whose output layer hands over hidden states in place of logits.

    For ``--custom-model-provider-path mis_ext.model_provider`` beside ``mis_ext.policy_loss``. The host's passes that
    score the rollout with the trained, the reference or a teacher model take hidden states too: no flag of the hosts
    says which function does that, so the name under which their training actor calls it is set to one of ours. A
    critic's layer takes the place of the changed one, and values are what they were.

    Args:
        pre_process: Whether this pipeline stage has the embedding.
        post_process: Whether it has the output layer.
        vp_stage: Which of a rank's stages it is.

    Raises:
        ValueError: Something that the run asks for needs logits.
    """
    # The hosts' Megatron-LM has it, Megatron-Core alone has not.
    args = import_module("megatron.training.global_vars").get_args()
    refuse_missing_logits(args, current_run(args, whole_loss=True).config)
    host = "miles" if is_miles() else "slime"
    of_host = copy.copy(args)
    of_host.custom_model_provider_path = None
    provider = import_module(f"{host}.backends.megatron_utils.model_provider").get_model_provider_func(of_host)
    model = provider(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    if post_process:
        hand_over_hidden_states(model)
        _replace_scoring(import_module(f"{host}.backends.megatron_utils.actor"))
    return model


def refuse_missing_logits(args: Any, config: RunConfig) -> None:
    """Refuse what needs the logits that the model no longer has.

    Raises:
        ValueError: A flag or key does.
    """
    loss, why = config.whole_loss, None
    if loss is None or read_argument(args, "loss_type") != "custom_loss":
        why = (
            "only mis_ext.policy_loss takes hidden states: give --loss-type custom_loss --custom-loss-function-path "
            "mis_ext.policy_loss"
        )
    elif loss.scoring.by == "host":
        why = "the host's own function scores here (mis_loss_scoring: host, --true-on-policy-mode, --allgather-cp)"
    elif loss.scoring.inplace:
        why = "mis_loss_inplace: no effect without logits; remove it"
    elif is_miles() and read_argument(args, "recompute_loss_function"):
        # Its checkpoint is the reentrant one: an inner backward pass would go through the model, and the outer again.
        why = "--recompute-loss-function of Miles detaches the logits; remove it, without logits it frees nothing"
    if why is not None:
        raise ValueError(f"{FLAG} mis_ext.model_provider: {why}")


def _replace_scoring(actor: Any) -> None:
    """Set the name under which the host's training actor calls the function for log-probs.

    Raises:
        ValueError: It has no such name.
    """
    of_host = getattr(actor, _SCORES, None)
    if of_host is None:
        raise ValueError(f"{FLAG} mis_ext.model_provider: {actor.__name__} has no {_SCORES} any more; remove the flag")
    if getattr(of_host, "__module__", None) != __name__:
        setattr(actor, _SCORES, _scoring(of_host))


def _scoring(of_host: Callable[..., Any]) -> Callable[..., Any]:
    """The host's function for log-probs, and ours where it is called without logits."""

    @functools.wraps(of_host, assigned=())
    def get_log_probs_and_entropy(logits: Tensor, **given: Any) -> Any:
        return scores_without_logits(logits, **given) if isinstance(logits, NoLogits) else of_host(logits, **given)

    return get_log_probs_and_entropy
