# SPDX-License-Identifier: Apache-2.0
"""What these tests import besides the helpers of `tests/support`: programs of the lab, and the examples."""

import gc
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDERS = ("lab/studies", "lab/benchmarks", "lab/hosts", "examples", "examples/questions", "docs")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]


def pytest_collection_modifyitems(items):
    """Whole runs, all of them, which `tests/run.sh` skips."""
    for item in items:
        if item.path.is_relative_to(ROOT / "lab"):
            item.add_marker("whole_run")


@pytest.fixture
def workplace(tiny_model, tmp_path):
    """Where runs of the evidence's pretrained model take place: on the CPU, with that checkpoint."""
    from evidence.pretrained.workplace import Workplace

    # Each run collects garbage, and would look through all that earlier tests left.
    gc.freeze()
    place = Workplace(torch.device("cpu"), tiny_model, tmp_path)
    yield place
    place.close()


@pytest.fixture
def blank_pictures(monkeypatch):
    """Figures are made and saved, but not drawn, which takes most of the time of a page."""
    from matplotlib.figure import Figure
    from PIL import Image

    monkeypatch.setattr(Figure, "savefig", lambda _, file, **options: Image.new("RGB", (1, 1)).save(file, "png"))
