"""Trains with unmodified slime on a CPU, and compares. Started by ``examples/slime/run_cpu.sh``.

Every run is a process of slime's own ``train.py`` with its own Ray. Exit code 1: a number or a line that must be there
is not; each is named.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import documented, report
from .cases import CASES, Case, base_flags, case_of
from .comparison import Result, faults_of_comparison, faults_of_run
from .logged import read_log

ROOT = Path(__file__).parents[3]
TIME_LIMIT_S = 900
# No network, no statistics to Ray; one thread per process, as several of them share few cores.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def train(case: Case, *, inputs: Path, folder: Path) -> Result:
    """Run slime once."""
    command = [sys.executable, "-m", "slime_cpu.train", *case.command(inputs, root=ROOT, folder=folder)]
    log = folder / f"{case.name}.log"
    # Ray's sockets lie below its folder, and their paths must be short.
    with log.open("w") as out, tempfile.TemporaryDirectory(prefix="ray") as ray_folder:
        of_run = {"RAY_TMPDIR": ray_folder, "MISMATCH_LOG_DIR": str(folder / "mismatch")}
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | ENVIRONMENT | of_run,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return_code = process.wait(TIME_LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.monotonic() - start
    return Result(case, return_code, read_log(log.read_text(errors="replace")), seconds)


def check_documented(*, inputs: Path, folder: Path) -> tuple[str, list[str]]:
    """Give every launch of the pages to slime's parser; what was checked, and what is wrong."""
    launches = documented.launches(ROOT) + documented.made_launches(ROOT)
    named = documented.named_flags(ROOT)
    own = folder / "my.yaml"
    own.write_text("{}\n")
    command_lines = [
        [*base_flags(inputs), *(documented.located(word, root=ROOT, own=own) for word in launch.words)]
        for launch in launches
    ]
    answers = folder / "parsed.json"
    with (folder / "parse.log").open("w") as out:
        subprocess.run(
            [sys.executable, "-m", "slime_cpu.parse", str(answers)],
            input=json.dumps(command_lines),
            text=True,
            env=os.environ | ENVIRONMENT,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=True,
        )
    parsed = json.loads(answers.read_text())
    checked = f"{len(launches)} documented launches and {len(named)} documented flags"
    return checked, documented.faults(launches, named, parsed)


def chosen(names: Sequence[str], *, everything: bool) -> list[Case]:
    """Return the runs that the command line asks for, in the order of the table."""
    wanted = {case_of(name).name for name in names}
    return [case for case in CASES if case.name in wanted or (not names and (everything or case.group != "more"))]


def commit_of(folder: Path) -> str:
    """Commit of a checkout, and whether files differ from it."""
    git = ["git", "-C", str(folder)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return "unknown: no git checkout"
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def about(command: str) -> dict[str, Any]:
    """Return what a record must name."""
    megatron = commit_of(Path(os.environ["MEGATRON_DIR"])).replace(
        " with changes", " with slime's docker/patch/latest/megatron.patch"
    )
    commits = {"slime": commit_of(Path(os.environ["SLIME_DIR"])), "Megatron-LM": megatron, "mis_ext": commit_of(ROOT)}
    return {"command": command, "date": datetime.date.today().isoformat(), "commits": commits} | report.machine()


def shown(step: dict[str, float]) -> str:
    """Loss, gradient norm and our metrics in one line, as slime named them below ``train/``."""
    names = {name.removeprefix("train/"): value for name, value in step.items()}
    chosen_names = [name for name in names if name in ("loss", "grad_norm") or name.startswith("mis_")]
    return " ".join(f"{name}={names[name]:.5g}" for name in chosen_names)


def main() -> int:
    """Run, compare, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"only these: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--all", action="store_true", help="every run; without it those that are compared or refused")
    parser.add_argument("--record", action="store_true", help="write benchmarks/real_stack/slime_cpu.md and .json")
    parser.add_argument("--out", type=Path, default=Path("runs/slime_cpu"), help="folder of inputs and logs")
    options = parser.parse_args()
    try:
        cases = chosen(options.runs, everything=options.all)
    except ValueError as error:
        parser.error(str(error))
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs"
    if os.environ.get("DRY_RUN"):
        for case in cases:
            print(f"{case.name}: train.py {shlex.join(case.command(inputs, root=ROOT, folder=folder))}")
        return 0

    print("Not slime's, because this is a CPU:")
    for name, what in report.STAND_INS.items():
        print(f"  {name}: {what}")
    subprocess.run([sys.executable, "-m", "slime_cpu.inputs", str(inputs)], env=os.environ | ENVIRONMENT, check=True)
    checked, faults = check_documented(inputs=inputs, folder=folder)
    print(f"slime's parser: {checked}, {len(faults)} faults", flush=True)
    results = []
    for case in cases:
        print(f"{case.name} ... log: {folder / case.name}.log", flush=True)
        result = train(case, inputs=inputs, folder=folder)
        results.append(result)
        faults += faults_of_run(result)
        for index, step in enumerate(result.logged.steps):
            print(f"  step {index}: {shown(step)}", flush=True)
    faults += faults_of_comparison(results)

    print("\n" + report.table(results))
    for fault in faults:
        print(f"FAULT {fault}")
    if faults:
        return 1
    verdict = f"{len(results)} runs are as they must be. slime's own parser takes {checked}."
    print(verdict)
    if options.record:
        command = shlex.join(["bash", "examples/slime/run_cpu.sh", *sys.argv[1:]])
        report.write(ROOT / "benchmarks" / "real_stack", results, about=about(command), verdict=verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
