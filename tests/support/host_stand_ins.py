# SPDX-License-Identifier: Apache-2.0
"""Replacements for the training modules of slime, vime, and Miles, as far as the full loss uses them, token by token.

They are written from the interface of the frameworks, in plain operations, row by row. vime's is that of 96e0e22e, with
padded batches and without top-p; since 2b83ea20 it has the interface of slime.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import loss_cases
import pytest
import thread_ranks
import torch
from torch.utils.checkpoint import checkpoint

import mis_ext
from mis_ext.frameworks import MILES, SLIME, VIME
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.slime_miles import policy_loss as hosts

HOSTS = ("slime", "vime", "miles")


def called(keys: dict, batch: dict, *, recompute: bool | None = None) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Loss, metrics and gradient, called like a framework; `recompute` is the mode of its checkpoint."""
    args = loss_cases.host_args(**keys)
    batch = loss_cases.with_options(batch, args)
    logits = batch.pop("logits").clone().requires_grad_()
    if recompute is None:
        loss, metrics = mis_ext.policy_loss(args, batch, logits)
    else:
        loss, metrics = checkpoint(mis_ext.policy_loss, args, batch, logits, None, use_reentrant=recompute)
    loss.backward()
    return loss.detach(), metrics, logits.grad


def here() -> Groups:
    """The groups of this thread of `thread_ranks`, or of a single process."""
    rank = getattr(thread_ranks._here, "rank", None)
    return Groups() if rank is None else rank.groups


@contextmanager
def running(host: str, *, tp: Any = None) -> Iterator[SimpleNamespace]:
    """`host` runs in this process, with its modules imported. The namespace records their calls."""
    with pytest.MonkeyPatch.context() as patch:
        asked = SimpleNamespace(scored=[], captured=[])
        patch.setattr(hosts, "find_groups", lambda state=None: here())
        if host != "miles":
            module = _slime(asked) if host == "slime" else _vime(asked)
            patch.setitem(sys.modules, module.__name__, module)
            if tp is not None:
                patch.setitem(sys.modules, "megatron.core.parallel_state", _megatron(tp))
        else:
            parallel = ModuleType(hosts.MILES_PARALLEL)
            alone = SimpleNamespace(rank=0, size=1, group="of one rank, which nobody asks")
            parallel.get_parallel_state = lambda: SimpleNamespace(tp=alone if tp is None else tp)
            patch.setitem(sys.modules, MILES.loss, _miles(asked))
            patch.setitem(sys.modules, hosts.MILES_PARALLEL, parallel)
        yield asked


def _slime(asked: SimpleNamespace) -> ModuleType:
    module = ModuleType(SLIME.loss)

    def get_log_probs_and_entropy(logits, *, args, with_entropy, top_p_token_ids=None, top_p_token_offsets=None, **of):
        asked.scored.append({"with_entropy": with_entropy, "top_p_token_ids": top_p_token_ids})
        assert logits.dtype == torch.float32
        kept = None if top_p_token_ids is None else (top_p_token_ids, top_p_token_offsets)
        found = scores(logits, args.rollout_temperature, kept=kept, padded_lengths=None, **of)
        if args.entropy_coef == 0.0:
            found["entropy"] = [sample.detach() for sample in found["entropy"]]
        return torch.empty(0), found

    def top_p(args, batch):
        names = ("top_p_token_ids", "top_p_token_offsets")
        return {} if args.rollout_top_p == 1.0 else {name: batch[f"rollout_{name}"] for name in names}

    module.get_log_probs_and_entropy, module.get_rollout_top_p_logprob_kwargs = get_log_probs_and_entropy, top_p
    module._LOG_PROB_CAPTURE = None
    module._maybe_capture_log_probs = lambda batch, log_probs: asked.captured.append(log_probs)
    return module


