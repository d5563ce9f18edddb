# SPDX-License-Identifier: Apache-2.0
"""Compares what refuses drawn configuration files: ``check_setup``, slime's first step, and another revision.

With a clone of slime, a checkout of the other revision, and httpx installed, from the repository's root:

    python lab/peers/drawn_files/compare.py --slime ~/slime --base ~/mis_ext-0.5 [--count 750] [--seed 7] [--show 20]

Each file of ``tests/support/drawn_files.py`` becomes ``args`` as slime makes them of ``--custom-config-path``. The
first step is ``loss_function`` of slime on the micro-batch of ``tests/support/loss_cases.py``, on a CPU. The exit
code is 1 if a file passes ``check_setup`` and fails the step, or the reverse; or if a file that the other revision
refuses is not refused here with the same key named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SLIME = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
LAUNCHES = {
    "hook": {"loss_type": "policy_loss", "use_tis": True},
    "loss": {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss", "use_tis": True},
}
OF_SLIME = {
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "custom_loss_function_path": None,
    "recompute_loss_function": False,
    "rollout_data_postprocess_path": None,
    "custom_reward_post_process_path": None,
    "custom_generate_function_path": None,
    "num_steps_per_rollout": 1,
    "context_parallel_size": 1,
    "rank": 0,
}

_NOT_CALLED = "mis_ext would not be called"
"""A file can switch the hook off: slime's step then is without it."""

sys.path.append(str(ROOT / "tests" / "support"))


def arguments_of(text: str, launch: str, path: Path) -> argparse.Namespace:
    """The arguments of slime after it has read the file."""
    import yaml
    from loss_cases import host_args

    path.write_text(text, encoding="utf-8")
    args = host_args(**OF_SLIME | LAUNCHES[launch], custom_config_path=str(path))
    for key, value in yaml.safe_load(text).items():
        setattr(args, key, value)
    return args


def error_of(function: Any, *arguments: Any) -> str | None:
    """The error of a call; None if it returns."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def judge(folder: str, *, with_step: bool) -> list[dict[str, Any]]:
    """For each file of the standard input: the errors of ``check_setup`` and of the first step."""
    import torch.distributed as dist

    import mis_ext

    warnings.simplefilter("ignore")
    if with_step:
        import loss_cases
        from megatron.core import mpu
        from slime.backends.megatron_utils.loss import loss_function

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mpu.initialize_model_parallel()

    def step(args: argparse.Namespace) -> None:
        batch = loss_cases.local_batch(loss_cases.whole_batch())
        batch = loss_cases.with_options(batch, args)
        logits = batch.pop("logits").clone().requires_grad_()
        loss_function(args, batch, 1, len(batch["response_lengths"]), logits)[0].backward()

    found, path = [], Path(folder) / "keys.yaml"
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    for text, launch in json.load(sys.stdin):
        row = {"start": error_of(mis_ext.check_setup, arguments_of(text, launch, path))}
        if with_step:
            row["step"] = error_of(step, arguments_of(text, launch, path))
        found.append(row)
    sys.stdout = out
    return found


def judged(files: list[Any], package: Path, slime: Path | None, folder: str) -> list[dict[str, Any]]:
    """:func:`judge` in a process with this package, and with slime if given."""
    path = os.pathsep.join(str(each) for each in (package, slime) if each is not None)
    command = [sys.executable, __file__, "--judge", folder, *(["--step"] if slime else [])]
    environment = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    texts = json.dumps([(file.text, file.launch) for file in files])
    done = subprocess.run(command, env=environment, input=texts, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def names(key: str, error: str | None) -> bool:
    """Whether an error names a key."""
    return error is not None and re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", error) is not None


def main() -> int:
    """Draw, judge, and print a row for each class; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slime", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--count", type=int, default=750)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show", type=int, default=0, help="print the errors of so many wrong files")
    options = parser.parse_args()
    from drawn_files import CLASSES, draw

    files = draw(options.seed, options.count)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(options.slime), "archive", SLIME, "slime"], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        here = judged(files, ROOT, Path(folder), folder)
        before = judged(files, options.base, None, folder)
    rows: dict[str, Counter[str]] = {kind: Counter() for kind in CLASSES}
    wrong = []
    for file, now, base in zip(files, here, before, strict=True):
        found = {
            "files": True,
            "base refuses": base["start"] is not None,
            "check_setup": now["start"] is not None,
            "step": now["step"] is not None,
            "not called": _NOT_CALLED in (now["start"] or ""),
            "one only": (now["start"] is None) != (now["step"] is None) and _NOT_CALLED not in (now["start"] or ""),
        }
        if base["start"] is not None:
            said = [key for key in file.keys if names(key, base["start"])]
            found["same key"] = any(names(key, now["start"]) for key in said) if said else now["start"] is not None
            found["lost"] = not found["same key"]
        rows[file.kind].update(name for name, holds in found.items() if holds)
        if found["one only"] or found.get("lost"):
            wrong.append(f"{file.text}-> base {base['start']}\n-> start {now['start']}\n-> step {now['step']}\n")
    columns = ("files", "base refuses", "same key", "lost", "check_setup", "not called", "step", "one only")
    print(f"{'':14s}" + "".join(f"{column:>14s}" for column in columns))
    for kind, counts in [*rows.items(), ("all", sum(rows.values(), Counter()))]:
        print(f"{kind:14s}" + "".join(f"{counts[column]:14d}" for column in columns))
    print(*wrong, sep="\n")
    refused = [(file, now["start"]) for file, now in zip(files, here, strict=True) if now["start"] is not None]
    for file, error in refused[: options.show]:
        print(f"--- {file.kind}: {file.wrong}\n{error}")
    return int(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        json.dump(judge(sys.argv[2], with_step="--step" in sys.argv), sys.stdout)
    else:
        sys.exit(main())
