# SPDX-License-Identifier: Apache-2.0
"""The log of a framework: the numbers of its own log lines, at full precision.

slime and Miles write every dictionary that they send to wandb or TensorBoard into their log too. Those files keep
float32, and the last numbers are lost when Ray ends the process that has them open.
"""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ENTRY = re.compile(r" - (?P<kind>step|perf|rollout) (?P<index>\d+): (?P<values>\{.*\})")
_BARE_FLOAT = re.compile(r"(?<=[:\s])(-?)(nan|inf)(?=[,}\s])")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
MODEL_BUILT = "number of parameters on"


@dataclass(frozen=True)
class Logged:
    """The log of one run.

    Attributes:
        steps: ``train/*`` of each optimizer step.
        rollouts: ``rollout/*`` of each rollout.
        perf: ``perf/*`` of each rollout.
        text: All of it, without colors.
    """

    steps: list[dict[str, float]]
    rollouts: list[dict[str, float]]
    perf: list[dict[str, float]]
    text: str

    @property
    def names(self) -> set[str]:
        """Every metric of the steps."""
        return {name for step in self.steps for name in step}

    @property
    def built_the_model(self) -> bool:
        """Whether Megatron-LM built the model, which comes before its weights load."""
        return MODEL_BUILT in self.text


def read_log(text: str) -> Logged:
    """Find the framework's numbers in its log.

    Raises:
        ValueError: A line of numbers cannot be read, or one kind's numbers are not 0, 1, 2, ...
    """
    text = _COLOR.sub("", text)
    found: dict[str, list[dict[str, float]]] = {"step": [], "rollout": [], "perf": []}
    for kind, index, values in _entries(text):
        if values in found[kind][-1:]:
            # Miles' Megatron trainer writes the line of a step twice.
            continue
        if index != len(found[kind]):
            raise ValueError(f"the host's log: {kind} {index} follows {len(found[kind])} others of its kind")
        found[kind].append(values)
    return Logged(steps=found["step"], rollouts=found["rollout"], perf=found["perf"], text=text)


def _entries(text: str) -> Iterator[tuple[str, int, dict[str, float]]]:
    for entry in _ENTRY.finditer(text):
        # Python prints numbers that no literal says.
        literal = _BARE_FLOAT.sub(lambda bare: f"{bare[1]}1e999" if bare[2] == "inf" else "None", entry["values"])
        try:
            values = ast.literal_eval(literal)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the host's log: cannot read {entry[0]!r}") from error
        yield (
            entry["kind"],
            int(entry["index"]),
            {name: math.nan if value is None else float(value) for name, value in values.items()},
        )
