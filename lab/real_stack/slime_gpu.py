# SPDX-License-Identifier: Apache-2.0
r"""Unmodified slime or Miles on one GPU, run after run, each with its own log and time limit, and one table at the end.

    SLIME_DIR=... MEGATRON_DIR=... python lab/real_stack/slime_gpu.py recorded --rollouts DIR [--jobs 4] [RUN]
    SLIME_DIR=... MEGATRON_DIR=... python lab/real_stack/slime_gpu.py recorded --rollouts DIR --two-nodes [RUN]
    SLIME_DIR=... MEGATRON_DIR=... python lab/real_stack/slime_gpu.py whole [RUN ...]
    SLIME_DIR=... MEGATRON_DIR=... python lab/real_stack/slime_gpu.py ways [RUN ...] [--jobs 2 --in-turn --engine-gpu 1]
    SLIME_DIR=... MEGATRON_DIR=... python lab/real_stack/slime_gpu.py memory [RUN ...] --rollouts DIR
    MILES_DIR=... MILES_MEGATRON_DIR=... python lab/real_stack/slime_gpu.py recorded [RUN ...] --host miles \
        --rollouts DIR
    python lab/real_stack/slime_gpu.py table [--json FILE]

``recorded`` trains on recorded rollouts (`--debug-train-only`), without an engine; with ``--two-nodes`` on two Ray
nodes of this machine, a GPU and a network each (root, iproute2). ``whole`` has SGLang's server and router; such runs
share an engine, whose start takes up to two minutes, or with ``--jobs`` each lane of them has one.
``ways`` are whole runs too: every way to run the loop and to split the trainer on two GPUs, each without a correction,
with the three flags, with `policy_loss`, and with it over hidden states. ``TRAINER_GPUS=4`` gives trainers of
two GPUs four, which ``--flags`` may split in a second way. First the host's own parser reads all command lines;
``--dry-run`` ends there. Every run is ``lab/hosts/HOST_gpu.sh`` with flags after its own. What is done is not run
again: a second call goes on. One run that fails does not stop the others. With ``--in-turn`` runs start side by side
and train one after the other: that is for their times, as a start takes longer than ten steps. With
``ON_CPU=1`` all of it rehearses with a tiny model. ``memory`` trains on rollouts that grow (`rollouts.py
--tokens`), each one micro-batch, until memory ends: the run fails, and the table says what fitted. It starts two runs
at a time, of which the second builds its model when the first has ended. ``table`` shows what was stopped from its
log, and ``--json`` keeps all numbers that the host logged.
"""

