# SPDX-License-Identifier: Apache-2.0
"""lab/real_stack/run_evidence.sh: one command per GPU, in the environment that was carried there."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "real_stack" / "run_evidence.sh"
# Writes its line down, with where modules are found.
PYTHON = """#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES: $* [$PYTHONPATH]" >> "$CALLS"
[[ "$CUDA_VISIBLE_DEVICES $2" != "$FAILS run" ]]
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What was unpacked, with a model; a machine of two GPUs."""
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    for name, text in (("nvidia-smi", "#!/bin/sh\necho GPU 0\necho GPU 1\n"), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(site: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    calls = site / "calls"
    environment = os.environ | {"PATH": f"{site}:{os.environ['PATH']}", "PYTHON": str(site / "python")}
    environment |= {"CALLS": str(calls), "FAILS": "", "CUDA_VISIBLE_DEVICES": ""} | variables
    done = subprocess.run(
        ["bash", str(SCRIPT), str(site), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_every_gpu_gets_the_studies_and_the_list_comes_last(site: Path) -> None:
    done, calls = run(site, "one", "two", "--", "--seeds", "3", WORKERS="2")
    assert done.returncode == 0, done.stderr
    command = f"lab/studies/evidence.py run one two --model {site}/smollm2 --workers 2 --seeds 3"
    *ran, last = [call.partition(" [")[0] for call in calls]
    assert sorted(ran) == [f"0: {command}", f"1: {command}"]
    assert last == ": lab/studies/evidence.py list one two"
    assert all(f":{site}/site" in call for call in calls)


def test_one_gpu_that_fails_fails_all_and_the_others_end_first(site: Path) -> None:
    done, calls = run(site, "one", FAILS="0")
    assert done.returncode == 1
    assert len(calls) == 3


def test_nothing_runs_without_a_study_or_when_only_shown(site: Path) -> None:
    done, calls = run(site)
    assert done.returncode == 1
    assert "which studies?" in done.stderr
    done, more = run(site, "one", DRY_RUN="1")
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == [
        f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in (0, 1)
    ]
    assert calls == more == []
