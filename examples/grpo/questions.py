# SPDX-License-Identifier: Apache-2.0
"""Text questions with automatically checked responses, for models with a chat template.

``arithmetic``: products, sums, the largest of three numbers. ``arithmetic_steps``: the same, with steps before the
result. ``story``: a story, with a higher reward for more words without the letter e; responses stay long, and the next
word stays uncertain. ``story_answer``: a story that ends with the largest of three numbers; reward 1 or 0, and rarely 1
at first. ``reasoning_gym:NAME``: a task of the package ``reasoning-gym``, such as ``reasoning_gym:chain_sum``.
``prepared:FILE``: questions with a numeric result, drawn from that package by ``examples/questions/prepare.py``; reward
1 if the last number of a response is right.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

# Also importable in slime's process, which has no other modules of the examples.
sys.path.append(str(Path(__file__).parents[1] / "questions"))
from arithmetic import draw_task, is_right

GYM, PREPARED = "reasoning_gym:", "prepared:"
MAX_PROMPT = 512
# One in this many questions is held out.
HELD_OUT_SHARE = 8
# After this many draws of the other kind, assume that this kind has no questions.
MAX_DRAWS = 1000

# Subjects of stories, and the number of different words without an e, of at least three letters, for reward 1.
THINGS = (
    *("baker", "bear", "bell", "bridge", "castle", "clock", "cloud", "comet", "crow", "doctor", "farmer", "forest"),
    *("fox", "garden", "ghost", "goat", "island", "king", "lamp", "lighthouse", "map", "miller", "mountain", "owl"),
    *("painter", "pirate", "piano", "queen", "river", "robot", "sailor", "ship", "singer", "storm", "tailor", "thief"),
    *("train", "turtle", "violin", "wolf"),
)
WORTH_ALL = 80
# A story needs this many different words of three letters.
FEWEST_WORDS = 60

Grader = Callable[[str], float]
Draw = Callable[[Random], tuple[str, Grader]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt, and the reward of its responses.

    Attributes:
        text: The question of the user.
        prompt_ids: Token ids in the chat template.
        worth: Reward of a response text, 0 to 1.
        decode: Converts tokens to text.
    """

    text: str
    prompt_ids: list[int]
    worth: Grader = field(repr=False)
    decode: Callable[[list[int]], str] = field(repr=False)

    def grade(self, response_ids: list[int]) -> float:
        """The reward of a response, 0 to 1."""
        return self.worth(self.decode(response_ids))


class QuestionTask:
    """Draws questions for training, and separate held-out questions.

    Args:
        name: See the module.
        tokenizer: A tokenizer with a chat template.
        response_length: Tokens of the longest response; it may end earlier.

    Raises:
        ValueError: If there is no such task.
        ModuleNotFoundError: If reasoning-gym is not installed.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, *, response_length: int) -> None:
        self.response_length = response_length
        self._draw, self._tokenizer = _source(name), tokenizer

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and its response."""
        return MAX_PROMPT + self.response_length

    def sample(self, rng: Random, *, held_out: bool = False) -> Question:
        """Draw a question for training, or a held-out question.

        Raises:
            RuntimeError: If the task has no such questions.
            ValueError: If a question is too long.
        """
        for _ in range(MAX_DRAWS):
            text, worth = self._draw(rng)
            if (zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0) == held_out:
                return self._question(text, worth)
        raise RuntimeError(f"{MAX_DRAWS} draws and no question with {held_out=}: the task has too few questions")

    def loss_mask(self, question: Question, num_tokens: int) -> list[int]:
        """Every token of a response has a loss."""
        return [1] * num_tokens

    def _question(self, text: str, worth: Grader) -> Question:
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) > MAX_PROMPT:
            raise ValueError(f"a question of {len(ids)} tokens, but at most {MAX_PROMPT} are supported: {text[:80]!r}")
        return Question(text=text, prompt_ids=ids, worth=worth, decode=self._decode)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _source(name: str) -> Draw:
    if name in _TASKS:
        return _TASKS[name]
    if name.startswith(GYM):
        return _gym(name.removeprefix(GYM))
    if name.startswith(PREPARED):
        return _prepared(Path(name.removeprefix(PREPARED)))
    raise ValueError(f"task {name!r}: expected counting, {', '.join(_TASKS)}, {PREPARED}FILE or {GYM}NAME")


def _arithmetic(rng: Random) -> tuple[str, Grader]:
    question, label = draw_task(rng)
    return question, lambda answer: float(is_right(answer, label))


def _arithmetic_steps(rng: Random) -> tuple[str, Grader]:
    question, worth = _arithmetic(rng)
    return question.replace("Answer with the number only.", "Think step by step."), worth


def _story(rng: Random) -> tuple[str, Grader]:
    first, second = rng.sample(THINGS, 2)
    return f"Tell a story about a {first} and a {second}.", _words_without_e


def _words_without_e(answer: str) -> float:
    words = {word for word in _words(answer) if "e" not in word}
    return min(1.0, len(words) / WORTH_ALL)


def _story_answer(rng: Random) -> tuple[str, Grader]:
    story, _ = _story(rng)
    numbers = rng.sample(range(10, 100), 3)
    question = f"Which of these numbers is the largest: {', '.join(map(str, numbers))}?"

    def worth(answer: str) -> float:
        return float(is_right(answer, str(max(numbers))) and len(_words(answer)) >= FEWEST_WORDS)

    return f"{story} End it with the answer to a question: {question}", worth


def _words(answer: str) -> set[str]:
    return set(re.findall("[a-z]{3,}", answer.lower()))


_TASKS: dict[str, Draw] = {
    "arithmetic": _arithmetic,
    "arithmetic_steps": _arithmetic_steps,
    "story": _story,
    "story_answer": _story_answer,
}


def _prepared(file: Path) -> Draw:
    if not file.exists():
        raise FileNotFoundError(f"task {PREPARED}{file}: write it with examples/questions/prepare.py")
    questions = json.loads(file.read_text(encoding="utf-8"))["questions"]

    def draw(rng: Random) -> tuple[str, Grader]:
        question, number = rng.choice(questions)
        return question, lambda answer: float(last_number(answer) == float(number))

    return draw


def last_number(text: str) -> float | None:
    """The last number of a text; it may have commas between thousands."""
    digits = _last_digits(text)
    return float(digits) if digits else None


def _last_digits(text: str) -> str:
    """The last number as text, without commas between thousands; empty if there is none."""
    found = re.findall(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else ""


def _gym(name: str) -> Draw:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ModuleNotFoundError(f"task {GYM}{name}: pip install reasoning-gym==0.1.25")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {name!r}, it has {', '.join(sorted(DATASETS))}")

    def draw(rng: Random) -> tuple[str, Grader]:
        data = reasoning_gym.create_dataset(name, size=1, seed=rng.randrange(1 << 31))
        entry = data[0]

        def worth(answer: str) -> float:
            # A small model adds words around its number.
            if re.fullmatch(r"-?\d+", str(entry["answer"])):
                answer = re.sub(r"\.0+$", "", _last_digits(answer))
            return float(data.score_answer(answer=answer.strip(), entry=entry))

        return entry["question"], worth

    return draw
