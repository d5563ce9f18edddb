# SPDX-License-Identifier: Apache-2.0
"""The launch scripts add our flags to the hosts' own scripts, and nothing else."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from examples.grpo.arguments import parse_args
from examples.launch_flags import launch_flags

pytestmark = pytest.mark.whole_run

REPOSITORY = Path(__file__).parents[2]
FUNCTION = "mis_ext.compute_mis_weights_with_cp"
CHECK = ["--custom-megatron-init-path", "mis_ext.check_setup"]
SLIME_SCRIPT = """\
#!/bin/bash
MISC_ARGS=(--attention-backend flash)
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py \\
   --colocate \\
   ${MISC_ARGS[@]}
"""
# Miles' script hands the text of --extra-args to a shell, behind flags of its own.
MILES_SCRIPT = """\
import subprocess, sys
extra_args = sys.argv[sys.argv.index("--extra-args") + 1]
subprocess.run(["bash", "-c", f"ray job submit -- python3 train.py --colocate {extra_args}"], check=True)
"""
# Ray joins and quotes what it was given, and a shell on the cluster runs that.
RAY = f"""\
#!{sys.executable}
import json, os, pathlib, sys
pathlib.Path(os.environ["SUBMITTED"]).write_text(json.dumps(sys.argv[sys.argv.index("train.py") + 1 :]))
"""
# Replaces the interpreter that prints the flags, because its start takes most of a script's time.
FLAGS_ALONE = """\
#!/bin/bash
case "$1" in *launch_flags.py) printf '%s\\n' "$FLAGS" ;; *) exec "$PYTHON" "$@" ;; esac
"""
AWKWARD_NAME = """with spaces, R&D a|b it's "quoted" back\\slash $HOME;#*"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Checkouts of slime and Miles with just the scripts that ours wrap, and a ``ray`` that notes what it is given."""
    for host, name, text in (
        ("slime", "run-qwen3-4B.sh", SLIME_SCRIPT),
        ("miles", "run_qwen3_4b.py", MILES_SCRIPT),
    ):
        (tmp_path / host / "scripts").mkdir(parents=True)
        (tmp_path / host / "scripts" / name).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text(RAY)
    (tmp_path / "bin" / "ray").chmod(0o755)
    return tmp_path


