# SPDX-License-Identifier: Apache-2.0
"""Bias and variance of corrections, exactly: a policy whose responses can all be listed.

No rollout is drawn. Every response of a small vocabulary is scored under both policies, and the mean and the variance
of the corrected policy gradient are sums over all of them, with mis_ext's own weights.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import Tensor

import mis_ext

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .group import Method
from .pictures import save

LENGTH, VOCABULARY = 10, 2
NOISES = (0.03, 0.1, 0.2, 0.4, 0.8)
BATCHES = (16, 64, 256, 1024, 4096, 16384, 65536)
NUM_POLICIES = 20
ROLLOUT, NUM_ROLLOUTS = 256, 100
MICRO_BATCHES = (1, 4, 16, 64, 256)


def report(methods: tuple[Method, ...], output: Path) -> None:
    """Write ``enumerable.md`` and its plot."""
    relative = {noise: _errors(methods, noise) for noise in NOISES}
    lines = [
        "# Bias and variance by level, exactly",
        "",
        "`python lab/studies/evidence.py report`; no GPU, no rollouts.",
        f"{NUM_POLICIES} random policies over all {VOCABULARY**LENGTH:,} responses of {LENGTH} tokens.",
        "Rewards are N(0, 1).",
        "The engine's logits have noise.",
        "Bias is the length of the mean corrected gradient minus the true one.",
        "Spread is the root of the summed variances of one response's gradient.",
        "Both are over the length of the true gradient, medians over the policies.",
        "A batch of n responses has the squared error bias^2 + spread^2 / n; the smallest is bold.",
        "Nothing is normalised.",
        "",
        "| noise | k3 | method | bias | spread | " + " | ".join(f"error at n={n:,}" for n in BATCHES) + " |",
        "|---" * (5 + len(BATCHES)) + "|",
    ]
    figure, axes = plt.subplots(1, len(NOISES), figsize=(4 * len(NOISES), 3.8), sharey=True, constrained_layout=True)
    for axis, (noise, (k3, errors)) in zip(axes, relative.items(), strict=True):
        table = {name: [np.sqrt(bias**2 + spread**2 / n) for n in BATCHES] for name, (bias, spread) in errors.items()}
        best = [min(table, key=lambda name: table[name][i]) for i in range(len(BATCHES))]
        for name, (bias, spread) in errors.items():
            cells = [f"**{x:.3f}**" if best[i] == name else f"{x:.3f}" for i, x in enumerate(table[name])]
            lines.append(f"| {noise} | {k3:.1e} | {name} | {bias:.3f} | {spread:.2f} | {' | '.join(cells)} |")
            axis.plot(BATCHES, table[name], label=name)
        axis.set(title=f"noise {noise}, k3 {k3:.1e}", xlabel="responses", xscale="log", yscale="log")
    axes[0].set_ylabel("error of the gradient, relative")
    axes[0].legend(fontsize=7)
    save(figure, output / "enumerable.png")
    lines += ["", "![error](enumerable.png)", *_normalisation(methods)]
    (output / "enumerable.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(output / "enumerable.md")


def _normalisation(methods: tuple[Method, ...]) -> list[str]:
    """A section: how many responses share the mean weight that they are divided by."""
    lines = [
        "",
        "## Self-normalisation per call or per rollout",
        "",
        f"{NUM_ROLLOUTS} rollouts of {ROLLOUT} drawn responses for each of {NUM_POLICIES} policies.",
        "The weights of a call are divided by their mean.",
        "Error of a rollout's mean gradient, relative, as root mean square; medians over policies.",
        "",
        "| noise | method | not normalised | " + " | ".join(f"calls of {size}" for size in MICRO_BATCHES) + " |",
        "|---" * (3 + len(MICRO_BATCHES)) + "|",
    ]
    weighted = [method for method in methods if method.name in ("token_tis", "sequence_tis")]
    for noise in (0.2, 0.4, 0.8):
        for method in weighted:
            problems = [Enumerated(noise, seed) for seed in range(NUM_POLICIES)]
            errors = np.array([[p.rollout_error(method, size) for size in (None, *MICRO_BATCHES)] for p in problems])
            cells = " | ".join(f"{error:.3f}" for error in np.median(errors, axis=0))
            lines.append(f"| {noise} | {method.name} | {cells} |")
    return lines


def _errors(methods: tuple[Method, ...], noise: float) -> tuple[float, dict[str, tuple[float, float]]]:
    """k3, and per method bias and spread relative to the true gradient, medians over policies."""
    k3s, found = [], {method.name: [] for method in methods}
    for seed in range(NUM_POLICIES):
        problem = Enumerated(noise, seed)
        k3s.append(problem.k3)
        for method in methods:
            found[method.name].append(problem.bias_and_spread(method))
    medians = {name: tuple(np.median(np.array(pairs), axis=0).tolist()) for name, pairs in found.items()}
    return float(np.median(k3s)), medians


class Enumerated:
    """All responses of one random policy, and of an engine whose logits differ by noise."""

    def __init__(self, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._responses = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
        # One row of logits per prefix: a node of the tree of all responses.
        num_nodes = (VOCABULARY**LENGTH - 1) // (VOCABULARY - 1)
        logits = torch.randn(num_nodes, VOCABULARY, generator=generator, dtype=torch.float64)
        noisy = logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        self._reward = torch.randn(len(self._responses), generator=generator, dtype=torch.float64)
        self._nodes = self._prefixes()
        self._logits = logits.requires_grad_()
        self._proximal = self._logprobs(self._logits)
        self._behavior = self._logprobs(noisy)
        (self._true_gradient,) = torch.autograd.grad(
            (self._proximal.sum(1).exp() * self._reward).sum(), self._logits, retain_graph=True
        )

    @property
    def k3(self) -> float:
        """Mean per token, over the engine's responses."""
        d = (self._proximal - self._behavior).detach()
        return float(((d.exp() - 1 - d).mean(1) * self._behavior.sum(1).exp()).sum())

    def bias_and_spread(self, method: Method) -> tuple[float, float]:
        """Relative to the length of the true gradient."""
        probability = self._behavior.sum(1).exp()
        token_gradient = self._token_gradients(self._weights(method), torch.arange(len(self._responses)))
        mean, second = (torch.zeros_like(self._true_gradient) for _ in range(2))
        # A response visits a node once: the second moments of nodes need no cross terms.
        mean.index_put_((self._nodes,), token_gradient * probability[:, None, None], accumulate=True)
        second.index_put_((self._nodes,), token_gradient.square() * probability[:, None, None], accumulate=True)
        length = self._true_gradient.norm()
        spread = (second - mean.square()).sum().clamp(min=0).sqrt()
        return float((mean - self._true_gradient).norm() / length), float(spread / length)

    def rollout_error(self, method: Method, call_size: int | None) -> float:
        """Of drawn rollouts: root mean square of the relative error of the mean gradient.

        Args:
            method: Its weights; their mean in a call is taken over tokens or sequences, which have as many tokens each.
            call_size: Responses of a call, whose weights are divided by their mean; None: not divided.
        """
        generator = torch.Generator().manual_seed(0)
        probability = self._behavior.sum(1).exp()
        drawn = probability.multinomial(NUM_ROLLOUTS * ROLLOUT, replacement=True, generator=generator)
        weights = self._weights(method)[drawn]
        if call_size is not None:
            calls = weights.view(-1, call_size, LENGTH)
            weights = (calls / calls.mean((1, 2), keepdim=True)).view_as(weights)
        rollouts = torch.arange(NUM_ROLLOUTS).repeat_interleave(ROLLOUT)[:, None]
        gradient = self._token_gradients(weights, drawn) / ROLLOUT
        mean = torch.zeros(NUM_ROLLOUTS, *self._logits.shape, dtype=torch.float64)
        mean.index_put_((rollouts, self._nodes[drawn]), gradient, accumulate=True)
        errors = (mean - self._true_gradient).flatten(1).square().sum(1)
        return float(errors.mean().sqrt() / self._true_gradient.norm())

    def _token_gradients(self, weights: Tensor, responses: Tensor) -> Tensor:
        """``[N, LENGTH, VOCABULARY]``: weight * reward * (one-hot - probabilities), of the nodes on the way."""
        softmax = self._logits.detach().softmax(-1)[self._nodes[responses]]
        one_hot = torch.nn.functional.one_hot(self._responses[responses], VOCABULARY)
        return (one_hot - softmax) * (weights * self._reward[responses, None])[..., None]

    def _weights(self, method: Method) -> Tensor:
        proximal, behavior = self._proximal.detach(), self._behavior
        if method.config is None:
            return torch.ones_like(behavior)
        corrected = mis_ext.correct_padded(
            method.config.replace(normalize_over=None),
            proximal_logprobs=proximal.float(),
            behavior_logprobs=behavior.float(),
            response_mask=torch.ones(proximal.shape),
        )
        return torch.where(corrected.keep_mask, corrected.weights, 0.0).double()

    def _prefixes(self) -> Tensor:
        """``[responses, LENGTH]``: the node before each token, level by level."""
        index = torch.zeros(len(self._responses), dtype=torch.int64)
        nodes, first = [], 0
        for position in range(LENGTH):
            nodes.append(first + index)
            first += VOCABULARY**position
            index = index * VOCABULARY + self._responses[:, position]
        return torch.stack(nodes, 1)

    def _logprobs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[self._nodes].gather(-1, self._responses[..., None])[..., 0]
