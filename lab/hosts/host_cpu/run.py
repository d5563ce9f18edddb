# SPDX-License-Identifier: Apache-2.0
"""Trains with an unmodified host on a CPU, and compares: ``python -m host_cpu.run slime``, or another of `HOSTS`.

The scripts ``*_cpu.sh`` beside this package start it. Every run is a process of the host's own
``train.py`` with its own Ray. Exit code 1: a number or a line that must be there is not; each is named.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import documented, nodes, report
from .cases import Case, Host
from .comparison import Result, faults_of_comparison, faults_of_run
from .logged import read_log
from .miles_megatron_runs import MILES_MEGATRON
from .miles_runs import MILES
from .slime_runs import SLIME

ROOT = Path(__file__).parents[3]
HOSTS = {host.name: host for host in (SLIME, MILES, MILES_MEGATRON)}
TIME_LIMIT_S = 900
CHANGED = " with changes"
# No network, no statistics to Ray; one thread per process, as several of them share few cores.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prepare(host: Host, *, inputs: Path, folder: Path) -> None:
    """Write what every run reads."""
    modules = [["host_cpu.inputs", host.package, str(inputs)]]
    if host.conversions is not None:
        modules += [["host_cpu.convert", *words] for words in host.conversions(inputs)]
    with (folder / "inputs.log").open("w") as out:
        for words in modules:
            command = [sys.executable, "-m", *words]
            subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT, check=True)


def train(host: Host, case: Case, *, inputs: Path, folder: Path) -> Result:
    """Run the framework once."""
    words = case.command(host.common(inputs), root=ROOT, folder=folder)
    dtype = ["--float32"] if case.is_float32 else []
    command = [sys.executable, "-m", "host_cpu.train", *dtype, host.package, *words]
    log = folder / f"{case.name}.log"
    with ExitStack() as stack:
        # Ray's sockets lie below its folder, and their paths must be short.
        ray_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray"))
        environment = (
            os.environ | ENVIRONMENT | {"RAY_TMPDIR": ray_folder, "MISMATCH_LOG_DIR": str(folder / "mismatch")}
        )
        start = time.monotonic()
        if (second := case.second_node) is not None:
            environment |= nodes.ENVIRONMENT
            started = nodes.two_nodes(
                command, second, root=ROOT, folder=folder, scratch=Path(ray_folder), environment=environment
            )
            command = stack.enter_context(started)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=stack.enter_context(log.open("w")),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return_code = process.wait(TIME_LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.monotonic() - start
    expected = case.by_hand.first_gradient_norm(inputs) if case.by_hand is not None else None
    return Result(case, return_code, read_log(log.read_text(errors="replace")), seconds, expected)


def check_documented(host: Host, *, inputs: Path, folder: Path) -> tuple[str, list[str]]:
    """Parse every launch of the pages with the framework's parser; return what was checked, and the errors."""
    launches = documented.launches(ROOT) + documented.made_launches(ROOT)
    own = folder / "my.yaml"
    own.write_text("{}\n")
    command_lines = [
        [*host.common(inputs), *(documented.located(word, root=ROOT, own=own) for word in launch.words)]
        for launch in launches
    ]
    answers = folder / "parsed.json"
    with (folder / "parse.log").open("w") as out:
        subprocess.run(
            [sys.executable, "-m", "host_cpu.parse", host.package, str(answers)],
            input=json.dumps(command_lines),
            text=True,
            env=os.environ | ENVIRONMENT,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=True,
        )
    parsed = json.loads(answers.read_text())
    faults = documented.faults(launches, parsed["answers"], host=host.name)
    if host is not SLIME:
        return f"{len(launches)} documented launches", faults
    # The pages name flags with slime's names.
    named = documented.named_flags(ROOT)
    faults += documented.unknown(named, parsed["options"])
    return f"{len(launches)} documented launches and {len(named)} documented flags", faults


def commit_of(folder: Path) -> str:
    """Commit of a checkout, and whether files differ from it."""
    git = ["git", "-C", str(folder)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return "unknown: no git checkout"
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return head.stdout.strip() + (CHANGED if changed.stdout.strip() else "")


def about(host: Host, command: str) -> dict[str, Any]:
    """Return what a record must name."""
    commits = {name: commit_of(Path(os.environ[variable])) for name, variable in host.checkouts.items()}
    for name, patch in host.patches.items():
        commits[name] = commits[name].replace(CHANGED, f" with {patch}")
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commits": commits | {"mis_ext": commit_of(ROOT)},
    } | report.machine(host.packages)


def shown(step: dict[str, float]) -> str:
    """Loss, gradient norm and our metrics in one line, with the framework's names below ``train/``."""
    names = {name.removeprefix("train/"): value for name, value in step.items()}
    chosen_names = [name for name in names if name in ("loss", "grad_norm") or name.startswith("mis_")]
    return " ".join(f"{name}={names[name]:.5g}" for name in chosen_names)


def main() -> int:
    """Run, compare, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=HOSTS)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="only these; DRY_RUN=1 --all prints their names")
    parser.add_argument("--all", action="store_true", help="every run; without it those that are compared or refused")
    parser.add_argument(
        "--record", nargs="?", const="", metavar="PART", help="write lab/real_stack/HOST_cpu[_PART].md and .json"
    )
    parser.add_argument("--out", type=Path, help="folder of inputs and logs (default: runs/HOST_cpu)")
    options = parser.parse_intermixed_args()
    host = HOSTS[options.host]
    try:
        cases = host.chosen(options.runs, everything=options.all)
    except ValueError as error:
        parser.error(str(error))
    folder = (options.out or Path("runs") / f"{host.name}_cpu").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs"
    if os.environ.get("DRY_RUN"):
        for case in cases:
            words = case.command(host.common(inputs), root=ROOT, folder=folder)
            print(f"{case.name}: train.py {shlex.join(words)}")
        return 0

    print("Not as on a GPU:")
    for name, what in host.stand_ins.items():
        print(f"  {name}: {what}")
    print(f"inputs ... log: {folder / 'inputs'}.log", flush=True)
    prepare(host, inputs=inputs, folder=folder)
    checked, faults = check_documented(host, inputs=inputs, folder=folder)
    print(f"the host's parser: {checked}, {len(faults)} faults", flush=True)
    results = []
    for case in cases:
        print(f"{case.name} ... log: {folder / case.name}.log", flush=True)
        result = train(host, case, inputs=inputs, folder=folder)
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
    verdict = f"{len(results)} runs passed. The framework's own parser accepts {checked}."
    print(verdict)
    if options.record is not None:
        command = shlex.join(["bash", host.script, *sys.argv[2:]])
        about_them = about(host, command)
        report.write(
            ROOT / "lab" / "real_stack", results, host=host, about=about_them, verdict=verdict, part=options.record
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
