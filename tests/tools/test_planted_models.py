# SPDX-License-Identifier: Apache-2.0
"""Forty plants on three models: the first name, no wrong certainty, and never "nothing is wrong" over a large fault.

The models are the toy of `support/engines.py`, SmolLM2's recorded log-probs (`data/pretrained_dump`), and a recurrent
one whose state is a sum over the tokens before.
"""

import lzma
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import plants
import pytest
import torch
from engines import diagnosed, engines
from torch import Tensor

from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report import Part, Parts

Sides = tuple[list[Tensor], list[Tensor]]
"""Log-probs of the trainer and of the engine."""
SIZES = ("bf16_kernels", "bf16_or_low_precision", "low_precision", "large_mismatch")
LIKELY_RIGHT = 34


class Plant(NamedTuple):
    """The names that are right, and the steps."""

    causes: tuple[str, ...]
    steps: Sequence[Sides]


def toy(seed: int = 0) -> Sides:
    return engines(seed).sampled()


def pretrained(tmp_path: Path) -> Sides:
    path, data = tmp_path / "0.pt", Path(__file__).parents[1] / "data"
    path.write_bytes(lzma.decompress((data / "pretrained_dump" / "dump.pt.xz").read_bytes()))
    proximal, behavior = [], []
    for part in Parts(Dumps([path])):
        lengths = [*part.streams.layout.response_lengths]
        for side, values in ((proximal, part.tokens.log_pi), (behavior, part.tokens.log_mu)):
            side += torch.split(values, lengths)
    return proximal, behavior