def _vime(asked: SimpleNamespace) -> ModuleType:
    module = ModuleType(VIME.loss)

    def get_log_probs_and_entropy(logits, *, args, with_entropy, max_seq_lens=None, **of):
        asked.scored.append({"with_entropy": with_entropy, "max_seq_lens": max_seq_lens})
        assert logits.dtype == torch.float32
        found = scores(logits, args.rollout_temperature, kept=None, padded_lengths=max_seq_lens, **of)
        return torch.empty(0), found if with_entropy else {"log_probs": found["log_probs"]}

    module.get_log_probs_and_entropy = get_log_probs_and_entropy
    return module


def _megatron(tp: Any) -> ModuleType:
    module = ModuleType("megatron.core.parallel_state")
    module.model_parallel_is_initialized = lambda: True
    module.get_tensor_model_parallel_rank = lambda: tp.rank
    module.get_tensor_model_parallel_world_size = lambda: tp.size
    module.get_tensor_model_parallel_group = lambda: tp.group
    return module


def _miles(asked: SimpleNamespace) -> ModuleType:
    module = ModuleType(MILES.loss)

    def get_log_probs_and_entropy(logits, *, args, with_entropy, entropy_requires_grad, max_seq_lens, **of):
        asked.scored.append({"with_entropy": with_entropy, "entropy_requires_grad": entropy_requires_grad})
        temperature = args.rollout_temperature if args.rollout_temperature > 0 else 1.0
        found = scores(logits, temperature, kept=None, padded_lengths=max_seq_lens, **of)
        if not entropy_requires_grad:
            found["entropy"] = [sample.detach() for sample in found["entropy"]]
        return found if with_entropy else {"log_probs": found["log_probs"]}

    module.get_log_probs_and_entropy = get_log_probs_and_entropy
    return module


def scores(
    logits: torch.Tensor,
    temperature: float,
    *,
    kept: tuple[Sequence, Sequence] | None,
    padded_lengths: Sequence[int] | None,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> dict[str, list[torch.Tensor]]:
    """Values of this rank's response tokens, per sample."""
    rows, begin = logits.reshape(-1, logits.shape[-1]), 0
    found: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
    for index, (ids, total, response) in enumerate(zip(unconcat_tokens, total_lengths, response_lengths, strict=True)):
        length = total if padded_lengths is None else padded_lengths[index]
        positions = _positions(length, here())
        log_probs, entropies = [rows.new_zeros(0)], [rows.new_zeros(0)]
        for row, position in enumerate(positions, start=begin):
            place = position + 1 - (total - response)
            if not 0 <= place < response:
                continue
            logit_V = (rows[row] / temperature).float()
            whole_V = logit_V.log_softmax(-1)
            entropies.append(-(whole_V.exp() * whole_V).sum()[None])
            token = int(ids[position + 1])
            if kept is not None:
                logit_V = logit_V.masked_fill(
                    _is_cut(logit_V, token, place, *(each[index] for each in kept)), -math.inf
                )
            log_probs.append(logit_V.log_softmax(-1)[token][None])
        found["log_probs"].append(torch.cat(log_probs))
        found["entropy"].append(torch.cat(entropies))
        begin += len(positions)
    return found


def _positions(length: int, groups: Groups) -> list[int]:
    if groups.cp_size == 1:
        return [*range(length)]
    chunk = math.ceil(length / (2 * groups.cp_size))
    chunks = (groups.cp_rank, 2 * groups.cp_size - 1 - groups.cp_rank)
    return [position for number in chunks for position in range(number * chunk, (number + 1) * chunk)]


def _is_cut(logit_V: torch.Tensor, token: int, place: int, ids: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    if place + 1 >= len(offsets):
        return torch.zeros_like(logit_V, dtype=torch.bool)
    is_cut_V = torch.ones_like(logit_V, dtype=torch.bool)
    for kept in [*ids[int(offsets[place]) : int(offsets[place + 1])], token]:
        is_cut_V[int(kept)] = False
    return is_cut_V
