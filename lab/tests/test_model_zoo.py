# SPDX-License-Identifier: Apache-2.0
"""A few architectures of the page that says which are exact in the batch-invariant mode."""

import random
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

import model_zoo  # noqa: E402

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode  # noqa: E402


def rows_of_the_page():
    cells = [line.strip("| ").split(" | ") for line in model_zoo.PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name: dict(zip(model_zoo.PROBES, found, strict=True)) for name, *found in cells[1:]}


def test_the_page_has_a_row_for_every_architecture_and_a_reason_for_every_refusal():
    rows, page = rows_of_the_page(), model_zoo.PAGE.read_text()
    assert tuple(rows) == model_zoo.ARCHITECTURES
    for found in rows.values():
        for cell in found.values():
            number = re.fullmatch(r"(?:refused|error) \((\d+)\)", cell)
            assert cell == "exact" or "rows differ" in cell or f"\n{number[1]}. " in page


@pytest.mark.whole_run
@pytest.mark.long_run
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # Of some models' modules.
def test_an_architecture_that_is_drawn_is_what_the_page_says(monkeypatch):
    rows, seed = rows_of_the_page(), random.randrange(10**6)
    rng = random.Random(seed)
    name = rng.choice([name for name, found in rows.items() if set(found.values()) == {"exact"}])
    # Decoding token by token takes most of the time of all of them.
    probes = rng.sample(sorted(model_zoo.PROBES), 3)
    monkeypatch.setattr(model_zoo, "PROBES", {probe: model_zoo.PROBES[probe] for probe in probes})
    # More threads than there are cores wait for each other.
    found = model_zoo.judge(name, seed, most_threads=2)
    assert found == {probe: rows[name][probe] for probe in probes}, (name, seed)


def test_what_is_drawn_has_the_sizes_and_dtypes_at_which_rows_came_apart(monkeypatch):
    """Widths of whole tiles, few experts and one dtype hid what differs."""
    drawn = []
    monkeypatch.setattr(model_zoo, "build", lambda *arguments: drawn.append(arguments))
    for seed in range(60):
        model_zoo.judge("gpt_oss", seed)
    assert {dtype for _, _, dtype in drawn} == {torch.float32, torch.bfloat16}
    assert {sizes["num_experts"] for _, sizes, _ in drawn} == {*range(5, 17)}
    for _, sizes, _ in drawn:
        assert all(sizes[key] % 32 for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"))
    assert {"exaone4", "apertus", "gpt_bigcode", "minimax", "dots1"} <= {*model_zoo.ARCHITECTURES}
    assert {"left padding", "generate"} <= {*model_zoo.PROBES}


def test_an_architecture_that_cannot_be_built_is_an_error_and_not_left_out():
    found = model_zoo.judge("no_such_architecture")
    assert set(found) == set(model_zoo.PROBES)
    assert all(outcome.startswith("ValueError: ") for outcome in found.values())
    assert "| no_such_architecture | error (1) | error (1) |" in model_zoo.table({"no_such_architecture": found})


@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss"])
def test_a_pack_is_exact_with_the_masks_that_the_pages_advise_and_mixed_up_without(name, monkeypatch):
    rng = random.Random(name)
    model = model_zoo.build(name, model_zoo.draw_sizes(rng), torch.float32)
    with torch.no_grad(), batch_invariant_mode():
        ids = [torch.randint(3, model_zoo.VOCABULARY, (rng.randint(66, 130),)) for _ in range(3)]
        sequences = model_zoo.Sequences(ids, [model(x[None], use_cache=False).logits[0] for x in ids])
        assert model_zoo.PROBES["packing"](model, sequences, rng) == "exact"
        monkeypatch.setattr(model_zoo, "_MASKED", ())
        without = model_zoo.PROBES["packing"](model, sequences, rng)
    # From transformers 5.23 on Llama 4 counts the chunks of each sequence.
    needs_masks = name == "gpt_oss" or tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    assert ("rows differ" in without) == needs_masks, without
