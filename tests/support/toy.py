# SPDX-License-Identifier: Apache-2.0
"""A small policy of which every response can be enumerated, so that expectations are exact sums.

The behavior and proximal policies are tables of next-token probabilities per prefix. Token 0 ends a response, and so
does the maximal length.
"""

import torch

VOCABULARY = 3
MAX_LENGTH = 4


class Toy:
    """Two policies over all responses; `sharpness` sets how far they are apart."""

    def __init__(self, *, seed: int, sharpness: float = 1.0, max_length: int = MAX_LENGTH, stops: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.behavior: dict[tuple, torch.Tensor] = {}
        self.proximal: dict[tuple, torch.Tensor] = {}
        self.responses: list[tuple] = []
        pending: list[tuple] = [()]
        while pending:
            prefix = pending.pop()
            logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
            shift = sharpness * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
            self.behavior[prefix] = logits.softmax(0)
            self.proximal[prefix] = (logits + shift).softmax(0)
            for token in range(VOCABULARY):
                longer = (*prefix, token)
                done = len(longer) == max_length or (stops and token == 0)
                (self.responses if done else pending).append(longer)
        self.value = {y: float(torch.randn((), generator=generator)) for y in self.responses}

    def log_probs(self, policy: dict, response: tuple) -> torch.Tensor:
        return torch.stack([policy[response[:t]][token] for t, token in enumerate(response)]).log()

    def probability(self, policy: dict, response: tuple) -> float:
        return float(self.log_probs(policy, response).sum().exp())

    def prefix_probability(self, policy: dict, prefix: tuple) -> float:
        return self.probability(policy, prefix) if prefix else 1.0

    def value_after(self, policy: dict, prefix: tuple) -> float:
        """Expected value of the responses that start with `prefix`, continued by `policy`."""
        total = 0.0
        for y in self.responses:
            if y[: len(prefix)] == prefix:
                total += self.probability(policy, y) * self.value[y]
        return total / self.prefix_probability(policy, prefix)
