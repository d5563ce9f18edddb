"""The launch scripts add our flags to the hosts' own scripts, and nothing else."""

import os
import shlex
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
HOST_SCRIPT = """\
#!/bin/bash
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py \\
   --colocate \\
   ${MODEL_ARGS[@]}
"""


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(REPOSITORY / "examples" / script), *arguments]
    return subprocess.run(command, env=os.environ | {"DRY_RUN": "1"} | environment, capture_output=True, text=True)


def test_slime_gets_three_more_flags(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run-qwen3-4B.sh").write_text(HOST_SCRIPT)
    result = run("slime/run-qwen3-4b-mis.sh", SLIME_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    written = (tmp_path / "scripts" / "run-qwen3-4B-mis_ext.sh").read_text()
    added = [line.strip() for line in written.splitlines() if line not in HOST_SCRIPT.splitlines()]
    assert added == [
        "--use-tis \\",
        "--custom-tis-function-path mis_ext.compute_mis_weights_with_cp \\",
        f"--custom-config-path {REPOSITORY / 'yaml' / 'mis.yaml'} \\",
    ]
    assert [line for line in written.splitlines() if line.strip() not in added] == HOST_SCRIPT.splitlines()
    assert subprocess.run(["bash", "-n", "-c", written]).returncode == 0


def test_a_slime_script_of_another_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run-qwen3-4B.sh").write_text("python3 train_async.py\n")
    result = run("slime/run-qwen3-4b-mis.sh", SLIME_DIR=str(tmp_path))
    assert result.returncode == 1
    assert "by hand" in result.stderr


def test_miles_gets_three_more_flags(tmp_path: Path) -> None:
    config = REPOSITORY / "yaml" / "icepop.yaml"
    result = run("miles/run-qwen3-4b-mis.sh", str(config), "--mode", "debug_minimal", MILES_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert shlex.split(result.stdout) == [
        "python3",
        "scripts/run_qwen3_4b.py",
        "--extra-args",
        f"--use-tis --custom-tis-function-path mis_ext.compute_mis_weights_with_cp --custom-config-path {config}",
        "--mode",
        "debug_minimal",
    ]
