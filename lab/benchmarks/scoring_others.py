# SPDX-License-Identifier: Apache-2.0
"""Functions from logits to log-probs: ours, those of the frameworks, and other kernels, with their features."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from scoring_hosts import Host
from scoring_measure import guarded
from torch import Tensor

from mis_ext.scoring import score_tokens

Scoring = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Way(NamedTuple):
    """One function, and what it can answer.

    ``scores(logits [T, V], token_T)``. ``writes_over``: the logits are something else afterwards.
    """

    name: str
    scores: Scoring
    with_entropy: bool
    is_parallel: bool
    writes_over: bool = False


class Absent(NamedTuple):
    """One that cannot run here, and why."""

    name: str
    reason: str


def ways(hosts: dict[str, Host], options: Any) -> list[Way | Absent]:
    """All that is compared."""
    found: list[Way | Absent] = [
        Way("mis_ext", ours("gradient"), True, True),
        Way("mis_ext, in place", ours("gradient", inplace=True), True, True, True),
        Way("mis_ext, log-prob alone", ours("none"), False, True),
        Way("mis_ext, log-prob alone, in place", ours("none", inplace=True), False, True, True),
        Way("plain PyTorch", _plain, True, False),
    ]
    for host in hosts.values():
        found.append(Way(f"{host.name}'s function", partial(_of_host, host, True), True, True))
        found.append(Way(f"{host.name}'s function, log-prob alone", partial(_of_host, host, False), False, True))
    for name, make in (
        ("torch.compile of plain PyTorch", _compiled),
        ("Megatron-Core's fused cross entropy", _megatron),
        ("flash-attn's cross entropy", partial(_flash, options.flash_attn, False)),
        ("flash-attn's cross entropy, in place", partial(_flash, options.flash_attn, True)),
        ("Liger's cross entropy", _liger),
        ("Liger's vocabulary-parallel cross entropy", _liger_parallel),
    ):
        way = guarded(partial(make, name, options.device))
        found.append(Absent(name, way["missing"]) if isinstance(way, dict) else way)
    return found


def ours(entropy: Any, *, inplace: bool = False) -> Scoring:
    """``score_tokens`` with settings."""

    def scores(logits: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor | None]:
        return score_tokens(logits, token_T, entropy=entropy, inplace=inplace)

    return scores


def _plain(logits: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(-1, token_T.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _of_host(host: Host, with_entropy: bool, logits: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor | None]:
    return host.scores(logits, token_T, with_entropy)


def _compiled(name: str, device: str) -> Way:
    if device != "cuda":
        raise ValueError("measured on a GPU alone")
    return Way(name, torch.compile(_plain, dynamic=False), True, False)


def _megatron(name: str, device: str) -> Way:
    module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    mpu = importlib.import_module("megatron.core").mpu
    if not mpu.model_parallel_is_initialized():
        raise ValueError("needs the hosts' groups (--miles or --slime)")

    def scores(logits: Tensor, token_T: Tensor) -> tuple[Tensor, None]:
        group = mpu.get_tensor_model_parallel_group()
        loss = module.fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), token_T.unsqueeze(1), group)
        return -loss.squeeze(1), None

    return Way(name, scores, False, True, True)


def _flash(file: Any, inplace: bool, name: str, device: str) -> Way:
    if file is None:
        raise ValueError("--flash-attn FILE is not given")
    _check_gpu(device)
    spec = importlib.util.spec_from_file_location("flash_attn_cross_entropy", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def scores(logits: Tensor, token_T: Tensor) -> tuple[Tensor, None]:
        loss, _ = module.cross_entropy_loss(logits, token_T, inplace_backward=inplace)
        return -loss, None

    return Way(name, scores, False, True, inplace)


def _liger(name: str, device: str) -> Way:
    _check_gpu(device)
    function = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def scores(logits: Tensor, token_T: Tensor) -> tuple[Tensor, None]:
        return -function.apply(logits, token_T, None, -100, 0.0, 0.0, "none")[0], None

    return Way(name, scores, False, False, True)


def _liger_parallel(name: str, device: str) -> Way:
    _check_gpu(device)
    module = importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy")

    def scores(logits: Tensor, token_T: Tensor) -> tuple[Tensor, None]:
        loss = module.LigerVocabParallelCEFunction.apply(
            logits.unsqueeze(1), token_T.unsqueeze(1), None, -100, 0.0, "pytorch", "global"
        )
        return -loss.squeeze(1), None

    return Way(name, scores, False, True)


def _check_gpu(device: str) -> None:
    if device != "cuda":
        raise ValueError("its kernels need a GPU")
