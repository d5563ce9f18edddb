# SPDX-License-Identifier: Apache-2.0
"""The task: count on in steps of a given size, graded digit by digit."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

FIRST_STEP_TOKEN = 10
"""Tokens 0 to 9 are digits; this one and the next nine say "in steps of 0", ..., "in steps of 9"."""
VOCAB_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt and what the grader needs.

    Attributes:
        step: The size of the steps, 0 to 9.
        start: The digit before the first one of the response.
        noise: Digits without meaning that begin the prompt.
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
    """Count on: each digit is the one before it plus the step of the prompt, modulo 10.

    A response has always ``response_length`` digits, of which the grader reads a number drawn per problem. The others
    carry no loss, as observation tokens of other tasks do. Noise makes prompts of different lengths.

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
        """Return 1 for every graded digit of a response and 0 for the others."""
        return [int(position < problem.num_graded) for position in range(num_tokens)]


def grade(problem: Problem, response_ids: list[int]) -> float:
    """Return the share of graded digits that are one step on from the digit before them, 0 to 1.

    The digit before is the one that the response really has, so that one slip costs one digit. Tokens that are no
    digits are wrong, and so is the digit after them; missing digits are wrong.
    """
    line = [problem.start, *response_ids[: problem.num_graded]]
    right = sum(before < 10 and after == (before + problem.step) % 10 for before, after in pairwise(line))
    return right / problem.num_graded
