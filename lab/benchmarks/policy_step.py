# SPDX-License-Identifier: Apache-2.0
"""The rest of a policy-loss step: log-probs and entropy over a large vocabulary, and the gradient of the logits."""

from __future__ import annotations

import statistics
import time

import torch

VOCABULARY = 151_936
CHUNK = {"cuda": 2048, "cpu": 64}
RUNS = 3
# A CPU measures this many tokens and scales up.
MAX_CPU_TOKENS = 128


def policy_step_seconds(tokens: int, device: torch.device) -> tuple[float, int]:
    """Median time for ``tokens`` tokens, and how many of them were measured.

    One buffer of bfloat16 logits is gone through again and again, so that any number of tokens fits. Per chunk:
    log-softmax in float32, the sampled tokens' log-probs, the entropy (as a metric, without gradient, the cheaper
    choice), and the gradient of a weighted sum of the log-probs with respect to the logits.
    """
    measured = tokens if device.type == "cuda" else min(tokens, MAX_CPU_TOKENS)
    chunk = min(CHUNK[device.type], measured)
    logits = torch.randn(chunk, VOCABULARY, dtype=torch.bfloat16, device=device).requires_grad_()
    chosen = torch.randint(VOCABULARY, (chunk, 1), device=device)
    loss_gradient = torch.randn(chunk, device=device)
    _step_over_chunk(logits, chosen, loss_gradient, chunk)
    runs = []
    for _ in range(RUNS):
        _synchronize(device)
        start = time.perf_counter()
        for begin in range(0, measured, chunk):
            _step_over_chunk(logits, chosen, loss_gradient, min(chunk, measured - begin))
        _synchronize(device)
        runs.append(time.perf_counter() - start)
    return statistics.median(runs) * tokens / measured, measured


def _step_over_chunk(
    logits: torch.Tensor, chosen: torch.Tensor, loss_gradient: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(logits[:size].float(), dim=-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    chosen_log_probs = log_probs.gather(-1, chosen[:size]).squeeze(-1)
    (gradient,) = torch.autograd.grad((chosen_log_probs * loss_gradient[:size]).sum(), logits)
    return entropy, gradient


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
