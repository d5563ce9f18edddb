# SPDX-License-Identifier: Apache-2.0
"""A slip of the hand gets the name that was meant; a word that means something else gets none."""

from collections.abc import Iterator

import pytest

from mis_ext import list_presets
from mis_ext.keys.rows import CORRECTION_ROWS
from mis_ext.methods import METHODS
from mis_ext.validation import did_you_mean

NAMES = (*list_presets(), *METHODS)
OTHERS = (
    *("adamw", "banana", "batch_size", "beta", "checkpoint", "dataset", "deepspeed", "docker", "engine", "entropy"),
    *(
        "epsilon",
        "false",
        "flash_attention",
        "gradient",
        "keyboard",
        "kubernetes",
        "kv_cache",
        "lambda",
        "learning_rate",
    ),
    *("length", "lora", "loss", "megatron", "mountain", "none", "num_epochs", "optimizer", "python"),
    *("pytorch", "quantization", "ray", "reference", "rollout", "scheduler", "seed", "sglang", "temperature"),
    *("tensorboard", "trainer", "transformer", "variance", "vllm", "wandb", "yaml", "zebra"),
)
"""What people may write in the place of a method, and mean."""


def slips(name: str) -> Iterator[str]:
    """One letter missing, two exchanged, or one doubled."""
    for place in range(len(name)):
        yield name[:place] + name[place + 1 :]
        yield name[:place] + name[place] + name[place:]
        if place + 1 < len(name):
            yield name[:place] + name[place + 1] + name[place] + name[place + 2 :]


@pytest.mark.parametrize("name", [name for name in NAMES if len(name) > 4])
def test_a_slip_gets_the_preset_or_method_that_was_meant(name) -> None:
    assert [slip for slip in slips(name) if slip not in NAMES and repr(name) not in did_you_mean(slip, NAMES)] == []


def test_of_three_or_four_letters_most_slips_do() -> None:
    """`apo` is one letter from seven names."""
    drawn = [(name, slip) for name in NAMES if len(name) < 5 for slip in slips(name) if slip not in NAMES]
    assert len(drawn) > 100
    found = [repr(name) in did_you_mean(slip, NAMES) for name, slip in drawn]
    assert sum(found) > 0.8 * len(found)


@pytest.mark.parametrize("name", CORRECTION_ROWS)
def test_a_slip_gets_the_key_that_was_meant(name) -> None:
    known = [*CORRECTION_ROWS]
    assert [slip for slip in slips(name) if slip not in known and "did you mean" not in did_you_mean(slip, known)] == []


@pytest.mark.parametrize("word", OTHERS)
def test_a_word_that_means_something_else_gets_no_name(word) -> None:
    assert "did you mean" not in did_you_mean(word, NAMES)
    assert "did you mean" not in did_you_mean(word, CORRECTION_ROWS)


def test_the_beginning_of_a_name_is_near_and_three_are_the_most() -> None:
    near = "'geometric_gate_token_weight' or 'geometric_mis' or 'geometric_rs'"
    assert did_you_mean("geometric", NAMES) == f" (did you mean {near}?)"
    assert did_you_mean("banana", NAMES).count(",") == 2
    assert did_you_mean("banana", ("token", "sequence")) == ""
