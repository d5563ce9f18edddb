# SPDX-License-Identifier: Apache-2.0
"""The demonstration, in its short form, end to end: Megatron-Core trains, transformers generates."""

import importlib
import json
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from example_runs import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.whole_run]

# Their first divergence, with this piece left out; where rounding hides it, no token differs and nobody is to blame.
ATTENTION = "decoder.layers.0.self_attention"
CULPRITS = {
    "engine attention": ATTENTION,
    "trainer attention": ATTENTION,
    "norm rounding": "decoder.layers.0.input_layernorm",
    "rotary frequencies": "rotary_pos_emb",
    "log-prob formula": "logits equal, log-probs differ",
}


def demonstrate(directory: str) -> None:
    command = ["--size", "short", "--steps", "1", "--timing-repeats", "0", "--engines", "transformers"]
    # In float32 too engines agree: test_true_on_policy_mixture.py. Its ablation takes half a minute.
    sys.argv = ["true_on_policy.py", *command, "--dtypes", "bfloat16", "--output-dir", directory]
    with open(Path(directory, "printed"), "w") as printed, redirect_stdout(printed):
        assert importlib.import_module("true_on_policy").main() == 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    directory = tmp_path_factory.mktemp("true_on_policy")
    on_ranks(demonstrate, str(directory), world_size=1)
    assert (directory / "differences.png").stat().st_size > 10_000
    assert "A forgotten weight sync" in (directory / "printed").read_text()
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def test_every_sampled_token_agrees_at_every_step_once_everything_is_aligned(rows):
    aligned = [row for row in of_kind(rows, "step") if row["aligned"] == "all"]
    assert [(row["verdict"], row["tokens"], row["nonzero"], row["max_ulp"]) for row in aligned] == [
        ("EXACT", 32, 0, 0)
    ] * 2


def test_they_differ_when_nothing_is_aligned(rows):
    plain = [row for row in of_kind(rows, "step") if row["aligned"] == "nothing"]
    assert len(plain) == 2
    assert all(row["verdict"] == "DIFFERENT" and row["mean"] > 1e-3 for row in plain)


def test_without_a_piece_the_recorder_names_it(rows):
    ablation = {row["left_out"]: row for row in of_kind(rows, "ablation")}
    products = ablation.pop("fixed-tile products")
    # Which projection is the first to differ depends on the processor; rounding may hide them all.
    assert products["culprit"].partition(".linear")[1] or products["culprit"] in ("output_layer", "nobody")
    for left_out, row in ablation.items():
        expected = CULPRITS[left_out]
        assert row["culprit"] == expected, left_out
        assert (row["nonzero"] > 0) == (expected != "nobody"), left_out
    assert len(ablation) == 5


def test_a_forgotten_weight_sync_is_called_stale_weights(rows):
    (stale,) = of_kind(rows, "stale")
    assert stale["verdict"] == "DIFFERENT"
    assert "stale weights" in stale["hint"]


@pytest.mark.parametrize(("on_gpu", "dtypes"), [(True, ["bfloat16"]), (False, ["bfloat16", "float32"])])
def test_without_arguments_sglang_gets_the_dtypes_that_it_has(on_gpu, dtypes, monkeypatch):
    with warnings.catch_warnings():
        # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
        warnings.simplefilter("ignore")
        module = importlib.import_module("true_on_policy")
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["true_on_policy.py", "--engines", "sglang"])
    assert module.parse_args().dtypes == dtypes
