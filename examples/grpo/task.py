"""The task: continue a line of digits by a rule, graded digit by digit."""

from dataclasses import dataclass
from random import Random

START_TOKEN = 10
"""Begins every prompt."""
VOCAB_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt and what the grader expects.

    Attributes:
        prompt_ids: ``START digits...``.
        answer_ids: The digits that the grader reads.
    """

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class DigitSumTask:
    """Continue a line of digits: each is the sum of the two before it, modulo 10.

    One slip spoils what follows, as in any chain of calculations. A response has always ``response_length`` digits, of
    which the grader reads a number drawn per problem; the others carry no loss, as observation tokens of other tasks do.

    Attributes:
        response_length: Digits of a response.
        min_graded: The fewest digits that the grader reads; at most ``response_length``.
        max_given: The most digits that a prompt gives; at least two, of which the last two matter.
    """

    response_length: int = 40
    min_graded: int = 32
    max_given: int = 9

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and its response."""
        return 1 + self.max_given + self.response_length

    def sample(self, rng: Random) -> Problem:
        """Draw one problem."""
        given = [rng.randrange(10) for _ in range(rng.randint(2, self.max_given))]
        line = list(given)
        for _ in range(rng.randint(min(self.min_graded, self.response_length), self.response_length)):
            line.append((line[-2] + line[-1]) % 10)
        return Problem(prompt_ids=[START_TOKEN, *given], answer_ids=line[len(given) :])

    def loss_mask(self, problem: Problem) -> list[int]:
        """Return 1 for every graded digit of a response and 0 for the others."""
        num_graded = len(problem.answer_ids)
        return [1] * num_graded + [0] * (self.response_length - num_graded)


def grade(problem: Problem, response_ids: list[int]) -> float:
    """Return the share of graded digits that are right, 0 to 1; a missing digit is wrong."""
    right = sum(expected == given for expected, given in zip(problem.answer_ids, response_ids, strict=False))
    return right / len(problem.answer_ids)
