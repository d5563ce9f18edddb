"""The task: decipher a line of digits, graded token by token."""

from dataclasses import dataclass
from random import Random

KEY_TOKEN = 10
"""Precedes the key digit."""
ANSWER_TOKEN = 11
"""Ends the prompt."""
VOCAB_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt and what the grader expects.

    Attributes:
        prompt_ids: ``noise... KEY key digits... ANSWER``.
        answer_ids: The graded tokens: the leading digits, each advanced by the key modulo 10.
    """

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class CipherTask:
    """Advance every digit of a line by a key digit, modulo 10.

    A response has always ``num_digits`` tokens, of which the grader reads the first ``len(answer_ids)``, a number drawn
    per problem. The others carry no loss, as observation tokens do. Leading noise makes prompts of different lengths.

    Attributes:
        num_digits: Digits of a line, hence the length of a response.
        min_graded: The fewest tokens that the grader reads.
        max_noise: The most noise digits before the key.
    """

    num_digits: int = 40
    min_graded: int = 32
    max_noise: int = 7

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and its response."""
        return self.max_noise + 3 + 2 * self.num_digits

    def sample(self, rng: Random) -> Problem:
        """Draw one problem."""
        noise = [rng.randrange(10) for _ in range(rng.randint(0, self.max_noise))]
        key = rng.randrange(10)
        digits = [rng.randrange(10) for _ in range(self.num_digits)]
        num_graded = rng.randint(self.min_graded, self.num_digits)
        return Problem(
            prompt_ids=[*noise, KEY_TOKEN, key, *digits, ANSWER_TOKEN],
            answer_ids=[(digit + key) % 10 for digit in digits[:num_graded]],
        )

    def loss_mask(self, problem: Problem) -> list[int]:
        """Return 1 for every graded token of a response and 0 for the others."""
        num_graded = len(problem.answer_ids)
        return [1] * num_graded + [0] * (self.num_digits - num_graded)


def grade(problem: Problem, response_ids: list[int]) -> float:
    """Return the fraction of graded tokens that are right, 0 to 1; a missing token is wrong."""
    right = sum(expected == given for expected, given in zip(problem.answer_ids, response_ids, strict=False))
    return right / len(problem.answer_ids)
