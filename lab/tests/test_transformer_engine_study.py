# SPDX-License-Identifier: Apache-2.0
"""The study of Transformer Engine as far as it goes without a GPU: weights, packing, steps; what the archive keeps."""

import importlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "real_stack"
VARIANTS = ("local, float32", "gathered, packed, float32")
ON_TWO_RANKS = f"{VARIANTS[1]}, DP 2"


def study(*arguments: str) -> None:
    # Where Megatron-Core keeps its choice of attention: that of a model of another process would be refused here.
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(FOLDER))
    sys.argv = ["te_study.py", *arguments]
    importlib.import_module("te_study").main()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from example_runs import on_ranks

    folder = tmp_path_factory.mktemp("study")
    tiny = ["--work", str(folder), "--model", "tiny", "--only"]
    for world_size, arguments in ((1, [*VARIANTS, "--", "prepare"]), (2, [VARIANTS[1], "--"])):
        on_ranks(study, *tiny, *arguments, "score", "step", world_size=world_size)
        # A run that fails is a row too, and the next one begins.
        assert '"error"' not in (found := (folder / "tiny" / "results.jsonl").read_text()), found
    return folder / "tiny"


@pytest.mark.whole_run
@pytest.mark.slow
def test_megatrons_decoder_scores_as_transformers_does_padded_and_packed(work):
    reference = torch.cat(torch.load(work / "scores transformers, float32.pt"))
    assert reference.isfinite().all()
    for name in (*VARIANTS, ON_TWO_RANKS):
        torch.testing.assert_close(torch.cat(torch.load(work / f"scores {name}.pt")), reference, rtol=0, atol=2e-5)


@pytest.mark.whole_run
def test_the_hook_and_the_whole_loss_have_one_gradient(work):
    rows = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    steps = {row["name"]: row["steps"] for row in rows if row["kind"] == "step"}
    assert set(steps) == {*VARIANTS, ON_TWO_RANKS}
    for found in (found for of_variant in steps.values() for found in of_variant.values()):
        assert found["gradients, hook again"] == 0.0
        assert found["gradients, whole loss"] < 1e-5
        assert found["num_metrics"] > 5
        assert found["metrics"] < 1e-5
    for correction, found in steps[ON_TWO_RANKS].items():
        # The gate's band cuts at other samples where log-probs differ by a rounding, but none lies that near here.
        expected = steps[VARIANTS[1]][correction]
        assert found["gradient norm"] == pytest.approx(expected["gradient norm"], rel=1e-4)
        assert found["hook"] == pytest.approx(expected["hook"], rel=1e-3, abs=1e-5)


def entry(kind, architecture, code):
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 257, len(header), len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def container(entries):
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def library(fatbin):
    """An ELF file with the one section, and the names of sections."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    first, table = 64 + len(fatbin), 64 + len(fatbin) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    sections = [(0, 0, 0), (1, 64, len(fatbin)), (12, first, len(names))]
    rows = [struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections]
    return bytes(header) + fatbin + names + b"".join(rows)


def test_only_the_code_of_the_architecture_stays_and_every_container_at_its_place(tmp_path):
    ours, ours_too = entry(2, 90, b"A" * 32), entry(2, 90, b"a" * 8)
    old, intermediate = entry(2, 80, b"B" * 48), entry(1, 90, b"C" * 24)
    mixed, foreign = container(old + ours + intermediate + ours_too), container(old)
    gap = bytes(8)
    path = tmp_path / "library.so"
    path.write_bytes(library(mixed + gap + foreign))
    subprocess.run([sys.executable, FOLDER / "keep_architecture.py", path, "90"], check=True, capture_output=True)
    kept = container(ours + ours_too)
    assert path.read_bytes() == library(kept.ljust(len(mixed), b"\0") + gap + foreign)
