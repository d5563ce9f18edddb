# SPDX-License-Identifier: Apache-2.0
"""The task: count on in steps of a given size, graded digit by digit; batched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_STEP_TOKEN = 10
NUM_NOISE = 6
PROMPT_LENGTH = NUM_NOISE + 2


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Prompts ``[B, P]`` of noise digits, the step and the start; and how many digits of each response are graded."""

    prompts_BP: Tensor
    mask_BL: Tensor

    @classmethod
    def draw(cls, count: int, length: int, generator: torch.Generator) -> Problems:
        """Draw problems; the grader reads 4/5 of the response or more."""
        digits = torch.randint(0, 10, (count, PROMPT_LENGTH), generator=generator)
        digits[:, NUM_NOISE] += FIRST_STEP_TOKEN
        num_graded = torch.randint(length - length // 5, length + 1, (count, 1), generator=generator)
        return cls(prompts_BP=digits, mask_BL=torch.arange(length) < num_graded)

    def repeat(self, times: int) -> Problems:
        """Every problem ``times`` times, one after the other."""
        return Problems(
            prompts_BP=self.prompts_BP.repeat_interleave(times, 0), mask_BL=self.mask_BL.repeat_interleave(times, 0)
        )

    def solve(self) -> Tensor:
        """``[B, L]``: the right responses."""
        counts_L = torch.arange(1, self.mask_BL.shape[1] + 1)
        step_B1, start_B1 = self.prompts_BP[:, -2:-1] - FIRST_STEP_TOKEN, self.prompts_BP[:, -1:]
        return (start_B1 + step_B1 * counts_L) % 10


def grade(prompts: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """``[..., B]``: the share of graded digits that are one step on from the digit before them, 0 to 1.

    The digit before is the one that the response really has, so that one slip costs one digit.
    """
    step, start = prompts[..., -2:-1] - FIRST_STEP_TOKEN, prompts[..., -1:]
    before = torch.cat([start, responses[..., :-1]], -1)
    right = (before < 10) & (responses == (before + step) % 10)
    return (right & mask).sum(-1) / mask.sum(-1)
