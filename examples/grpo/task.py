# SPDX-License-Identifier: Apache-2.0
"""The task: continue counting in steps of a given size, graded digit by digit."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

FIRST_STEP_TOKEN = 10
"""Tokens 0 to 9 are digits. This token and the next nine mean "in steps of 0", ..., "in steps of 9"."""
VOCAB_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt, and the input of the grader.

    Attributes:
        step: The size of the steps, 0 to 9.
        start: The digit before the first digit of the response.
        noise: Meaningless digits at the start of the prompt.
        num_graded: Digits of the response that the grader reads.
    """

    step: int
    start: int
    noise: tuple[int, ...]
    num_graded: int

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt: noise, step, start."""
        return [*self.noise, FIRST_STEP_TOKEN + self.step, self.start]

    def grade(self, response_ids: list[int]) -> float:
        """See :func:`grade`."""
        return grade(self, response_ids)

    def solve(self, length: int) -> list[int]:
        """Return the right response of a given length."""
        return [(self.start + self.step * count) % 10 for count in range(1, length + 1)]


@dataclass(frozen=True, kw_only=True)
class CountingTask:
    """Count: each digit is the previous digit plus the step of the prompt, modulo 10.

    A response always has ``response_length`` digits. The grader reads a number of them that is drawn per problem. The
    other digits have no loss, like observation tokens in other tasks. Noise gives prompts different lengths.

    Attributes:
        response_length: Digits of a response.
        min_graded: The fewest digits that the grader reads, unless the response is shorter.
        max_noise: The most noise digits.
    """

    response_length: int = 40
    min_graded: int = 32
    max_noise: int = 7

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and its response."""
        return self.max_noise + 2 + self.response_length

    def sample(self, rng: Random) -> Problem:
        """Draw one problem."""
        return Problem(
            step=rng.randrange(10),
            start=rng.randrange(10),
            noise=tuple(rng.randrange(10) for _ in range(rng.randint(0, self.max_noise))),
            num_graded=rng.randint(min(self.min_graded, self.response_length), self.response_length),
        )

    def loss_mask(self, problem: Problem, num_tokens: int) -> list[int]:
        """Return 1 for every graded digit of a response and 0 for the other digits."""
        return [int(position < problem.num_graded) for position in range(num_tokens)]


def grade(problem: Problem, response_ids: list[int]) -> float:
    """Return the share of graded digits that are one step after the previous digit, 0 to 1.

    The previous digit is that of the response itself, so one error costs one digit. Tokens that are not digits are
    wrong, and so is the digit after them. Missing digits are wrong.
    """
    line = [problem.start, *response_ids[: problem.num_graded]]
    right = sum(before < 10 and after == (before + problem.step) % 10 for before, after in pairwise(line))
    return right / problem.num_graded
