# SPDX-License-Identifier: Apache-2.0
"""Write questions of the package reasoning-gym (Apache-2.0) to a file, for machines without it and without a network.

    pip install reasoning-gym==0.1.25
    python examples/questions/prepare.py gsm_symbolic 4096 QUESTIONS.json

Use them with ``--task prepared:QUESTIONS.json``. It takes only questions with a numeric result, each once.
"""

import argparse
import importlib.metadata
import json
import re
from pathlib import Path

PACKAGE, LICENSE = "reasoning-gym", "Apache-2.0"
SEED = 1


def prepare(task: str, number: int) -> dict[str, object]:
    """Draw questions and their results, with their source.

    Raises:
        ValueError: If ten times as many draws as wanted questions have too few different questions.
    """
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(task, size=10 * number, seed=SEED)
    answers: dict[str, str] = {}
    for entry in drawn:
        if re.fullmatch(r"-?\d+(\.\d+)?", str(entry["answer"])):
            answers.setdefault(" ".join(entry["question"].split()), str(entry["answer"]))
        if len(answers) == number:
            source = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}, {task}, seed {SEED}"
            return {"source": source, "license": LICENSE, "questions": list(answers.items())}
    raise ValueError(f"{task}: only {len(answers)} different questions with a number for an answer")


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="of the package, such as gsm_symbolic")
    parser.add_argument("number", type=int, help="of questions")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    prepared = prepare(options.task, options.number)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(json.dumps(prepared, indent=0) + "\n", encoding="utf-8")
    print(f"{options.file}: {options.number} questions of {prepared['source']} ({LICENSE})")


if __name__ == "__main__":
    main()
