# SPDX-License-Identifier: Apache-2.0
"""Three easy tasks, their reward, and an environment that gives a second try after a wrong response.

    python -m arithmetic PROMPTS.jsonl [NUMBER]

writes prompts for slime's ``--prompt-data``. `reward` is for ``--custom-rm-path``, `second_try` for
``on_policy_tokens.environment``.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

NUM_PROMPTS = 4096
TASKS = ("product", "sum", "largest")


def draw_task(generator: random.Random) -> tuple[str, str]:
    """Draw a question and its answer."""
    kind = generator.choice(TASKS)
    if kind == "largest":
        numbers = generator.sample(range(10, 100), 3)
        question = f"Which of these numbers is the largest: {numbers[0]}, {numbers[1]}, {numbers[2]}?"
        return f"{question} Answer with the number only.", str(max(numbers))
    a, b = generator.randint(2, 9), generator.randint(2, 9)
    sign, answer = ("x", a * b) if kind == "product" else ("+", a + b)
    return f"What is {a} {sign} {b}? Answer with the number only.", str(answer)


def write_prompts(path: Path, number: int = NUM_PROMPTS) -> None:
    """Write questions as chats, with their labels."""
    generator = random.Random(0)
    lines = []
    for _ in range(number):
        question, label = draw_task(generator)
        lines.append(json.dumps({"prompt": [{"role": "user", "content": question}], "label": label}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def is_right(response: str, label: str) -> bool:
    """Whether the last integer of a response is the answer."""
    return (re.findall(r"\d+", response) or [""])[-1] == label


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """1 for a right answer, else 0."""
    return float(is_right(sample.response, sample.label))


async def second_try(sample: Any, text: str) -> str | None:
    """Ask again after a wrong response; end the conversation after a correct one."""
    if is_right(text, sample.label):
        return None
    return "\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"


if __name__ == "__main__":
    write_prompts(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else NUM_PROMPTS)
