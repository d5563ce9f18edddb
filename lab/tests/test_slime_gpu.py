# SPDX-License-Identifier: Apache-2.0
"""The runs of slime and Miles on one GPU: their command lines, tasks, and what they say where something is missing."""

import asyncio
import importlib
import json
import os
import random
import runpy
import select
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from host_cpu import nodes

from examples.questions.arithmetic import draw_task, is_right, reward, second_try, write_prompts
from lab.hosts.slime_gpu import in_turn, memory, shape
from lab.hosts.slime_gpu.check import checkout_problems, is_patched
from lab.real_stack import slime_gpu
from lab.real_stack.slime_gpu import STEP, memory_table, numbers, table

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "lab/hosts/slime_gpu.sh"
MILES_SCRIPT = ROOT / "lab/hosts/miles_gpu.sh"
OURS = str(ROOT / "yaml/mis.yaml")
CHECKOUTS = dict.fromkeys(("SLIME_DIR", "MEGATRON_DIR", "MILES_DIR", "MILES_MEGATRON_DIR"), str(ROOT))


def dry_run(*flags: str, script: Path = SCRIPT, **environment: str) -> list[str]:
    """The command lines that the script would start, of themselves without our flags: to check them imports torch."""
    given = CHECKOUTS | {"PYTHON": sys.executable, "DRY_RUN": "1", "CONFIG": ""}
    result = subprocess.run(
        ["bash", str(script), *flags], env=os.environ | given | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.strip()]


@pytest.mark.long_run
@pytest.mark.whole_run
def test_one_engine_and_one_training_with_our_flags() -> None:
    engine, train = dry_run("--num-rollout", "3", ATTENTION="torch", CONFIG=OURS)
    assert "sglang.launch_server" in engine
    assert "--port 31000" in engine
    assert "--rollout-external-engine-addrs 127.0.0.1:31000" in train
    assert "--custom-megatron-init-path mis_ext.check_setup" in train
    # Flags of the user win.
    assert train.rstrip().endswith("--num-rollout 3")


@pytest.mark.whole_run
def test_an_engine_of_slime_gets_weights_without_a_file() -> None:
    (train,) = dry_run("--colocate", ATTENTION="torch", ENGINE="own", ON_CPU="")
    assert "--rollout-external-engine-addrs" not in train
    assert "--update-weight-transport" not in train
    assert "--sglang-attention-backend triton" in train
    assert train.rstrip().endswith("--colocate")


@pytest.mark.whole_run
def test_recorded_rollouts_need_no_engine() -> None:
    (train,) = dry_run("--debug-train-only", ATTENTION="torch")
    assert "--rollout-external-engine-addrs" not in train
    assert "--save " not in train