import argparse
import json
import os
import queue
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "lab/hosts/slime_gpu.sh"
MILES_SCRIPT = ROOT / "lab/hosts/miles_gpu.sh"
PRESET = str(ROOT / "yaml/mis.yaml")
CHECK = ("--custom-megatron-init-path", "mis_ext.check_setup")
HOOK = ("--custom-tis-function-path", "mis_ext.compute_mis_weights_with_cp", *CHECK)
LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path", "mis_ext.policy_loss", *CHECK)
TOKEN_TIS = {"use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0}
UNSCORED = "--use-rollout-logprobs"
IN_TURN = ("--custom-megatron-before-train-step-hook-path", "slime_gpu.in_turn.wait")
IN_TURN_FROM_THE_MODEL_ON = ("--custom-megatron-init-path", "slime_gpu.in_turn.wait")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PEAKS = (
    *("--custom-megatron-before-log-prob-hook-path", "slime_gpu.memory.before_scoring"),
    *("--custom-megatron-before-train-step-hook-path", "slime_gpu.memory.before_step"),
)
ONE_MICRO_BATCH = ("--max-tokens-per-gpu", str(1 << 30))
PROVIDER = ("--custom-model-provider-path", "mis_ext.model_provider")
PORT, NUM_PORTS = 31000, 64
CHECKOUTS = {"slime": "MEGATRON_DIR", "miles": "MILES_MEGATRON_DIR"}


@dataclass(frozen=True)
class Run:
    """One run: the framework's flags after those of the script, our keys, and how often it is started and killed."""

    flags: tuple[str, ...] = ()
    keys: dict[str, Any] | None = None
    seconds: int = 240
    kill_after_rollout: int | None = None
    path: str = ""
    """A folder of the framework's checkout for the Python path."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the script."""

    @property
    def shares_an_engine(self) -> bool:
        """Whether the framework does not start its engine itself."""
        return self.environment.get("ENGINE") != "own"


def method(name: str, *flags: str, **keys: Any) -> Run:
    """Whole loss with a published method."""
    # 0.2 counts as not set; the method says how it clips.
    return Run((*LOSS, "--eps-clip-high", "0.2", *flags), {"mis_loss_method": name} | keys)


GATED = TOKEN_TIS | {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.99, "rs_upper_bound": 1.01}
RECORDED = {
    "nothing": Run(),
    # The usual difference of times without a reason.
    "nothing_again": Run(),
    "slime_tis": Run(("--use-tis", "--tis-clip", "2", "--tis-clip-low", "0")),
    # slime's own example of a correction, with the keys that it reads.
    "example": Run(
        ("--use-tis", "--custom-tis-function-path", "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"),
        TOKEN_TIS
        | dict.fromkeys(("tis_lower_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"))
        | {"use_rs": False, "rs_level": "token", "tis_batch_normalize": False},
        path="examples",
    ),
    "hook_core": Run(("--use-tis", *HOOK), TOKEN_TIS),
    "hook_all": Run(("--use-tis", *HOOK), TOKEN_TIS | {"mis_metrics": "all"}),
    "hook_gated": Run(("--use-tis", *HOOK), GATED),
    "loss_baseline": Run(("--use-tis", *LOSS), TOKEN_TIS),
    "loss_baseline_all": Run(("--use-tis", *LOSS), TOKEN_TIS | {"mis_metrics": "all"}),
    "loss_current": Run((UNSCORED, *LOSS), TOKEN_TIS | {"mis_loss_proximal": "current"}),
    "loss_gated": Run(("--use-tis", *LOSS), GATED),
    "loss_decoupled": Run(LOSS, TOKEN_TIS | {"mis_loss_mode": "decoupled"}),
    "loss_bypass": Run((UNSCORED, *LOSS), TOKEN_TIS | {"mis_loss_mode": "bypass"}),
    "loss_reinforce": Run((UNSCORED, *LOSS), TOKEN_TIS | {"mis_loss_mode": "reinforce"}),
    "method_icepop": method("icepop"),
    "method_dppo_tv": method("dppo_tv"),
    "method_gspo": method("gspo"),
    "method_cispo": method("cispo"),
    "method_topr": method("topr"),
    "metrics_only": Run(("--get-mismatch-metrics", *HOOK), {"use_tis": False, "mis_metrics": "all"}),
    "per_token": Run(("--use-tis", *HOOK, "--calculate-per-token-loss"), TOKEN_TIS),
    "per_token_loss": Run(("--use-tis", *LOSS, "--calculate-per-token-loss"), TOKEN_TIS),
    "prepare_rollout": Run(
        # With one step slime scores nothing beforehand, and the function refuses.
        (
            *("--use-tis", *HOOK, "--num-steps-per-rollout", "2"),
            *("--rollout-data-postprocess-path", "mis_ext.prepare_rollout"),
        ),
        TOKEN_TIS | {"tis_batch_normalize": True, "mis_denominator": "kept"},
    ),
    "log_mismatch": Run(
        ("--get-mismatch-metrics", *HOOK, "--rollout-data-postprocess-path", "mis_ext.log_mismatch"),
        {"use_tis": False},
    ),
    "recompute": Run(("--use-tis", *HOOK, *RECOMPUTE, "--recompute-loss-function"), TOKEN_TIS),
    "recompute_loss": Run(("--use-tis", *LOSS, *RECOMPUTE, "--recompute-loss-function"), TOKEN_TIS),
    "two_steps": Run(("--use-tis", *HOOK, "--num-steps-per-rollout", "2"), TOKEN_TIS),
    "two_steps_loss": Run(("--use-tis", *LOSS, "--num-steps-per-rollout", "2"), TOKEN_TIS),
    "refused": Run(("--use-tis", *HOOK), {"tis_uper_bound": 2.0}, seconds=120),
}
TWO_TURNS = {"on_policy_tokens": {"environment": "arithmetic.second_try", "max_turns": 2}}
WHOLE = {
    **{
        f"whole_{name}": replace(RECORDED[run], seconds=420)
        for name, run in (("nothing", "nothing"), ("example", "example"), ("core", "hook_core"))
    },
    "whole": Run(("--use-tis", *HOOK), TOKEN_TIS | {"mis_metrics": "all"}, seconds=420),
    "whole_loss": Run((UNSCORED, *LOSS), TOKEN_TIS | {"mis_loss_proximal": "current"}, seconds=420),
    "killed": Run(
        ("--use-tis", *HOOK, "--num-rollout", "8", "--save-interval", "4"),
        TOKEN_TIS,
        seconds=300,
        kill_after_rollout=5,
    ),
    "two_turns": Run(
        ("--use-tis", *HOOK, "--num-rollout", "4", "--rollout-max-context-len", "256"),
        TOKEN_TIS | TWO_TURNS,
        seconds=300,
    ),
}
# check_setup has its place in IN_TURN_FROM_THE_MODEL_ON.
_LOSS = LOSS[: -len(CHECK)]
_SAVING = ("--log-probs-chunk-size", "1024", "--recompute-loss-function")
_CURRENT = TOKEN_TIS | {"mis_loss_proximal": "current"}
MEMORY = {
    "no_logits": Run((*RECOMPUTE, *_LOSS, *PROVIDER), TOKEN_TIS, seconds=300),
    "logits": Run((*RECOMPUTE, *_LOSS), TOKEN_TIS, seconds=300),
    "own_loss": Run(RECOMPUTE, seconds=300),
    # All that slime has against it.
    "own_loss_saving": Run((*RECOMPUTE, *_SAVING), seconds=300),
    "no_logits_current": Run((*RECOMPUTE, UNSCORED, *_LOSS, *PROVIDER), _CURRENT, seconds=300),
    "logits_saving": Run((*RECOMPUTE, *_LOSS, *_SAVING), TOKEN_TIS, seconds=300),
    "no_logits_all_kept": Run((*_LOSS, *PROVIDER), TOKEN_TIS, seconds=300),
    "logits_all_kept": Run(_LOSS, TOKEN_TIS, seconds=300),
}
_PROMPTS, _SAMPLES = (4, 4) if os.environ.get("ON_CPU") else (32, 8)
# Flags of all runs, before the flags of a call.
SIZES = (
    *("--num-rollout", "4", "--rollout-batch-size", str(_PROMPTS), "--n-samples-per-prompt", str(_SAMPLES)),
    *("--rollout-max-context-len", "512"),
)
_GPUS = os.environ.get("TRAINER_GPUS", "2")
_SPLIT = ("--actor-num-gpus-per-node", _GPUS, "--num-gpus-per-node", _GPUS)
_BESIDE = ("--num-gpus-per-node", "2", "--rollout-num-gpus", "1")
_CP = ("--context-parallel-size", "2") + (
    ("--cp-comm-type", "all_gather") if os.environ.get("ATTENTION") == "torch" else ()
)
_EP = Run((*_SPLIT, "--expert-model-parallel-size", "2"))
_LAGS = {"mis_staleness": True}
_ASYNC, _OWN, _FSDP = {"LOOP": "train_async"}, {"ENGINE": "own"}, {"BACKEND": "fsdp"}
_PREPARE = ("--rollout-data-postprocess-path", "mis_ext.prepare_rollout")
# How the loop runs, and how the trainer is split. Keys count for runs with a correction.
_WAYS = {
    "sync": Run(keys=_LAGS),
    "async1": Run(environment=_ASYNC, keys=_LAGS),
    "async2": Run(("--update-weights-interval", "2"), environment=_ASYNC, keys=_LAGS),
    "partial": Run(("--partial-rollout", "--over-sampling-batch-size", str(2 * _PROMPTS)), keys=_LAGS),
    "turns": Run(keys=TWO_TURNS),
    "tp2": Run((*_SPLIT, "--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "cp2": Run((*_SPLIT, *_CP)),
    # By name alone, with a mixture of experts as MODEL: `python -m slime_gpu.tiny MODEL mixture`. The engine wants
    # --enable-return-routed-experts (ENGINE_FLAGS) where its experts are replayed, and a router that passes
    # return_routed_experts on: PyPI's smg does, its sglang-router 0.3.2 drops it.
    "ep2": _EP,
    "ep2_replayed": replace(_EP, flags=(*_EP.flags, "--use-rollout-routing-replay")),
    "nccl": Run(_BESIDE, environment=_OWN),
    "cache8": Run((*_BESIDE, "--sglang-kv-cache-dtype", "fp8_e4m3"), environment=_OWN),
    # SGLang 0.5.17 refuses new weights then.
    "fp8": Run((*_BESIDE, "--sglang-quantization", "fp8"), environment=_OWN),
    "colocate": Run((*_SPLIT, "--colocate"), environment=_OWN),
}
_CORRECTIONS = {
    "nothing": Run(),
    "hook": RECORDED["hook_core"],
    "loss": RECORDED["loss_baseline"],
    "no_logits": replace(RECORDED["loss_baseline"], flags=(*RECORDED["loss_baseline"].flags, *PROVIDER)),
}


def _together(way: Run, correction: Run) -> Run:
    keys = correction.keys if correction.keys is None else correction.keys | (way.keys or {})
    prepared = _PREPARE if keys is not None and _LAGS.items() <= keys.items() else ()
    # The environment of two turns works without a correction too.
    if keys is None and way.keys == TWO_TURNS:
        keys = TWO_TURNS
    return replace(way, flags=(*PEAKS[2:], *way.flags, *correction.flags, *prepared), keys=keys, seconds=180)


def _ways(ways: dict[str, Run]) -> dict[str, Run]:
    return {
        f"{way}_{name}": _together(run, correction)
        for way, run in ways.items()
        for name, correction in _CORRECTIONS.items()
    }


WAYS = _ways(_WAYS)
# On a CPU the engine is separate: with --colocate both share the memory of a GPU.
_WITH_ENGINE = ("--num-gpus-per-node", "3", "--rollout-num-gpus", "1") if os.environ.get("ON_CPU") else ("--colocate",)
# Miles starts all its engines itself, and its FSDP trainer has neither hooks nor ways to split a model.
_OF_MILES = {
    **{
        name: replace(_WAYS[name], flags=(*_BESIDE, *_WAYS[name].flags))
        for name in ("sync", "async1", "async2", "partial", "turns")
    },
    **{name: _WAYS[name] for name in ("cache8", "colocate")},
    **{name: replace(_WAYS[name], flags=(*_WAYS[name].flags, *_WITH_ENGINE)) for name in ("tp2", "cp2")},
    # Its own router passes on return_routed_experts.
    **{
        name: replace(_WAYS[name], flags=(*_WAYS[name].flags, *_WITH_ENGINE, "--use-miles-router"))
        for name in ("ep2", "ep2_replayed")
    },
}
_OF_MILES = {name: replace(run, environment=run.environment | _OWN) for name, run in _OF_MILES.items()}
MILES_WAYS = _ways(_OF_MILES) | {
    f"fsdp_{name}": Run(
        (*_BESIDE, *(word for word in run.flags if word not in CHECK)), run.keys, environment=_FSDP | _OWN
    )
    for name, run in _CORRECTIONS.items()
    if name != "no_logits"
}
MILES_WAYS |= {
    name: replace(
        run, flags=(*run.flags, "--num-rollout", "6", "--save-interval", "2"), seconds=300, kill_after_rollout=3
    )
    for name, run in (("killed", MILES_WAYS["sync_hook"]), ("fsdp_killed", MILES_WAYS["fsdp_hook"]))
}
OF_BOTH = (
    *(
        "nothing",
        "nothing_again",
        "hook_core",
        "hook_all",
        "loss_baseline",
        "loss_current",
        "loss_bypass",
        "method_icepop",
    ),
    *("metrics_only", "refused"),
)
MILES = {
    **{name: RECORDED[name] for name in OF_BOTH},
    "miles_tis": RECORDED["slime_tis"],
    "example": replace(RECORDED["example"], path="examples/infra_features"),
    # Miles scores a rollout beforehand by default.
    "hook_unscored": replace(RECORDED["hook_core"], flags=(*RECORDED["hook_core"].flags, "--skip-actor-forward-only")),
}
STEP = re.compile(r"step (\d+): (\{.*\})")
ROLLOUT = re.compile(r"rollout (\d+): (\{.*\})")
PERF = re.compile(r"perf (\d+): (\{.*\})")
PEAK = re.compile(r"memory (\d+): (\{.*\})")
PLANNED = "\nKILLED as planned\n"
ERROR = re.compile(r"\w+(?:Error|Exception): .*")


def numbers(pattern: re.Pattern[str], text: str) -> dict[int, dict[str, float]]:
    """Dictionaries that the framework logged, by step. Non-finite numbers become None."""
    found: dict[int, dict[str, float]] = {}
    for step, body in pattern.findall(text):
        body = re.sub(r"\b(nan|inf)\b", "None", re.sub(r"-inf\b", "None", body))
        try:
            values = json.loads(
                body.replace("'", '"').replace("None", "null").replace("True", "1").replace("False", "0")
            )
        except json.JSONDecodeError:
            continue
        known = found.setdefault(int(step), {})
        for key, value in values.items():
            # Each rank reports its own memory.
            known[key] = max(value, known.get(key, value)) if pattern is PEAK else value
    return found


def logged(folder: Path) -> dict[str, Any]:
    """The framework's numbers in a run's log."""
    text = (folder / "run.log").read_text(errors="replace")
    return {
        "steps": numbers(STEP, text),
        "rollouts": numbers(ROLLOUT, text),
        "perf": numbers(PERF, text),
        "memory": numbers(PEAK, text),
        "says": sorted({line[line.index("mis_ext: ") :] for line in text.splitlines() if "mis_ext: " in line})[:4],
        "errors": [found[:300] for found in ERROR.findall(text)][-3:],
        "report": reported(folder),
    }


def reported(folder: Path) -> str:
    """The first cause of `mis-ext report` for the run's dumps; empty without a report."""
    file = folder / "report/summary.json"
    # Empty where a report failed, as over no dumps.
    found = json.loads(file.read_text())["diagnoses"] if file.exists() and file.stat().st_size else []
    return f"{found[0]['cause']} ({found[0]['confidence']})" if found else ""


def results(folder: Path) -> list[dict[str, Any]]:
    """All runs below a folder, in their order here. One that was stopped has no exit code, and what its log has."""
    found = []
    order = {
        name: place
        for place, name in enumerate(dict.fromkeys((*RECORDED, *WHOLE, *WAYS, *MILES_WAYS, *MILES, *MEMORY)))
    }
    logs = sorted(folder.glob("*/run.log"), key=lambda path: (order.get(path.parent.name, len(order)), path))
    for log in logs:
        done = log.with_name("done.json")
        stopped = {"name": log.parent.name, "return_codes": ["stopped"], "seconds": None}
        found.append(json.loads(done.read_text()) if done.exists() else stopped | logged(log.parent))
    return found


class Runner:
    """Runs that write below one folder."""

    def __init__(
        self,
        out: Path,
        *,
        shared: Sequence[str],
        python: str,
        patience: float,
        host: str = "slime",
        has_two_nodes: bool = False,
    ) -> None:
        self.out, self.shared, self.python, self.patience = out, tuple(shared), python, patience
        self.host, self.has_two_nodes = host, has_two_nodes

    def is_done(self, name: str) -> bool:
        """Whether an earlier call has run it."""
        return (self.out / name / "done.json").exists()

    def _command(self, name: str, run: Run, *, port: int, engine: str | None) -> tuple[list[str], dict[str, str]]:
        """The flags of a run and its environment; its keys are in a file then."""
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        flags = [*self.shared, *run.flags]
        if run.keys is not None:
            # JSON is YAML.
            (folder / "keys.yaml").write_text(json.dumps(run.keys), encoding="utf-8")
            flags += ["--custom-config-path", str(folder / "keys.yaml")]
        environment = dict(os.environ, OUT=str(folder), CONFIG="", PORT=str(port), PYTHON=self.python)
        environment["WEIGHTS_DIR"] = f"/dev/shm/slime_gpu_{os.getpid()}_{name}"
        environment["TURN_LOCK"] = str(self.out / "turn.lock")
        if run.path:
            folders = [str(Path(environment[f"{self.host.upper()}_DIR"]) / run.path), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        if engine:
            environment["ENGINE"] = engine
        return flags, environment | run.environment

    def check(self, runs: dict[str, Run]) -> None:
        """Parse the command line of every run with the framework's own parser.

        Raises:
            ValueError: It would drop a flag without a word.
            subprocess.CalledProcessError: It refuses one.
        """
        lines = []
        for name, run in runs.items():
            # Nothing asks for an engine where nothing samples.
            flags, environment = self._command(name, run, port=PORT, engine=None)
            words = ["bash", str(self._script), *flags, "--debug-train-only"]
            result = subprocess.run(
                words, env=environment | {"DRY_RUN": "1"}, capture_output=True, text=True, check=True
            )
            command = shlex.split(result.stdout.splitlines()[-1])
            lines.append(command[command.index(self.host) + 1 :])
        answers = self.out / "parsed.json"
        paths = [os.environ[f"{self.host.upper()}_DIR"], os.environ[CHECKOUTS[self.host]], str(SCRIPT.parent)]
        # Last, torchvision's names for where it is not installed.
        paths += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "examples/grpo/sglang_cpu")]
        given = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        with (self.out / "parse.log").open("w") as log:
            subprocess.run(
                [self.python, "-m", "host_cpu.parse", self.host, str(answers)],
                **{"input": json.dumps(lines), "text": True, "check": True, "env": os.environ | given},
                **{"stdout": log, "stderr": log},
            )
        parsed = json.loads(answers.read_text())
        dropped = {
            name: [flag for flag in answer["dropped"] if flag not in parsed["options"]]
            for name, answer in zip(runs, parsed["answers"], strict=True)
        }
        if any(dropped.values()):
            raise ValueError(
                f"{self.host} would drop flags: { {name: found for name, found in dropped.items() if found} }"
            )

    @property
    def _script(self) -> Path:
        return MILES_SCRIPT if self.host == "miles" else SCRIPT

    def start(self, name: str, run: Run, *, port: int, engine: str | None) -> dict[str, Any]:
        """Run it, unless it is done, and write what it logged."""
        folder = self.out / name
        done = folder / "done.json"
        if done.exists():
            return json.loads(done.read_text())
        flags, environment = self._command(name, run, port=port, engine=engine)
        begin = time.monotonic()
        codes = [self._process(name, flags, environment, run, first=True)]
        # One that failed by itself would begin again, and nothing would be killed.
        if (folder / "run.log").read_text(errors="replace").endswith(PLANNED):
            codes.append(self._process(name, flags, environment, run, first=False))
        result = {
            "name": name,
            # With the last part of each path.
            "flags": " ".join(re.sub("^/.*/", "", flag) for flag in flags),
            "keys": run.keys,
            "return_codes": codes,
            "seconds": round(time.monotonic() - begin, 1),
            **logged(folder),
        }
        done.write_text(json.dumps(result, indent=1))
        print(f"{name}: {codes}, {result['seconds']} s, {len(result['steps'])} steps", flush=True)
        return result

    def _process(self, name: str, flags: Sequence[str], environment: dict[str, str], run: Run, *, first: bool) -> int:
        log = self.out / name / "run.log"
        words = ["bash", str(self._script), *flags]
        with ExitStack() as stack:
            if self.has_two_nodes:
                words, environment = stack.enter_context(apart(words, environment, log.parent))
            file = stack.enter_context(log.open("a"))
            process = subprocess.Popen(
                words, env=environment, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
            self._wait(process, log, run, first=first)
        return process.returncode

    def _wait(self, process: subprocess.Popen[bytes], log: Path, run: Run, *, first: bool) -> None:
        """Until it ends, is to be killed, or has had its time; then nothing of it is left."""
        limit = run.seconds * self.patience
        end = time.monotonic() + limit
        while process.poll() is None:
            reached = (
                first
                and run.kill_after_rollout is not None
                and run.kill_after_rollout in numbers(STEP, log.read_text())
            )
            if reached or time.monotonic() > end:
                end_session(process.pid)
                with log.open("a") as file:
                    file.write(PLANNED if reached else f"\nKILLED after {limit:.0f} s\n")
            time.sleep(0.5)
        end_session(process.pid)


@contextmanager
def apart(words: list[str], environment: dict[str, str], folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command line that runs on two Ray nodes, a GPU each, and the environment of the first.

    NCCL has their network alone: they share no memory and have names of their own.
    """
    sys.path[:0] = [str(ROOT), str(SCRIPT.parent)]
    from host_cpu.nodes import ENVIRONMENT, LINK, SecondNode, two_nodes

    paths = [os.environ["MEGATRON_DIR"], os.environ["SLIME_DIR"], *map(str, (ROOT, SCRIPT.parent))]
    # Last, torchvision's names for where it is not installed.
    paths += [
        str(ROOT / "examples/questions"),
        environment.get("PYTHONPATH", ""),
        str(ROOT / "examples/grpo/sglang_cpu"),
    ]
    given = environment | ENVIRONMENT | {"NCCL_SOCKET_IFNAME": LINK, "NCCL_DEBUG": "INFO"}
    # Ray's workers on the second node have its environment, which no script has set.
    given |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    given |= {"HF_HUB_OFFLINE": "1", "TENSORBOARD_DIR": str(folder / "tensorboard")}
    given.pop("SLIME_HOST_IP", None)
    first, second = (given if given.get("ON_CPU") else given | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in "01")
    with (
        tempfile.TemporaryDirectory(prefix="n") as scratch,
        two_nodes(words, SecondNode(), root=ROOT, folder=folder, scratch=Path(scratch), environment=second) as started,
    ):
        yield started, first


def end_session(leader: int) -> None:
    """Kill all processes of a session: Ray gives each of its workers a group, and engines and routers outlive them."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == leader:
                os.kill(int(folder.name), signal.SIGKILL)


def model_of(out: Path, *, python: str) -> Path:
    """The model that all runs begin with, written once: several runs side by side would write it at the same time."""
    model = out / "model"
    if not (model / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        module = "slime_gpu.tiny" if os.environ.get("ON_CPU") else "slime_gpu.model"
        subprocess.run([python, "-m", module, str(model)], check=True, cwd=SCRIPT.parent)
    return model


def checkpoint_of(out: Path, *, model: Path, python: str) -> Path:
    """The model as Miles' Megatron trainer reads it, written once."""
    checkpoint = out / "checkpoint"
    given = {"OUT": str(out), "MODEL": str(model), "CHECKPOINT": str(checkpoint), "PYTHON": python, "PREPARE_ONLY": "1"}
    # Its own rollouts are not needed.
    command = ["bash", str(MILES_SCRIPT), "--load-debug-rollout-data", ""]
    subprocess.run(command, env=os.environ | given, check=True)
    return checkpoint


@contextmanager
def shared_engine(out: Path, *, port: int, python: str, gpu: str | None = None) -> Iterator[str]:
    """SGLang's server, as ``slime_gpu.sh`` starts it: its address once it answers, and its end afterwards.

    It sees all GPUs, or one of them.

    Raises:
        subprocess.CalledProcessError: It ended, or does not answer in time; the end of its log is printed.
    """
    folder = out / f"engine_{port}"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "engine.log"
    given = {"OUT": str(folder), "CONFIG": "", "PORT": str(port), "PYTHON": python, "ENGINE_ONLY": "1"}
    if gpu is not None:
        given["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", str(SCRIPT)], env=os.environ | given, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait = [python, "-m", "slime_gpu.wait", f"http://127.0.0.1:{port}/health", str(process.pid), str(log)]
        subprocess.run(wait, check=True, cwd=SCRIPT.parent)
        yield f"127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table(folder: Path) -> str:
    """Markdown: one row per run."""
    lines = [
        "| run | rc | s | gradient norm, step 1 | step 2 | last | loss, step 1 | k3, step 1 | s a step "
        "| s of sampling, new weights, all | scoring pass | `train/mis_*` | reward, first to last | GiB | report |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in results(folder):
        steps = [values for _, values in sorted((int(step), values) for step, values in run["steps"].items())]
        perf = [values for _, values in sorted((int(step), values) for step, values in run["perf"].items())]
        rollouts = [values for _, values in sorted((int(step), values) for step, values in run["rollouts"].items())]
        norms = [step.get("train/grad_norm") for step in steps]
        shown = [norms[0], norms[1] if len(norms) > 1 else None, norms[-1]] if norms else [None] * 3
        rewards = [values["rollout/raw_reward"] for values in rollouts if "rollout/raw_reward" in values]
        own = len({key for step in steps for key in step if key.startswith("train/mis_")})
        peaks = [values["training"] for values in run.get("memory", {}).values() if "training" in values]
        # The first step compiles.
        train, *loop = (
            statistics.median(found) if (found := [each[key] for each in perf[1:] if key in each]) else None
            for key in (f"perf/{name}_time" for name in ("train", "rollout", "update_weights", "step"))
        )
        cells = [
            run["name"],
            ", ".join(map(str, run["return_codes"])),
            "" if run["seconds"] is None else f"{run['seconds']:.0f}",
            *("" if norm is None else f"{norm:.9g}" for norm in shown),
            f"{steps[0]['train/loss']:.6g}" if steps else "; ".join(run["errors"][-1:])[:120].replace("|", "/"),
            f"{steps[0]['train/mis_k3_kl']:.3g}" if steps and steps[0].get("train/mis_k3_kl") is not None else "",
            "" if train is None else f"{train:.2f}",
            "" if None in loop else ", ".join(f"{seconds:.1f}" for seconds in loop if seconds is not None),
            "yes" if any("perf/log_probs_time" in values for values in perf) else "no",
            str(own),
            f"{rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else "",
            "" if not peaks else f"{max(peaks):.2f}",
            run.get("report", ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(folder: Path) -> str:
    """Markdown of runs on rollouts that grow: the first size, which is repeated, and the last one."""
    lines = [
        "| run | rc | gradient norm, step 1 | tokens | s a step | of it scoring | GiB, scoring | training "
        "| most tokens that fit | GiB, scoring | training | fewest that do not | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    tokens = json.loads((folder / "tokens.json").read_text())
    for run in results(folder):
        steps, perf, memory = (
            {int(rollout): values for rollout, values in run[kind].items()} for kind in ("steps", "perf", "memory")
        )
        error = "; ".join(run["errors"][-1:])[:120].replace("|", "/")
        if not steps:
            lines.append(f"| {run['name']} | {run['return_codes']} |" + " |" * 10 + f" {error} |")
            continue
        repeated = [rollout for rollout in steps if tokens[rollout] == tokens[0]]
        fit = max(steps, key=lambda rollout: tokens[rollout])
        # The first step compiles, and what the log says of its pass holds for no other.
        seconds = [
            [perf[rollout][f"perf/{name}_time"] for rollout in repeated[1:] if f"perf/{name}_time" in perf[rollout]]
            for name in ("train", "log_probs")
        ]
        peaks = [
            [memory[rollout].get(name) if rollout in memory else None for name in ("scoring", "training")]
            for rollout in (repeated[-1], fit)
        ]
        cells = [
            run["name"],
            ", ".join(map(str, run["return_codes"])),
            f"{steps[0]['train/grad_norm']:.9g}",
            f"{tokens[0]:,}",
            *(f"{statistics.median(found):.2f}" if found else "" for found in seconds),
            *("" if peak is None else f"{peak:.2f}" for peak in peaks[0]),
            f"{tokens[fit]:,}",
            *("" if peak is None else f"{peak:.2f}" for peak in peaks[1]),
            f"{tokens[max(steps) + 1]:,}" if max(steps) + 1 < len(tokens) else "",
            error,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the requested runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("recorded", "whole", "ways", "memory", "table"))
    parser.add_argument("runs", nargs="*", help="names; default all")
    parser.add_argument("--host", choices=("slime", "miles"), default="slime", help="miles: recorded only")
    parser.add_argument("--out", type=Path, default=Path("runs/slime_gpu_record"))
    parser.add_argument("--rollouts", type=Path, help="folder with 0.pt, 1.pt, ... of --save-debug-rollout-data")
    parser.add_argument("--num-rollout", type=int, default=4, help="of the recorded ones")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; whole ones have an engine each")
    parser.add_argument("--two-nodes", action="store_true", help="recorded, slime: two Ray nodes, a GPU each; as root")
    parser.add_argument("--in-turn", action="store_true", help="start runs side by side, train one at a time")
    parser.add_argument("--engine-gpu", help="where the engines run that runs share; without it on all that are there")
    parser.add_argument("--dry-run", action="store_true", help="let the host's parser read ways, and run nothing")
    parser.add_argument("--engine", help="host:port of an engine that runs, for whole runs; without it one starts")
    parser.add_argument("--port", type=int, default=PORT, help="of the engine that starts; two calls need two")
    parser.add_argument("--flags", default="", help="the host's flags for every run, after those of the script")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of every run's time limit")
    parser.add_argument("--limit", type=int, help="seconds after which no further run is started")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with table: write all numbers there")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.what != "table":
        known = {
            "recorded": MILES if args.host == "miles" else RECORDED,
            **{"whole": WHOLE, "ways": MILES_WAYS if args.host == "miles" else WAYS, "memory": MEMORY},
        }[args.what]
        if args.host == "miles" and args.what == "whole":
            parser.error("whole: its engine is slime's; Miles has ways")
        if args.two_nodes and (args.host == "miles" or args.what != "recorded"):
            parser.error("--two-nodes: must come with recorded, whose trainer alone runs, and with slime")
        if args.host == "miles" and args.what == "memory":
            parser.error("memory: its hooks and its flags are slime's")
        unknown = set(args.runs) - set(known)
        if unknown:
            parser.error(f"runs {sorted(unknown)}: must be among {', '.join(known)}")
        shared = [*(SIZES if args.what == "ways" else ()), *args.flags.split()]
        if args.what in ("recorded", "memory"):
            if args.rollouts is None or not (args.rollouts / "0.pt").exists():
                parser.error(f"{args.what}: --rollouts must name a folder with 0.pt")
            if args.what == "memory":
                args.out.mkdir(parents=True, exist_ok=True)
                tokens = (args.rollouts / "tokens.json").read_text()
                (args.out / "tokens.json").write_text(tokens)
                args.num_rollout = len(json.loads(tokens))
                shared += [*IN_TURN_FROM_THE_MODEL_ON, *PEAKS, *ONE_MICRO_BATCH]
                args.jobs = 2
            files = str(args.rollouts.resolve() / "{rollout_id}.pt")
            shared += ["--debug-train-only", "--load-debug-rollout-data", files, "--num-rollout", str(args.num_rollout)]
            if args.in_turn:
                args.jobs = len(args.runs or known)
        if args.in_turn and args.what == "ways":
            os.environ["IN_TURN"] = "1"
        elif args.in_turn:
            shared += IN_TURN
        if os.environ.get("ON_CPU"):
            shared += ["--custom-rm-path", "slime_gpu.tiny.reward"]
        if "MODEL" not in os.environ:
            os.environ["MODEL"] = str(model_of(args.out, python=sys.executable))
        if args.host == "miles" and "CHECKPOINT" not in os.environ:
            model = Path(os.environ["MODEL"])
            os.environ["CHECKPOINT"] = str(checkpoint_of(args.out, model=model, python=sys.executable))
        if args.two_nodes:
            shared += ["--actor-num-nodes", "2"]
        runner = Runner(
            args.out,
            shared=shared,
            python=sys.executable,
            patience=args.patience,
            host=args.host,
            has_two_nodes=args.two_nodes,
        )
        # A mixture of experts is no model of the other runs.
        names = args.runs or [name for name in known if not name.startswith("ep2")]
        if args.what == "ways":
            runner.check({name: known[name] for name in names if not runner.is_done(name)})
            print(f"the host's parser takes {len(names)} command lines", flush=True)
        begin = time.monotonic()
        engines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def start(item: tuple[int, str]) -> None:
            index, name = item
            engine = engines.get()
            try:
                if args.limit is None or time.monotonic() - begin < args.limit:
                    runner.start(name, known[name], port=args.port + index % NUM_PORTS, engine=engine)
            finally:
                engines.put(engine)

        with ExitStack() as stack:
            needs_engine = args.what in ("whole", "ways") and args.engine is None and not args.dry_run
            needs_engine &= any(known[name].shares_an_engine and not runner.is_done(name) for name in names)
            # One after the other: at its start an engine measures what memory it takes.
            for port in range(args.port, args.port + args.jobs):
                engine = shared_engine(args.out, port=port, python=sys.executable, gpu=args.engine_gpu)
                engines.put(stack.enter_context(engine) if needs_engine else args.engine)
            pool = stack.enter_context(ThreadPoolExecutor(args.jobs))
            list(pool.map(start, enumerate([] if args.dry_run else names)))
    elif args.json is not None:
        args.json.write_text("[\n" + ",\n".join(map(json.dumps, results(args.out))) + "\n]\n", encoding="utf-8")
    print(memory_table(args.out) if (args.out / "tokens.json").exists() else table(args.out))


if __name__ == "__main__":
    main()
