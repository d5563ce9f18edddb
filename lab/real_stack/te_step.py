# SPDX-License-Identifier: Apache-2.0
"""One training step's gradient of a decoder, by the hook in a host's own loss and by the whole loss."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from grpo.layout import ModelInputs, build_inputs
from grpo.loss import PolicyBatch, policy_loss
from megatron.core import parallel_state
from te_models import Decoder
from te_rollout import Rollout
from torch import Tensor

import mis_ext

MICRO_BATCH = 8
HOST = {
    "calculate_per_token_loss": False,
    "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp",
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "use_tis": True,
}
"""What a host's arguments say besides the correction's keys."""
CORRECTIONS = {
    "token TIS": {"tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0},
    "sequence TIS and gate": {
        "tis_level": "sequence",
        "tis_upper_bound": 2.0,
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.98,
        "rs_upper_bound": 1.02,
    },
}


class Step(dict[str, float]):
    """Loss and metrics by name, with the gradients of the parameters beside them."""

    gradients: list[Tensor]


def inputs_of(rollout: Rollout, decoder: Decoder) -> Iterator[tuple[slice, ModelInputs, list[int] | None]]:
    """Micro-batches of a rollout: which samples, what the model takes, and the one length if they are padded."""
    # As Megatron-Core's schedule does: Transformer Engine rounds weights to 8 bits in the first micro-batch alone.
    decoder.model.set_is_first_microbatch()
    for first in range(0, len(rollout.tokens), MICRO_BATCH):
        samples = slice(first, first + MICRO_BATCH)
        tokens = rollout.tokens[samples]
        longest = max(map(len, tokens))
        padded = None if decoder.variant.packed else [longest] * len(tokens)
        inputs = build_inputs(
            tokens,
            rollout.response_lengths[samples],
            max_seq_lens=padded,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            device=decoder.device,
        )
        yield samples, inputs, padded


@torch.no_grad()
def score(decoder: Decoder, rollout: Rollout) -> list[Tensor]:
    """Log-probs of this rank's tokens of each response, where the model is."""
    found: list[Tensor] = []
    for _, inputs, _ in inputs_of(rollout, decoder):
        scored = decoder.log_probs(decoder.logits(inputs), inputs)
        found += scored.split([len(index) for index in inputs.response_indices])
    return found


def step(
    decoder: Decoder,
    rollout: Rollout,
    proximal: list[Tensor],
    keys: dict[str, Any],
    path: Literal["hook", "whole loss"],
) -> Step:
    """Forward and backward over this data-parallel rank's share; loss and gradient are the mean over all samples."""
    args = Namespace(**HOST | keys, qkv_format="thd" if decoder.variant.packed else "bshd")
    if path == "whole loss":
        del args.custom_tis_function_path
    decoder.model.zero_grad(set_to_none=True)
    # The shares are equal.
    num_samples = len(rollout.tokens) * parallel_state.get_data_parallel_world_size()
    totals: dict[str, Tensor] = {}
    for samples, inputs, padded in inputs_of(rollout, decoder):
        logits = decoder.logits(inputs)
        lists = _lists(rollout, proximal, samples, inputs, decoder.device)
        if path == "hook":
            batch = PolicyBatch(
                train_log_probs=lists["log_probs"],
                rollout_log_probs=lists["rollout_log_probs"],
                advantages=lists["advantages"],
                loss_masks=lists["loss_masks"],
                response_indices=inputs.response_indices,
                total_lengths=lists["total_lengths"],
                response_lengths=lists["response_lengths"],
                max_seq_lens=padded,
            )
            loss, values = policy_loss(args, batch, decoder.log_probs(logits, inputs))
        else:
            given = lists | ({} if padded is None else {"max_seq_lens": padded})
            loss, values = mis_ext.policy_loss(args, given, logits)
        (loss / num_samples).backward()
        for name, value in (values | {"loss": loss.detach()}).items():
            totals[name] = totals.get(name, 0.0) + value.to(decoder.device, torch.float64)
    result = Step((name, _over_data_ranks(value) / num_samples) for name, value in totals.items())
    result.gradients = [_summed(parameter) for parameter in decoder.model.parameters()]
    return result


def parameter_norms(decoder: Decoder, gradients: list[Tensor]) -> Tensor:
    """The norm of each parameter's gradient, whole parameters under tensor parallelism too. Float64, on the CPU."""
    squares = []
    for parameter, gradient in zip(decoder.model.parameters(), gradients, strict=True):
        square = gradient.double().square().sum()
        if getattr(parameter, "tensor_model_parallel", False):
            dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        squares.append(square)
    return torch.stack(squares).sqrt().cpu()


def _lists(
    rollout: Rollout, proximal: list[Tensor], samples: slice, inputs: ModelInputs, device: torch.device
) -> dict[str, Any]:
    """A host's micro-batch: this context-parallel rank's parts of log-probs and advantages, whole masks."""
    lengths = rollout.response_lengths[samples]
    return {
        "unconcat_tokens": [tokens.to(device) for tokens in rollout.tokens[samples]],
        "loss_masks": [torch.ones(length, device=device) for length in lengths],
        "advantages": [
            rollout.advantages[samples][i].to(device).expand(len(index))
            for i, index in enumerate(inputs.response_indices)
        ],
        "log_probs": proximal[samples],
        "rollout_log_probs": [
            behavior.to(device)[index]
            for behavior, index in zip(rollout.behavior[samples], inputs.response_indices, strict=True)
        ],
        "total_lengths": [len(tokens) for tokens in rollout.tokens[samples]],
        "response_lengths": lengths,
    }


def _summed(parameter: torch.nn.Parameter) -> Tensor:
    gradient = parameter.grad.float()
    dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return gradient


def _over_data_ranks(value: Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(value)
