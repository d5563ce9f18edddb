"""What these tests import besides the helpers of `tests/support`: programs of the lab, and the examples."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDERS = ("lab/studies", "lab/benchmarks", "lab/hosts", "examples", "examples/questions", "docs")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]


@pytest.fixture
def workplace(tiny_model, tmp_path):
    """Where runs of the evidence's pretrained model take place: on the CPU, with that checkpoint."""
    from evidence.pretrained.workplace import Workplace

    place = Workplace(torch.device("cpu"), tiny_model, tmp_path)
    yield place
    place.close()
