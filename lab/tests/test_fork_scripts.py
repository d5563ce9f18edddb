# SPDX-License-Identifier: Apache-2.0
"""lab/real_stack/forks.sh: what it runs on which GPU, and again; qwen_model.py: names, and a file without its head."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "real_stack"
# The names of groups; a line for each run, of which one dies the first time.
PYTHON = """#!/usr/bin/env bash
case "$*" in
-c*import\\ sys*) echo "$3-int4-1 $3-bf16-1 $3-int4-2 $3-bf16-2" ;;
*run*) echo "$CUDA_VISIBLE_DEVICES: $*" >> "$CALLS"
    [[ "$*" != *forks-int4-1* || $(grep -c forks-int4-1 "$CALLS") -gt 1 ]] ;;
*weights*) echo "$*" >> "$CALLS" ;;
*) echo "| table |" ;;
esac
"""


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """What pack_forks.sh made, with a model of two pieces, and a machine of two GPUs."""
    for name, text in (("nvidia-smi", "#!/bin/sh\necho GPU 0\necho GPU 1\n"), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "code/lab/studies").mkdir(parents=True)
    (tmp_path / "gsm_symbolic.json").write_text("{}")
    (tmp_path / "REVISION").write_text("abc")
    (tmp_path / "qwen.sha256").write_text(f"{hashlib.sha256(b'ab').hexdigest()}  qwen.gguf\n")
    for folder in ("00", "01", "02", "out"):
        (tmp_path / folder).mkdir()
    for name, members in (("base", ("qwen", "gsm_symbolic.json")), ("code", ("code", "REVISION", "qwen.sha256"))):
        with tarfile.open(tmp_path / "00" / f"{name}.tar.xz", "w:xz") as archive:
            for member in members:
                archive.add(tmp_path / member, member)
    (tmp_path / "01/piece.00").write_text("a")
    (tmp_path / "02/piece.01").write_text("b")
    return tmp_path


def forks(carried: Path, *arguments: str, **more: str) -> str:
    environment = os.environ | more | {"PATH": f"{carried}:{os.environ['PATH']}", "PYTHON": str(carried / "python")}
    environment |= {"CALLS": str(carried / "calls"), "PLACE": str(carried / "place"), "PATIENCE": "20"}
    environment.setdefault("STAGGER", "0")
    command = ["bash", str(FOLDER / "forks.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=carried)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long_run
def test_the_model_is_put_together_and_each_run_has_its_gpu_and_another_attempt(carried: Path) -> None:
    for step in (("base", "00"), ("take", "01"), ("take", "02"), ("start", "60", "out")):
        said = forks(carried, *step)
    assert "| table |" in said
    assert "poll again" not in said
    assert "poll again" not in forks(carried, "poll", "0", "out")
    assert "forks-int4-1 on GPU 0, attempt 2" in said
    place = carried / "place"
    assert (place / "qwen.gguf").read_text() == "ab"
    calls = (carried / "calls").read_text().splitlines()
    # An arm on each GPU, and both arms on both.
    ran = {
        call[0] + call.partition(" --only alert_forks-")[2].partition(" ")[0] for call in calls if "alert_forks" in call
    }
    assert ran >= {"0int4-1", "1bf16-1", "1int4-2", "0bf16-2"}
    assert sum("run alert_forks" in call for call in calls) == 5
    assert all(f"--model {place}/qwen " in call for call in calls if "run alert_forks" in call)
    assert sum("run alert_smoke" in call and f"--model {place}/random " in call for call in calls) == 4
    with tarfile.open(carried / "out/logs.tar.gz") as archive:
        assert "logs/alert_forks-int4-1.log" in archive.getnames()


def test_without_a_trial_only_the_chosen_runs_start_and_the_first_poll_says_that_they_go_on(carried: Path) -> None:
    for step in (("base", "00"), ("take", "01"), ("take", "02")):
        forks(carried, *step)
    place = carried / "place"
    for _ in range(1200):
        if (place / "tried").exists():
            break
        time.sleep(0.05)
    for name in ("trying", "tried"):
        (place / name).unlink()
    shutil.rmtree(place / "smoke")
    # The runs begin a second apart, and the poll ends at once.
    said = forks(carried, "start", "0", "out", ONLY="alert_forks-int4-2 alert_forks-bf16-2", STAGGER="1")
    assert "poll again" in said
    assert "poll again" not in forks(carried, "poll", "60", "out")
    calls = (carried / "calls").read_text().splitlines()
    ran = [call[0] + call.partition(" --only ")[2].partition(" ")[0] for call in calls if "run alert_forks" in call]
    assert ran == ["0alert_forks-int4-2", "1alert_forks-bf16-2"]


def test_a_piece_that_did_not_arrive_stops_the_start(carried: Path) -> None:
    forks(carried, "base", "00")
    forks(carried, "take", "01")
    with pytest.raises(AssertionError, match="checksum did NOT match"):
        forks(carried, "start", "0", "out")
    with pytest.raises(AssertionError, match="seconds to poll"):
        forks(carried, "start")


def test_a_file_without_its_head_is_mended_and_names_are_those_of_transformers(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("qwen_model", FOLDER / "qwen_model.py")
    assert spec is not None
    assert spec.loader is not None
    tool: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    head = type("Tensor", (), {"name": tool.HEAD, "data_offset": 300, "n_bytes": 500})
    whole, short = tmp_path / "whole", tmp_path / "short"
    content = bytes(range(256)) * 8
    whole.write_bytes(content)
    tool.tensors_of = lambda file: [head]
    tool.cut(whole, short)
    assert short.stat().st_size == len(content) - 500 + 64
    for _ in range(2):
        tool.mend(short)
        mended = short.read_bytes()
        assert (mended[:300], mended[800:]) == (content[:300], content[800:])
    assert tool.name_of("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"
    assert tool.name_of("token_embd.weight") == "model.embed_tokens.weight"
