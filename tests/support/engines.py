# SPDX-License-Identifier: Apache-2.0
"""Two engines over a small vocabulary that differ in one known way."""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.tools.diagnosis import Diagnosis
from mis_ext.tools.report import Collector, Part

VOCABULARY, LENGTH, COUNT = 48, 128, 56
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
        chosen = sampled_ids(behavior.exp(), self.generator)
        return [*proximal.gather(-1, chosen)[..., 0].float()], [*behavior.gather(-1, chosen)[..., 0].float()]


def engines(seed: int, *, kernels: float = KERNELS, count: int = COUNT) -> Engines:
    """Engines that differ by the noise of kernels; about half of the tokens are certain."""
    logits, noise, state = _drawn(seed, count)
    generator = torch.Generator()
    generator.set_state(state)
    return Engines(logits + noise * kernels, logits, generator)


@cache
def _drawn(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, noise of standard deviation 1, and the state of the generator after them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, LENGTH, VOCABULARY)
    sharpness = 0.5 + 6.0 * torch.rand(count, LENGTH, 1, generator=generator, dtype=torch.float64)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness
    return logits, torch.randn(shape, generator=generator, dtype=torch.float64), generator.get_state()


def sampled_ids(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """The draws of ``torch.multinomial``, ``[..., 1]``. Most of its time is for random numbers, which are cached."""
    waits, state = _waits(probabilities.shape, probabilities.dtype, generator.get_state().numpy().tobytes())
    generator.set_state(state)
    return (probabilities / waits).argmax(-1, keepdim=True)


@lru_cache(maxsize=8)
def _waits(shape: torch.Size, dtype: torch.dtype, state: bytes) -> tuple[Tensor, Tensor]:
    """Exponentially distributed numbers of a generator in this state, and its state after them."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return torch.empty(shape, dtype=dtype).exponential_(generator=generator), generator.get_state()


def top_p(logits: Tensor, share: float) -> Tensor:
    """Logits after nucleus sampling."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    is_left = ordered.cumsum(-1) - ordered < share
    return logits.masked_fill(~torch.zeros_like(is_left).scatter(-1, order, is_left), -math.inf)


def collected(*parts: Part) -> Collector:
    """The evidence of the report for a run."""
    collector = Collector()
    for part in parts:
        collector.add(part)
    return collector


def diagnosed(*parts: Part) -> list[Diagnosis]:
    return collected(*parts).diagnoses()


def causes(*parts: Part) -> list[str]:
    return [found.cause for found in diagnosed(*parts)]