class Recurrent:
    """Logits that a slow state gives; what leaks into it from the response before is a fault."""

    def __init__(self, seed: int, count: int = 64, length: int = 96, size: int = 48) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.embedding, self.head = (self.noise(size, 24) for _ in range(2))
        self.head = 1.4 * self.head
        self.count, self.length = count, length

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def states(self, ids: Tensor, before: Tensor | None = None) -> Tensor:
        state = torch.zeros(len(ids), 24, dtype=torch.float64) if before is None else before
        states = []
        for place in range(ids.shape[1]):
            states.append(state)
            state = 0.9 * state + 0.45 * self.embedding[ids[:, place]]
        return torch.stack(states, 1)

    def sampled(self, head: Tensor | None = None, leak: float = 0.0, row: int = 2) -> Sides:
        """The engine samples with its head, and the trainer scores with its own, with the state of a row."""
        head = self.head if head is None else head
        state, ids, engine = torch.zeros(self.count, 24, dtype=torch.float64), [], []
        for _ in range(self.length):
            logits = state @ head.T + 0.02 * self.noise(self.count, len(head))
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
            engine.append(logits.log_softmax(-1).gather(-1, chosen))
            ids.append(chosen)
            state = 0.9 * state + 0.45 * self.embedding[chosen[:, 0]]
        ids = torch.cat(ids, 1)
        before = leak * state.roll(1, 0) * (torch.arange(self.count) % row > 0)[:, None]
        trainer = (self.states(ids, before) @ self.head.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return [*trainer.float()], [*torch.cat(engine, 1).float()]


def each(side: int, change: Callable[[Tensor], Tensor], samples: slice = slice(None)) -> Callable[[Sides], Sides]:
    """A change of some responses of one side."""

    def changed(sides: Sides) -> Sides:
        new = [[*values] for values in sides]
        new[side][samples] = map(change, new[side][samples])
        return new[0], new[1]

    return changed


def with_value(value: float, every: int) -> Callable[[Tensor], Tensor]:
    def changed(values: Tensor) -> Tensor:
        values = values.clone()
        values[1::every] = value
        return values

    return changed


def as_long_as(values: Tensor, other: Tensor) -> Tensor:
    return values.repeat(1 + len(other) // len(values))[: len(other)]


OF_DATA: dict[str, tuple[str, Callable[[Sides], Sides]]] = {
    "sentinels": ("placeholder_log_probs", each(1, with_value(-9999.0, 20))),
    "nulls": ("placeholder_log_probs", each(1, with_value(math.nan, 10))),
    "constants": ("placeholder_log_probs", each(1, lambda values: 0.0 * values - 0.7, slice(0, 6))),
    "a flipped sign": ("not_log_probs", each(1, torch.neg)),
    "probabilities": ("not_log_probs", each(0, torch.exp)),
    "base 2": ("not_log_probs", each(1, lambda values: values / math.log(2.0))),
    "all shifted": ("shifted_log_probs", each(1, lambda values: values.roll(1))),
    "some shifted": ("shifted_log_probs", each(1, lambda values: values.roll(1), slice(0, 8))),
    "other samples": (
        "other_text",
        lambda sides: (sides[0], [*map(as_long_as, sides[1][-6:], sides[0]), *sides[1][6:]]),
    ),
}
"""Faults that any recorded log-probs can have."""


def planted(tmp_path: Path) -> dict[str, Plant]:
    models = {"toy": toy(), "SmolLM2": pretrained(tmp_path), "recurrent": Recurrent(0).sampled()}
    found = {
        f"{model}, {name}": Plant((cause,), [change(sides)])
        for model, sides in models.items()
        for name, (cause, change) in OF_DATA.items()
    }
    pair = OF_DATA["some shifted"][1](OF_DATA["sentinels"][1](models["SmolLM2"]))
    found["SmolLM2, a pair"] = Plant(("placeholder_log_probs", "shifted_log_probs"), [pair])
    for name, cause in (("colder", "temperature"), ("nucleus", "top_p_or_top_k"), ("experts", "expert_routing")):
        found[f"toy, {name}"] = Plant((cause,), [getattr(plants, name)(engines(1)).sampled()])
    found["toy, prefix"] = Plant(("stale_prefix_cache",), [plants.stale_prefix(engines(2)).sampled()])
    found["toy, a pair"] = Plant(("temperature",), [plants.colder(plants.quantised(engines(3))).sampled()])
    found["toy, low precision"] = Plant(("low_precision",), [plants.quantised(engines(4)).sampled()])
    model = Recurrent(1)
    for row in (2, 4):
        found[f"recurrent, rows of {row}"] = Plant(("packed_responses",), [model.sampled(leak=0.8, row=row)])
    heads = [model.head + 0.03 * step * model.noise(*model.head.shape) for step in range(5)]
    found["recurrent, a head left behind"] = Plant(("stale_weights",), [model.sampled(head) for head in heads])
    jump = [model.sampled(model.head if step == 0 else heads[-1]) for step in range(4)]
    found["recurrent, one update"] = Plant(("stale_weights",), jump)
    rounded = [[side.bfloat16().float() for side in sides] for sides in models["toy"]]
    found["toy, rounded"] = Plant(("bf16_log_probs",), [(models["toy"][0], rounded[1])])
    found["toy, kernels"] = Plant(SIZES[:2], [models["toy"]])
    return found


def parts_of(steps: Sequence[Sides]) -> list[Part]:
    return [
        Part.of_lists(proximal=proximal, behavior=behavior, step=str(step))
        for step, (proximal, behavior) in enumerate(steps)
    ]


@pytest.mark.whole_run
def test_most_plants_are_named_first_and_none_is_wrong_and_certain_or_called_nothing(tmp_path) -> None:
    found = planted(tmp_path)
    assert len(found) == 40
    first, wrong, nothing = [], [], []
    for name, plant in found.items():
        diagnoses = diagnosed(*parts_of(plant.steps))
        first += [name] if diagnoses and diagnoses[0].cause in plant.causes else []
        wrong += [
            (name, each.cause) for each in diagnoses if each.confidence == "certain" and each.cause not in plant.causes
        ]
        usual = diagnoses[0].cause in SIZES[:2] and diagnoses[0].confidence == "likely"
        nothing += [name] if usual and plant.causes != SIZES[:2] else []
    assert len(first) >= LIKELY_RIGHT, sorted({*found} - {*first})
    assert wrong == []
    assert nothing == []