@pytest.mark.whole_run
def test_attention_has_two_values() -> None:
    (_, train) = dry_run(ATTENTION="te")
    assert "--spec" not in train
    given = {"SLIME_DIR": str(ROOT), "MEGATRON_DIR": str(ROOT), "PYTHON": sys.executable, "ATTENTION": "flash"}
    result = subprocess.run(["bash", str(SCRIPT)], env=os.environ | given, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ATTENTION=flash: must be te or torch" in result.stderr


@pytest.mark.whole_run
def test_miles_converts_records_and_trains_without_an_engine() -> None:
    flags = {"ATTENTION": "torch", "OUT": "/out", "CONFIG": OURS}
    convert, rollouts, train = dry_run("--num-rollout", "3", script=MILES_SCRIPT, **flags)
    assert f"{ROOT}/tools/convert_hf_to_torch_dist.py" in convert
    assert convert.rstrip().endswith("--hf-checkpoint /out/model --save /out/model_megatron")
    assert "rollouts.py miles /out/model /out/rollouts" in rollouts
    assert "-m slime_gpu.train miles" in train
    assert "--ref-load /out/model_megatron" in train
    assert r"--debug-train-only --load-debug-rollout-data /out/rollouts/\{rollout_id\}.pt" in train
    assert "--custom-megatron-init-path mis_ext.check_setup" in train
    assert "sglang" not in train
    assert train.rstrip().endswith("--num-rollout 3")


@pytest.mark.whole_run
def test_miles_trains_on_the_rollouts_of_a_user_and_dumps_nothing() -> None:
    flags = ("--load-debug-rollout-data", "/own/{rollout_id}.pt")
    _, train = dry_run(*flags, script=MILES_SCRIPT, ATTENTION="torch")
    assert train.rstrip().endswith(r"--load-debug-rollout-data /own/\{rollout_id\}.pt")
    assert "--dump-details" not in train
    assert "mis_ext" not in train


@pytest.mark.whole_run
def test_miles_starts_an_engine_of_its_own_for_either_trainer() -> None:
    for trainer in ("megatron", "fsdp"):
        *_, train = dry_run(script=MILES_SCRIPT, ATTENTION="torch", ENGINE="own", BACKEND=trainer, ON_CPU="")
        assert "--rollout-num-gpus-per-engine 1" in train
        assert "--sglang-attention-backend triton" in train
        assert f"--train-backend {trainer}" in train
        assert "--debug-train-only" not in train
        # FSDP reads the model's own folder, and its parser ends at a flag of Megatron-LM.
        for flag in ("--num-layers", "--attention-softmax-in-fp32", "--no-load-optim"):
            assert (flag in train) is (trainer == "megatron"), flag


QWEN2 = {
    **{"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    **{"vocab_size": 151936, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
}


def test_the_shape_of_a_model_is_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    words = " ".join(shape.flags(tmp_path))
    assert "--num-query-groups 2 --kv-channels 128" in words
    assert "--rotary-base 1000000 --norm-epsilon 1e-06" in words
    assert words.endswith("--vocab-size 151936 --add-qkv-bias")
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"model_type": "llama", "tie_word_embeddings": False}))
    assert shape.flags(tmp_path)[-1] == "--untie-embeddings-and-output-weights"
    assert "--num-attention-heads 9 --num-query-groups 3 --kv-channels 64" in " ".join(shape.flags(tmp_path / "none"))
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"model_type": "qwen3_moe"} | experts))
    words = " ".join(shape.flags(tmp_path))
    assert "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128" in words
    assert words.endswith("--qk-layernorm")
    (tmp_path / "config.json").write_text(
        json.dumps(QWEN2 | {"model_type": "qwen3_moe"} | experts | {"mlp_only_layers": [0]})
    )
    with pytest.raises(ValueError, match="experts in every layer"):
        shape.flags(tmp_path)


@pytest.mark.whole_run
def test_a_rehearsal_of_miles_needs_no_gpu() -> None:
    convert, _, train = dry_run(script=MILES_SCRIPT, ATTENTION="torch", ON_CPU="1")
    assert "-m host_cpu.convert" in convert
    assert "--distributed-backend gloo" in train