def launch(hosts: Path, host: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(REPOSITORY / "examples" / host / "run-qwen3-4b-mis.sh"), *map(str, arguments)]
    set_here = {
        "PATH": os.pathsep.join([str(hosts / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "SUBMITTED": str(hosts / "submitted.json"),
        f"{host.upper()}_DIR": str(hosts / host),
    }
    return subprocess.run(command, env=os.environ | set_here | environment, capture_output=True, text=True)


def submitted(hosts: Path) -> list[str]:
    return json.loads((hosts / "submitted.json").read_text())


def files(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("preset", sorted((REPOSITORY / "yaml").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_launched_with_the_switch_that_it_needs(preset: Path) -> None:
    switch = "--get-mismatch-metrics" if preset.stem == "metrics_only" else "--use-tis"
    assert launch_flags(preset)[0] == switch


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("get_mismatch_metrics: true\n", "--get-mismatch-metrics"),
        ("# use_tis: false\nuse_tis: yes\n", "--use-tis"),
    ],
)
def test_the_switch_is_read_as_yaml_and_not_as_text(tmp_path: Path, text: str, switch: str) -> None:
    assert launch_flags(config_of(tmp_path, text))[0] == switch


@pytest.mark.parametrize(
    "text",
    [
        "use_tis: null\n",
        "use_tis: false\nget_mismatch_metrics: false\n",
        "tis_levle: token\n",
        "- use_tis\n",
        "use_tis: [\n",
    ],
)
def test_a_file_with_which_nothing_would_be_measured_has_no_flags(tmp_path: Path, text: str) -> None:
    config = config_of(tmp_path, text)
    with pytest.raises((ValueError, TypeError), match=re.escape(str(config))):
        launch_flags(config)


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_a_host_gets_three_more_flags_and_their_check_and_keeps_its_own(
    hosts: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a relative checkout and file, whatever their names; of two functions at start the parsers take the last."""
    theirs = ["--custom-megatron-init-path", "mine.init"]
    script = hosts / "slime" / "scripts" / "run-qwen3-4B.sh"
    script.write_text(SLIME_SCRIPT.replace("--attention-backend flash", " ".join(theirs)))
    folder = hosts / AWKWARD_NAME
    shutil.copytree(hosts / host, folder / host)
    config = folder / f"{AWKWARD_NAME}.yaml"
    shutil.copy(REPOSITORY / "yaml" / "metrics_only.yaml", config)
    monkeypatch.chdir(folder)
    environment = {f"{host.upper()}_DIR": host, "MILES_SCRIPT_EXTRA_ARGS": " ".join(theirs)}
    result = launch(hosts, host, config.name, "--mode", "debug_minimal", **environment)
    assert result.returncode == 0, result.stderr
    given = submitted(hosts)
    ours = ["--get-mismatch-metrics", "--custom-tis-function-path", FUNCTION, "--custom-config-path", str(config)]
    assert sorted(given) == sorted([*CHECK, *ours, *theirs, "--colocate"])
    assert all(pair in pairwise(given) for pair in pairwise(ours))
    assert [value for flag, value in pairwise(given) if flag == CHECK[0]] == [CHECK[1], theirs[1]]
    if host == "slime":
        # What ran is a copy of its script with one more line.
        written = (folder / host / "scripts" / "run-qwen3-4B-mis_ext.sh").read_text().splitlines()
        (added,) = (line for line in written if line not in script.read_text().splitlines())
        assert [line for line in written if line != added] == script.read_text().splitlines()
    else:
        python, script, option, text, *rest = shlex.split(result.stdout)
        shown = [python, script, option, *rest]
        assert shown == ["python3", "scripts/run_qwen3_4b.py", "--extra-args", "--mode", "debug_minimal"]
        assert shlex.split(text) == [*CHECK, *theirs, *ours]


@pytest.fixture
def known_flags(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags that the scripts get, without an interpreter that finds them."""
    flags = launch_flags(REPOSITORY / "yaml" / "mis.yaml")
    monkeypatch.setenv("FLAGS", shlex.join(flags))
    monkeypatch.setenv("PYTHON", sys.executable)
    python = hosts / "bin" / "python3"
    python.write_text(FLAGS_ALONE)
    python.chmod(0o755)
    return flags


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_a_dry_run_shows_the_flags_writes_nothing_and_starts_nothing(
    hosts: Path, known_flags: list[str], host: str
) -> None:
    before = files(hosts)
    result = launch(hosts, host, DRY_RUN="1")
    assert result.returncode == 0, result.stderr
    shown = [word for text in shlex.split(result.stdout.replace("\\\n", "")) for word in text.split()]
    assert {*known_flags, *CHECK} <= set(shown)
    assert files(hosts) == before


@pytest.mark.usefixtures("known_flags")
def test_a_slime_script_of_another_shape_is_refused(hosts: Path) -> None:
    (hosts / "slime" / "scripts" / "run-qwen3-4B.sh").write_text("python3 train_async.py\n")
    result = launch(hosts, "slime")
    assert result.returncode == 1
    assert "by hand" in result.stderr


@pytest.mark.parametrize("arguments", [("--extra-args", "--seed 7"), ("--extra-args=--seed 7",)])
def test_extra_arguments_of_miles_cannot_replace_ours(hosts: Path, arguments: tuple[str, ...]) -> None:
    result = launch(hosts, "miles", REPOSITORY / "yaml" / "mis.yaml", *arguments)
    assert result.returncode == 2
    assert "MILES_SCRIPT_EXTRA_ARGS" in result.stderr


def test_the_example_refuses_a_run_that_names_a_correction_and_never_calls_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics_only = REPOSITORY / "yaml" / "metrics_only.yaml"
    as_in_run_sh = ["--use-tis", "--custom-tis-function-path", FUNCTION, "--custom-config-path", str(metrics_only)]
    with pytest.raises(SystemExit):
        parse_args(as_in_run_sh)
    assert "--get-mismatch-metrics" in capsys.readouterr().err
    assert parse_args([*as_in_run_sh, "--get-mismatch-metrics"]).get_mismatch_metrics
