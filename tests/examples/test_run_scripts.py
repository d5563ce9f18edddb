# SPDX-License-Identifier: Apache-2.0
"""How a run of the example starts: with the flags that it needs, in a folder of its own, or not at all."""

import os
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from example_runs import EXAMPLES, ROOT, SMALL_RUN, content, leave_a_run, on_ranks, run_program
from grpo.arguments import parse_args
from grpo.output_dir import make_output_dir
from grpo.report import read_metrics
from process_ranks import run_processes
from train_grpo import REFUSED, start_ranks


def start(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def before_the_installation(tmp_path: Path) -> dict[str, str]:
    """An interpreter without packages, and an environment that is not there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec {Path(sys.executable).resolve()} -S "$@"\n')
    python.chmod(0o755)
    return {"PYTHON": str(python), "PYTHONPATH": "", "VENV": str(tmp_path / "venv")}


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["--num-rolouts", "3"], ["--num-rolouts"]),
        (["--output-dir", "HOLDS_A_RUN"], ["HOLDS_A_RUN", "--resume", "--overwrite"]),
        (["--output-dir", "EMPTY", "--resume"], ["EMPTY", "checkpoint"]),
        (["--custom-config-path", "yaml/miss.yaml"], ["yaml/miss.yaml"]),
        (["--context-parallel-size", "3"], ["--context-parallel-size 3", "2 ranks"]),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_before_anything_is_installed(
    tmp_path: Path, before_the_installation: dict[str, str], arguments: list[str], reasons: list[str]
) -> None:
    places = {"HOLDS_A_RUN": tmp_path / "run", "EMPTY": tmp_path / "empty"}
    for place in places.values():
        place.mkdir()
    leave_a_run(places["HOLDS_A_RUN"])
    before = content(tmp_path)
    words = [str(places.get(word, word)) for word in ["bash", "examples/run.sh", *arguments]]
    refused = start(words, **before_the_installation)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert all(str(places.get(reason, reason)) in line for reason in reasons)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("script", "arguments", "reasons"),
    [
        ("run_vllm.sh", ["--rollout-temperature", "0.001"], ["--rollout-temperature 0.001", "at least 0.01"]),
        ("run_vllm.sh", ["--engine-settings", "seed=1"], ["seed is set by the example"]),
        ("run_sglang.sh", ["--rollout-temperature", "0"], ["--rollout-temperature 0.0", "above 0"]),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_is_installed(
    before_the_installation: dict[str, str], script: str, arguments: list[str], reasons: list[str]
) -> None:
    refused = start(["bash", f"examples/{script}", *arguments], **before_the_installation)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert all(reason in line for reason in reasons)
    assert not Path(before_the_installation["VENV"]).exists()


def test_a_wrong_number_of_ranks_is_refused() -> None:
    refused = start([sys.executable, "examples/train_grpo.py", "--check"], NPROC="0")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "NPROC=0" in refused.stderr


def test_help_installs_nothing(before_the_installation: dict[str, str]) -> None:
    # What a flag of YAML values is, only PyYAML can tell: nothing is refused without it.
    flags = ["--engine-settings", "mem_fraction_static=0.1", "--help"]
    helped = start(["bash", "examples/run.sh", *flags], **before_the_installation)
    assert helped.returncode == 0, helped.stderr
    assert "--output-dir" in helped.stdout
    assert not Path(before_the_installation["VENV"]).exists()


@pytest.mark.whole_run
def test_a_script_starts_ranks_with_the_flags_that_the_configuration_needs(tmp_path: Path) -> None:
    """In an environment that it takes for one of its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".installed").touch()
    # A link's interpreter does not know the packages of its environment.
    installed = {"VENV": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = ["bash", "examples/run_sglang.sh", "--custom-config-path", "yaml/metrics_only.yaml"]
    shown = start(command, DRY_RUN="1", **installed)
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.split()
    args = parse_args(words[words.index(str(EXAMPLES / "train_grpo.py")) + 1 :])
    assert (args.rollout_engine, args.custom_config_path.name) == ("sglang", "metrics_only.yaml")


@pytest.mark.parametrize(
    ("arguments", "switch"),
    [
        ([], "--use-tis"),
        (["--custom-config-path=yaml/metrics_only.yaml", "--num-rollout", "3"], "--get-mismatch-metrics"),
    ],
)
def test_a_run_measures_or_corrects_as_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], switch: str
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.chdir(ROOT)
    start_ranks(arguments)
    words = capsys.readouterr().out.split()
    flags = words[words.index(str(EXAMPLES / "train_grpo.py")) + 1 :]
    assert ({"--use-tis", "--get-mismatch-metrics"} & {*flags}) == {switch}
    args = parse_args(flags)
    assert args.rollout_engine == "transformers"
    assert args.custom_tis_function_path == "mis_ext.compute_mis_weights_with_cp"
    assert args.custom_config_path.name == ("metrics_only.yaml" if arguments else "mis.yaml")
    assert args.use_tis is (switch == "--use-tis")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--micro-batch-size", "7"], "256 samples"),
        (["--custom-config-path", "BROKEN"], "BROKEN"),
    ],
)
def test_what_needs_packages_to_be_seen_is_refused_before_a_rank_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("rs_gates: {low: [\n")
    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit, match=str(REFUSED)):
        start_ranks([str(broken) if word == "BROKEN" else word for word in arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert reason.replace("BROKEN", str(broken)) in line


def test_each_run_gets_a_folder_of_its_own_by_engine_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def made(engine: str, *, resume: bool = False, overwrite: bool = False, output_dir: Path | None = None) -> str:
        args = Namespace(rollout_engine=engine, resume=resume, overwrite=overwrite, output_dir=output_dir)
        return str(make_output_dir(args))

    assert made("transformers", overwrite=True) == "runs/grpo_transformers_1"
    assert made("sglang") == "runs/grpo_sglang_1"
    (tmp_path / "runs" / "grpo_transformers_best").mkdir()
    numbered = [made("transformers") for _ in range(10)]
    assert numbered == [f"runs/grpo_transformers_{number}" for number in range(2, 12)]
    assert made("transformers", resume=True) == numbered[-1]
    assert made("transformers", overwrite=True) == numbered[-1]
    assert made("sglang", overwrite=True) == "runs/grpo_sglang_1"
    assert made("sglang", output_dir=Path("elsewhere/mine")) == "elsewhere/mine"
    assert (tmp_path / "elsewhere" / "mine").is_dir()


def rank_without_sglang(folder: Path) -> None:
    sys.modules["sglang"] = None
    rank = folder / f"rank {os.environ['RANK']}"
    with rank.open("w") as shown, redirect_stderr(shown):
        try:
            run_program(*SMALL_RUN, "--rollout-engine", "sglang", "--output-dir", str(folder / "run"))
        except SystemExit as end:
            shown.write(f"exit code {end.code}")


@pytest.mark.whole_run
@pytest.mark.distributed
@pytest.mark.slow
def test_what_one_rank_refuses_ends_all_in_one_line(tmp_path: Path) -> None:
    """Only the first rank has an engine, and would wait for the second."""
    on_ranks(rank_without_sglang, tmp_path)
    first, second = ((tmp_path / f"rank {rank}").read_text().splitlines() for rank in range(2))
    assert (first[1:], second) == (["exit code 2"], ["exit code 2"])
    assert "needs sglang" in first[0]


def start_program(rank: int, folder: Path) -> None:
    """As a user does: once with ranks that refuse, and once with ranks that train."""
    import train_grpo

    os.chdir(folder)
    os.environ |= {"NPROC": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])}
    sys.argv = ["train_grpo.py", *SMALL_RUN, "--num-rollout", "1"]
    program, train_grpo.__file__ = train_grpo.__file__, str(folder / "rank.py")
    with Path("refused").open("w") as shown:
        os.dup2(shown.fileno(), sys.stderr.fileno())
    try:
        train_grpo.main()
    except SystemExit as end:
        print(f"exit code {end.code}, {len([*Path().glob('runs/*')])} folders", file=sys.stderr, flush=True)
    train_grpo.__file__ = program
    train_grpo.main()


@pytest.mark.long_run
@pytest.mark.whole_run
@pytest.mark.slow
def test_the_program_trains_on_ranks_that_it_starts_itself_or_ends_with_their_line_alone(tmp_path: Path) -> None:
    """All other tests share their ranks' imports."""
    (tmp_path / "rank.py").write_text("import sys\nprint('refused', file=sys.stderr)\nsys.exit(2)\n")
    run_processes(start_program, tmp_path, world_size=1)
    assert (tmp_path / "refused").read_text().splitlines()[:2] == ["refused", "exit code 2, 0 folders"]
    assert [row["step"] for row in read_metrics(tmp_path / "runs/grpo_transformers_1/metrics.jsonl")] == [0]