@pytest.mark.whole_run
def test_a_rehearsal_finds_torchvisions_names(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" > {tmp_path}/path\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for is_rehearsal in ("", "1"):
        dry_run(ATTENTION="torch", PYTHON=str(python), ON_CPU=is_rehearsal)
        found = (tmp_path / "path").read_text().strip().endswith(":" + str(ROOT / "examples/grpo/sglang_cpu"))
        assert found is bool(is_rehearsal)


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_DIR", str(tmp_path))
    monkeypatch.setenv("MILES_MEGATRON_DIR", str(tmp_path))
    assert checkout_problems("miles") == [
        f"MILES_DIR={tmp_path}: no train.py in it",
        f"MILES_MEGATRON_DIR={tmp_path}: no megatron/core/__init__.py in it",
    ]
    (tmp_path / "train.py").touch()
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").touch()
    assert checkout_problems("miles") == []


RUN = """
import os, sys
print(" ".join(sys.argv[1:]), os.environ["CHECKPOINT"], os.environ.get("PREPARE_ONLY"), os.environ.get("PYTHONPATH"))
"""


def test_recorded_runs_of_miles_share_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.py").write_text(RUN)
    script = tmp_path / "run_gpu.sh"
    script.write_text(f'exec {sys.executable} {tmp_path / "run.py"} "$@" >> {tmp_path / "calls"}\n')
    (tmp_path / "0.pt").touch()
    monkeypatch.setattr(slime_gpu, "MILES_SCRIPT", script)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("CHECKPOINT", raising=False)
    monkeypatch.setenv("MODEL", "a_model")
    monkeypatch.setenv("MILES_DIR", "/miles")
    words = ["recorded", "example", "hook_core", "--host", "miles", "--rollouts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["slime_gpu.py", *words, "--out", str(tmp_path / "out")])
    slime_gpu.main()
    prepared, example, hook = (tmp_path / "calls").read_text().splitlines()
    checkpoint = tmp_path / "out/checkpoint"
    assert prepared.endswith(f" {checkpoint} 1 None")
    assert example.endswith(f" {checkpoint} None /miles/examples/infra_features")
    assert hook.endswith(f" {checkpoint} None None")
    assert "mis_ext.compute_mis_weights_with_cp" in hook
    assert f"--debug-train-only --load-debug-rollout-data {tmp_path}" in hook


def test_two_nodes_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    @contextmanager
    def two_nodes(command: list[str], second: nodes.SecondNode, *, environment: dict[str, str], **_: Path):
        started.append(environment["CUDA_VISIBLE_DEVICES"])
        yield ["bash", "-c", 'echo "$CUDA_VISIBLE_DEVICES $RAY_ADDRESS $0 $*" > "$OUT/call"', *command]

    monkeypatch.setattr(nodes, "two_nodes", two_nodes)
    for name in ("SLIME_DIR", "MEGATRON_DIR", "MODEL"):
        monkeypatch.setenv(name, "there")
    monkeypatch.delenv("ON_CPU", raising=False)
    (tmp_path / "0.pt").touch()
    words = ["recorded", "hook_core", "--rollouts", str(tmp_path), "--out", str(tmp_path / "out"), "--two-nodes"]
    monkeypatch.setattr(sys, "argv", ["slime_gpu.py", *words])
    slime_gpu.main()
    call = (tmp_path / "out/hook_core/call").read_text()
    assert call.startswith("0 10.77.0.1:6399 bash ")
    assert "--actor-num-nodes 2" in call
    assert started == ["1"]
    monkeypatch.setattr(sys, "argv", ["slime_gpu.py", *words, "--host", "miles"])
    with pytest.raises(SystemExit):
        slime_gpu.main()


ECHO = """echo "$OUT" ENGINE="$ENGINE" LOOP="$LOOP" "$@" >> {calls}"""


@pytest.fixture
def ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run ways with a script that notes how it is called, and engines that are not there; return these notes."""
    script = tmp_path / "run_gpu.sh"
    script.write_text(ECHO.format(calls=tmp_path / "calls"))

    @contextmanager
    def engine(out: Path, *, port: int, python: str, gpu: str | None):
        yield f"127.0.0.1:{port} on {gpu}"

    monkeypatch.setattr(slime_gpu, "SCRIPT", script)
    monkeypatch.setattr(slime_gpu, "shared_engine", engine)
    monkeypatch.setattr(slime_gpu.Runner, "check", lambda self, runs: None)
    monkeypatch.setenv("MODEL", "a_model")
    monkeypatch.setenv("IN_TURN", "")
    for name in ("LOOP", "ENGINE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> list[str]:
        (tmp_path / "calls").write_text("")
        monkeypatch.setattr(sys, "argv", ["slime_gpu.py", "ways", *words, "--out", str(tmp_path / "out")])
        slime_gpu.main()
        return (tmp_path / "calls").read_text().splitlines()

    return run


def test_expert_parallelism_runs_by_name_alone(ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_gpu, "WAYS", {name: slime_gpu.WAYS[name] for name in ("sync_nothing", "ep2_hook")})
    assert [call.split()[0].rpartition("/")[2] for call in ways()] == ["sync_nothing"]
    (call,) = ways("ep2_hook")
    assert "--expert-model-parallel-size 2" in call


def test_trainers_of_two_gpus_may_have_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_GPUS", "4")
    ways = runpy.run_path(slime_gpu.__file__)
    for run in (ways["WAYS"]["tp2_hook"], ways["MILES_WAYS"]["colocate_loss"]):
        words = " ".join(run.flags)
        assert "--actor-num-gpus-per-node 4 --num-gpus-per-node 4" in words
    assert "--actor-num-gpus-per-node" not in ways["WAYS"]["sync_hook"].flags


def test_each_lane_of_ways_has_an_engine_and_what_is_done_stays(ways) -> None:
    names = ("async2_hook", "colocate_loss", "tp2_no_logits", "turns_nothing")
    calls = ways(*names, "--jobs", "2", "--engine-gpu", "1")
    by_name = {call.split()[0].rpartition("/")[2]: call for call in calls}
    assert by_name.keys() == {*names}
    assert "ENGINE=own" in by_name["colocate_loss"]
    shared = [by_name[name].split("ENGINE=")[1].split(" LOOP")[0] for name in names if name != "colocate_loss"]
    assert {*shared} <= {"127.0.0.1:31000 on 1", "127.0.0.1:31001 on 1"}
    assert "LOOP=train_async " in by_name["async2_hook"]
    assert "--rollout-data-postprocess-path mis_ext.prepare_rollout" in by_name["async2_hook"]
    assert "--sequence-parallel" in by_name["tp2_no_logits"]
    assert "mis_ext.model_provider" in by_name["tp2_no_logits"]
    # The environment needs keys, and nothing corrects.
    assert "--custom-config-path" in by_name["turns_nothing"]
    assert "custom-tis" not in by_name["turns_nothing"]
    assert ways(*names) == []


@pytest.mark.timeout(120)
def test_a_run_that_raises_ends_the_call(ways, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(self, name: str, run: slime_gpu.Run, **given: object) -> None:
        raise OSError(name)

    monkeypatch.setattr(slime_gpu.Runner, "start", raising)
    with pytest.raises(OSError, match="sync_nothing"):
        ways("sync_nothing", "sync_hook")


@pytest.mark.parametrize(("last", "kill_after_rollout"), [("wait", 0), ("exit", None)])
def test_a_run_leaves_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, kill_after_rollout: int | None
) -> None:
    # As Ray's workers it has a process group of its own.
    script = tmp_path / "run_gpu.sh"
    script.write_text(f'set -m; exec 3> "$OUT/engine"; sleep 60 & exec 3>&-; echo "step 0: {{}}"; {last}')
    monkeypatch.setattr(slime_gpu, "SCRIPT", script)
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a/engine")
    lives = os.open(tmp_path / "a/engine", os.O_RDONLY | os.O_NONBLOCK)
    runner = slime_gpu.Runner(tmp_path, shared=(), python=sys.executable, patience=1)
    environment = os.environ | {"OUT": str(tmp_path / "a")}
    run = slime_gpu.Run(kill_after_rollout=kill_after_rollout)
    assert (runner._process("a", (), environment, run, first=True) < 0) is (last == "wait")
    poll = select.poll()
    poll.register(lives, select.POLLIN)
    assert poll.poll(50_000)
    os.close(lives)


@pytest.mark.long_run
@pytest.mark.whole_run
@pytest.mark.parametrize(("does", "codes"), [("exit 1", [1]), ("echo 'step 0: {}'; exec sleep 60", [-9, -9])])
def test_only_what_was_killed_is_resumed(does, codes, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.sh"
    script.write_text(does)
    monkeypatch.setattr(slime_gpu, "SCRIPT", script)
    runner = slime_gpu.Runner(tmp_path, shared=(), python=sys.executable, patience=1)
    run = slime_gpu.Run(kill_after_rollout=0, seconds=5)
    assert runner.start("a", run, port=0, engine=None)["return_codes"] == codes


def test_miles_starts_the_engines_of_all_its_ways() -> None:
    for name, run in slime_gpu.MILES_WAYS.items():
        assert not run.shares_an_engine, name
        assert ("--colocate" in run.flags) is not ("--rollout-num-gpus" in run.flags), name


def test_miles_replays_experts_through_its_own_router() -> None:
    for name in ("ep2_hook", "ep2_replayed_hook"):
        flags = slime_gpu.MILES_WAYS[name].flags
        assert "--expert-model-parallel-size" in flags
        assert "--use-miles-router" in flags
        assert ("--use-rollout-routing-replay" in flags) is ("replayed" in name)


@pytest.mark.parametrize(("name", "backend"), [("killed", None), ("fsdp_killed", "fsdp")])
def test_either_trainer_of_miles_is_killed_between_two_checkpoints(name: str, backend: str | None) -> None:
    run = slime_gpu.MILES_WAYS[name]
    interval = int(run.flags[run.flags.index("--save-interval") + 1])
    assert run.environment.get("BACKEND") == backend
    assert run.kill_after_rollout is not None
    assert interval <= run.kill_after_rollout < int(run.flags[run.flags.index("--num-rollout") + 1])


class Stopped(Exception):
    """Ray was asked for."""


def test_nodes_that_run_already_keep_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict] = []

    def init(**given: object) -> None:
        asked.append(given)
        raise Stopped

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.delenv("ON_CPU", raising=False)
    train = importlib.import_module("lab.hosts.slime_gpu.train")
    for name in ("host_cpu", "host_cpu.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(install_engine=lambda: None))
    for address in ("10.77.0.1:6399", None):
        monkeypatch.setattr(sys, "argv", ["train", "slime"])
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if address:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(Stopped):
            train.main()
    assert asked[0].keys() == {"runtime_env"}
    assert {"num_gpus", "num_cpus"} < asked[1].keys()


def test_a_dry_run_of_ways_starts_nothing(ways) -> None:
    assert ways("async1_hook", "--dry-run") == []


def test_of_two_ranks_the_first_waits_for_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TURN_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(in_turn.distributed, "is_initialized", lambda: True)
    for rank, held in ((1, 0), (0, 1)):
        monkeypatch.setattr(in_turn, "_held", [])
        monkeypatch.setattr(in_turn.distributed, "get_rank", lambda rank=rank: rank)
        in_turn.wait()
        assert len(in_turn._held) == held
        for file in in_turn._held:
            file.close()


def test_the_table_has_the_peak_of_all_ranks_and_the_first_cause(tmp_path: Path) -> None:
    (tmp_path / "nothing/report").mkdir(parents=True)
    lines = ["x) step 0: {'train/grad_norm': 1.5, 'train/loss': 0.25}", "memory 0: {'training': 3.5}"]
    (tmp_path / "nothing/run.log").write_text("\n".join([*lines, "memory 0: {'training': 2.0}"]))
    cause = {"cause": "stale_weights", "confidence": "possible"}
    (tmp_path / "nothing/report/summary.json").write_text(json.dumps({"diagnoses": [cause, {}]}))
    assert table(tmp_path).endswith("| 3.50 | stale_weights (possible) |")
    (tmp_path / "nothing/report/summary.json").write_text("")
    assert table(tmp_path).endswith("| 3.50 |  |")


def test_miles_has_no_whole_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["slime_gpu.py", "whole", "--host", "miles"])
    with pytest.raises(SystemExit):
        slime_gpu.main()
    assert "whole: its engine is slime's; Miles has ways" in capsys.readouterr().err


def test_tasks_have_one_right_answer(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 50)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(lines) == 50
    for line in lines:
        question = line["prompt"][0]["content"]
        if " x " in question:
            a, b = (int(word) for word in question.removeprefix("What is ").split("?")[0].split(" x "))
            assert line["label"] == str(a * b)
    assert draw_task(random.Random(1)) == draw_task(random.Random(1))


@pytest.mark.parametrize(
    ("text", "right"), [("7 x 8 = 56", True), ("56 is not 55", False), ("", False), ("156", False)]
)
def test_the_last_integer_counts(text: str, right: bool) -> None:
    sample = SimpleNamespace(response=text, label="56")
    assert is_right(text, "56") is right
    assert asyncio.run(reward(None, sample)) == float(right)
    assert (asyncio.run(second_try(sample, text)) is None) is right


def test_a_patch_is_found_by_its_first_line(tmp_path: Path) -> None:
    patch = tmp_path / "a.patch"
    patch.write_text("--- a/f.py\n+++ b/f.py\n@@\n one\n+two\n")
    (tmp_path / "f.py").write_text("one\n")
    assert not is_patched(tmp_path, patch)
    (tmp_path / "f.py").write_text("one\ntwo\n")
    assert is_patched(tmp_path, patch)


def test_a_table_of_what_slime_logged(tmp_path: Path) -> None:
    text = "x - step 0: {'train/loss': nan, 'train/grad_norm': 1.5}\nx - step 1: {'train/grad_norm': -inf}\n"
    found = numbers(STEP, text)
    assert found == {0: {"train/loss": None, "train/grad_norm": 1.5}, 1: {"train/grad_norm": None}}
    run = {
        "name": "a",
        "return_codes": [1],
        "seconds": 2.0,
        "steps": {},
        "rollouts": {},
        "perf": {},
        "errors": ["E: no"],
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "done.json").write_text(json.dumps(run))
    (tmp_path / "a" / "run.log").write_text("")
    assert table(tmp_path).splitlines()[-1].startswith("| a | 1 | 2 |  |  |  | E: no |")


def test_of_an_error_its_beginning_is_kept(tmp_path: Path) -> None:
    """The end of a long message says nothing: torch's is on a setting of its allocator, ours the list of known keys."""
    line = "[36m(pid=7)[0m torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. " + "More. " * 100
    (tmp_path / "run.log").write_text(f"step 0: {{'train/loss': 1.0}}\n{line}\n")
    (error,) = slime_gpu.logged(tmp_path)["errors"]
    assert error.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.")
    assert len(error) == 300


def test_the_table_has_what_was_stopped_in_the_order_of_the_runs(tmp_path):
    for name, norm in (("whole", 1.5), ("nothing", 2.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.log").write_text(f"x) step 0: {{'train/grad_norm': {norm}, 'train/loss': 0.25}}\n")
    rows = table(tmp_path).splitlines()[2:]
    assert rows[0].startswith("| nothing | stopped |  | 2.5 |  | 2.5 | 0.25 |")
    assert rows[1].startswith("| whole | stopped |  | 1.5 |")


def test_times_are_medians_without_the_first_step(tmp_path: Path) -> None:
    for name, keys in (("nothing", ("train",)), ("whole", ("train", "rollout", "update_weights", "step"))):
        of_steps = (90.0, 3.0, 1.0, 2.0)
        values = [{f"perf/{key}_time": seconds + at for at, key in enumerate(keys)} for seconds in of_steps]
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.log").write_text("".join(f"x) perf {at}: {each}\n" for at, each in enumerate(values)))
    nothing, whole = table(tmp_path).splitlines()[2:]
    assert " | 2.00 |  | no |" in nothing
    assert " | 2.00 | 3.0, 4.0, 5.0 | no |" in whole


GROWN = """
x) perf 0: {'perf/train_time': 90.0, 'perf/log_probs_time': 50.0}
x) step 0: {'train/grad_norm': 1.5}
memory 0: {'scoring': 2.0, 'scoring_taken': 3.0}
memory 0: {'training': 4.0, 'training_taken': 5.0}
x) perf 1: {'perf/train_time': 2.0, 'perf/log_probs_time': 0.5}
x) step 1: {'train/grad_norm': 1.25}
memory 1: {'scoring': 2.25, 'scoring_taken': 3.0}
memory 1: {'training': 4.25, 'training_taken': 5.0}
x) step 2: {'train/grad_norm': 1.0}
memory 2: {'scoring': 7.0, 'scoring_taken': 8.0}
x) perf 2: {'perf/train_time': 3.0, 'perf/log_probs_time': 1.0}
torch.OutOfMemoryError: no memory
"""


def test_what_fitted_is_the_last_step_that_ended(tmp_path: Path) -> None:
    for name, log in (("no_logits", GROWN), ("logits", "ValueError: never began\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.log").write_text(log)
    (tmp_path / "tokens.json").write_text("[1024, 1024, 2048, 4096]")
    grown, failed = memory_table(tmp_path).splitlines()[2:]
    # Times and memory are those of the first size, where it came again.
    first = "| no_logits | stopped | 1.5 | 1,024 | 2.00 | 0.50 | 2.25 | 4.25 "
    assert grown == first + "| 2,048 | 7.00 |  | 4,096 | OutOfMemoryError: no memory |"
    assert failed.endswith("| ValueError: never began |")


def test_runs_on_rollouts_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "run_gpu.sh"
    script.write_text(f'echo "$@" >> {tmp_path / "calls"}\n')
    (tmp_path / "0.pt").touch()
    (tmp_path / "tokens.json").write_text("[8, 8, 16]")
    monkeypatch.setattr(slime_gpu, "SCRIPT", script)
    monkeypatch.setenv("MODEL", "a_model")
    words = ["memory", "no_logits", "own_loss", "--rollouts", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["slime_gpu.py", *words])
    slime_gpu.main()
    ours, own = sorted((tmp_path / "calls").read_text().splitlines(), key=lambda line: "mis_ext" not in line)
    for line in (ours, own):
        assert "--num-rollout 3" in line
        assert "--custom-megatron-init-path slime_gpu.in_turn.wait" in line
        assert "slime_gpu.memory.before_scoring" in line
        # All of a rollout is one micro-batch.
        assert f"--max-tokens-per-gpu {1 << 30}" in line
        assert "--recompute-granularity full" in line
    assert "--custom-model-provider-path mis_ext.model_provider" in ours
    assert "mis_ext" not in own


def test_a_peak_is_of_the_pass_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    peaks, resets = iter([1 << 30, 2 << 30, 3 << 30]), []
    monkeypatch.setattr(memory, "_pass", None)
    monkeypatch.setattr(memory.torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(memory.torch.cuda, "max_memory_reserved", lambda: 4 << 30)
    monkeypatch.setattr(memory.torch.cuda, "reset_peak_memory_stats", lambda: resets.append(None))
    memory.before_scoring(None, None, "")
    memory.before_step(None, 0, 0)
    memory.before_scoring(None, None, "")
    memory.before_step(None, 1, 0)
    assert len(resets) == 4
    assert numbers(slime_gpu.PEAK, capsys.readouterr().out) == {
        0: {"scoring": 1.0, "scoring_taken": 4.0, "training": 2.0, "training_taken": 4.0},
        1: {"scoring": 3.0, "scoring_taken": 4.0},
    }


ENGINE = """
import http.server, os, sys
print("arguments", os.environ["ENGINE_ONLY"], os.environ["PORT"], os.environ.get("MODEL"), flush=True)
if {fails}:
    sys.exit("no memory")
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), type("Answer", (http.server.BaseHTTPRequestHandler,), {
    "do_GET": lambda self: self.send_response(200) or self.end_headers(), "log_message": lambda *_: None
})).serve_forever()
"""


def engine_script(tmp_path: Path, *, fails: bool) -> Path:
    """In the place of slime_gpu.sh: a server that answers."""
    (tmp_path / "engine.py").write_text(ENGINE.replace("{fails}", str(fails)))
    script = tmp_path / "run_gpu.sh"
    script.write_text(f"exec {sys.executable} {tmp_path / 'engine.py'}\n")
    (tmp_path / "slime_gpu").symlink_to(SCRIPT.parent / "slime_gpu")
    return script


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.long_run
def test_whole_runs_share_an_engine_that_answers_and_ends_with_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(slime_gpu, "SCRIPT", engine_script(tmp_path, fails=False))
    monkeypatch.setenv("MODEL", "a_model")
    port = free_port()
    with slime_gpu.shared_engine(tmp_path, port=port, python=sys.executable) as address:
        assert address == f"127.0.0.1:{port}"
        assert (tmp_path / f"engine_{port}/engine.log").read_text() == f"arguments 1 {port} a_model\n"
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_engine_that_ends_is_told_with_its_log(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(slime_gpu, "SCRIPT", engine_script(tmp_path, fails=True))
    with (
        pytest.raises(subprocess.CalledProcessError),
        slime_gpu.shared_engine(tmp_path, port=free_port(), python=sys.executable),
    ):
        pytest.fail("there is no engine")
    assert "no memory" in capfd.readouterr().err


def test_the_engine_alone_trains_nothing(tmp_path: Path) -> None:
    """With what checks and makes the model replaced, the script becomes the engine's process."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[[ "$*" == *"slime_gpu.check"* ]] || echo "$@"\n')
    python.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    (tmp_path / "prompts.jsonl").touch()
    given = {"SLIME_DIR": str(ROOT), "MEGATRON_DIR": str(ROOT), "PYTHON": str(python), "OUT": str(tmp_path)}
    given |= {"CONFIG": "", "ATTENTION": "torch", "ENGINE_ONLY": "1"}
    result = subprocess.run(["bash", str(SCRIPT)], env=os.environ | given, capture_output=True, text=True, check=True)
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert [line.split()[:2] for line in lines if "slime_gpu.train" in line or "launch_server" in line] == [
        ["-m", "sglang.launch_server"]
    ]


@pytest.mark.long_run
def test_a_run_waits_for_its_turn_until_the_one_before_has_ended(tmp_path: Path) -> None:
    code = (
        "from slime_gpu.in_turn import wait; print('asks', flush=True); wait(); wait(None, 1); "
        "print('trains', flush=True); input()"
    )
    environment = os.environ | {"TURN_LOCK": str(tmp_path / "lock"), "PYTHONPATH": str(SCRIPT.parent)}

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first:
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == ["asks\n", "trains\n"]
        with start() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "asks\n"
            # select.select takes no descriptor above 1,023, and a process of many tests has as many.
            poll = select.poll()
            poll.register(second.stdout, select.POLLIN)
            trains = poll.poll(1000)
            first.kill()
            assert not trains, "both train"
            assert second.stdout.readline() == "trains\n"
            second.kill()
