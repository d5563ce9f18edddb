"""Two engines over a small vocabulary that differ in one known way."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY, LENGTH, COUNT = 48, 128, 112
KERNELS = 0.01
"""Standard deviation of the logits' noise: a k3 near 1e-4, as of bfloat16 kernels."""


class Engines(NamedTuple):
    """Logits of both ``[S, T, V]``."""

    behavior: Tensor
    proximal: Tensor
    generator: torch.Generator

    def noise(self, deviation: float | Tensor) -> Tensor:
        return torch.randn(self.behavior.shape, generator=self.generator, dtype=torch.float64) * deviation

    def sampled(self) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of tokens that the engine sampled: the trainer's and the engine's."""
        behavior, proximal = (logits.log_softmax(-1) for logits in (self.behavior, self.proximal))
        flat = behavior.exp().view(-1, behavior.shape[-1])
        chosen = torch.multinomial(flat, 1, generator=self.generator).view(*behavior.shape[:2], 1)
        return [*proximal.gather(-1, chosen)[..., 0].float()], [*behavior.gather(-1, chosen)[..., 0].float()]


def engines(seed: int, *, kernels: float = KERNELS) -> Engines:
    """Engines that differ by the noise of kernels; about half of the tokens are certain."""
    logits, noise, state = _drawn(seed)
    generator = torch.Generator()
    generator.set_state(state)
    return Engines(logits + noise * kernels, logits, generator)


@cache
def _drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, noise of deviation 1, and where the generator is after them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (COUNT, LENGTH, VOCABULARY)
    sharpness = 0.5 + 6.0 * torch.rand(COUNT, LENGTH, 1, generator=generator, dtype=torch.float64)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness
    return logits, torch.randn(shape, generator=generator, dtype=torch.float64), generator.get_state()


def top_p(logits: Tensor, share: float) -> Tensor:
    """Logits of what nucleus sampling leaves."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    is_left = ordered.cumsum(-1) - ordered < share
    return logits.masked_fill(~torch.zeros_like(is_left).scatter(-1, order, is_left), -math.inf)
