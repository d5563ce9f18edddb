# SPDX-License-Identifier: Apache-2.0
"""The runs of unmodified slime and Miles on a CPU: they fail where they must, and pass where the checkouts are."""

import importlib
import math
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.hosts.host_cpu import device, documented, inputs, nodes, weight_transfer
from lab.hosts.host_cpu.by_hand import ByHand
from lab.hosts.host_cpu.cases import CHECK, Host
from lab.hosts.host_cpu.comparison import Result, faults_of_comparison, faults_of_run, off
from lab.hosts.host_cpu.context_parallel import zigzag_places
from lab.hosts.host_cpu.logged import MODEL_BUILT, Logged, read_log
from lab.hosts.host_cpu.miles_megatron_runs import MILES_MEGATRON
from lab.hosts.host_cpu.miles_runs import MILES
from lab.hosts.host_cpu.report import page, record, table, write
from lab.hosts.host_cpu.slime_runs import SLIME

ROOT = Path(__file__).parents[2]
NORM = 1.6706459304976926
WORKER = "\x1b[36m(MegatronTrainRayActor pid=7)\x1b[0m "
CASES = {case.name: case for case in SLIME.cases}
ALIKE = [case.name for case in SLIME.cases if case.is_alike and not case.layout]
MEGATRON_HOSTS = pytest.mark.parametrize("host", [SLIME, MILES_MEGATRON], ids=lambda host: host.name)


def step(index: int, **values: float) -> dict[str, float]:
    return {"train/loss": 0.5, "train/grad_norm": NORM, "train/step": index} | {
        f"train/{name}": value for name, value in values.items()
    }


def ran(name: str, *, grad_norm: float = NORM, return_code: int = 0) -> Result:
    """A run in which everything arrived."""
    case = CASES[name]
    ours = {metric.removeprefix("train/"): 1.0 for metric in case.metrics}
    steps = [step(index, grad_norm=grad_norm, **ours) for index in range(2 * case.steps_per_rollout)]
    perf = [{"perf/train_time": 0.5, "perf/log_probs_time": 0.1}] * 2
    return Result(case, return_code, Logged(steps, [{}, {}], perf, "\n".join((*case.says, MODEL_BUILT))), 30.0)


def on_cp_2(**norms: float) -> list[Result]:
    """Runs on CP 2 and their partners, all as they must be but the norms given by name."""
    names = [name for case in SLIME.cases if case.layout == "CP 2" for name in (case.partner, case.name)]
    plain = {name: 1.6395 for name in names if name.startswith("nothing")}
    return [ran(name, grad_norm=(dict.fromkeys(names, NORM) | plain | norms)[name]) for name in names]


def test_a_trajectory_that_becomes_two_samples_has_all_numbers_of_its_tokens():
    of_tokens = ("rollout_log_probs", "loss_mask", "teacher_log_probs")
    samples = [
        {"index": index, "tokens": [0] * 40, "response_length": 32} | {key: [1] * 32 for key in of_tokens}
        for index in range(8)
    ]
    fanned = inputs.fanned_out(samples)
    assert [sample["response_length"] for sample in fanned[:4]] == [32, 32, 16, 32]
    assert all(len(sample[key]) == sample["response_length"] for sample in fanned for key in of_tokens)


def refused(name: str, text: str, *, return_code: int = 1) -> Result:
    return Result(CASES[name], return_code, Logged([], [], [], text), 20.0)


def test_numbers_are_read_from_a_hosts_log_with_all_digits() -> None:
    log = read_log(
        f"{WORKER}[2026-11-23 16:33:17] metric.py:135 - rollout 0: {{'rollout/rewards': -7.450580596923828e-09}}\n"
        # A progress bar has no line of its own.
        f"{WORKER}actor train:   0%|     | 0/2 [00:00<?]\r[2026-11-23 16:33:17] model.py:918 - step 0: "
        f"{{'train/loss': nan, 'train/ppo_kl': -inf, 'train/grad_norm': {NORM!r}}}\n"
        f"{WORKER}[2026-11-23 16:33:17] model.py:918 - step 1: {{'train/grad_norm': inf, 'train/step': 1}}\n"
        f"{WORKER}[2026-11-23 16:33:17] metric.py:401 - perf 0: {{'perf/train_time': 0.25}}\n"
    )
    first, second = log.steps
    assert math.isnan(first["train/loss"])
    assert first["train/ppo_kl"] == -math.inf
    assert first["train/grad_norm"] == NORM
    assert second == {"train/grad_norm": math.inf, "train/step": 1}
    assert log.rollouts == [{"rollout/rewards": -7.450580596923828e-09}]
    assert log.perf == [{"perf/train_time": 0.25}]
    assert log.names == {"train/loss", "train/ppo_kl", "train/grad_norm", "train/step"}


def test_the_line_of_a_step_that_miles_writes_twice_is_one_step() -> None:
    lines = [
        f"{file} - step {index}: {{'train/grad_norm': {norm}, 'train/step': {index}}}\n"
        for index, norm in enumerate((0.25, 0.5))
        for file in ("log_utils.py:542", "model.py:854")
    ]
    assert read_log("".join(lines)).steps == [
        {"train/grad_norm": 0.25, "train/step": 0},
        {"train/grad_norm": 0.5, "train/step": 1},
    ]
    with pytest.raises(ValueError, match="step 1 follows 2"):
        read_log("".join(lines) + lines[-1].replace("0.5", "0.75"))
    with pytest.raises(ValueError, match="step 0 follows 2"):
        read_log("".join(lines) + lines[0])


class Arguments:
    """Like those of SGLang 0.5.17: final."""

    def __init__(self, host: str) -> None:
        self.__dict__["host"] = host

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} assigned after resolution")


def test_of_an_engine_what_stands_there_may_be_assigned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ("begin_weight_update", "end_weight_update")
    for has_them in (False, True):
        members = {name: lambda self, selector: "asked" for name in calls}
        host = SimpleNamespace(
            ServerArgs=type("ServerArgs", (Arguments,), {}), SGLangEngine=type("E", (), dict(members))
        )
        engine = types.ModuleType(weight_transfer.ENGINE)
        engine.Engine = type("Engine", (), dict(members) if has_them else {})
        monkeypatch.setitem(sys.modules, weight_transfer.ENGINE, engine)
        weight_transfer.complete_engine(host)
        arguments = host.ServerArgs("here")
        arguments.host = "here"
        with pytest.raises(AttributeError, match="host assigned after resolution"):
            arguments.host = "there"
        answers = {getattr(host.SGLangEngine(), name)(selector="all") for name in calls}
        assert answers == ({"asked"} if has_them else {None})


def test_a_name_is_added_only_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = types.ModuleType("there")
    there.Known = kept = object()
    monkeypatch.setitem(sys.modules, "there", there)
    (tmp_path / "later.py").write_text("Known = kept = object()")
    monkeypatch.syspath_prepend(tmp_path)
    names = dict.fromkeys(("there", "later"), ("Known", "Absent"))
    monkeypatch.setattr(weight_transfer, "MISSING", names | {"gone_package": (), "gone_package.engine": ("Engine",)})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("later", "gone_package", "gone_package.engine"):
        # So that it is removed again.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    weight_transfer.install()
    weight_transfer.install()
    assert "later" not in sys.modules
    for module in (there, importlib.import_module("later")):
        assert module.Known is (kept if module is there else module.kept)
        assert isinstance(module.Absent, type)
    assert isinstance(importlib.import_module("gone_package.engine").Engine, type)
    assert sum(isinstance(finder, weight_transfer.Finder) for finder in sys.meta_path) == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gone_package.other")


def test_sglang_on_a_cpu_pins_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that all of it is taken back.
    for owner, name in ((torch, "zeros"), (torch.cuda, "cudart")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    del sys.modules["sgl_kernel"]
    monkeypatch.syspath_prepend(ROOT / "examples/grpo/sglang_cpu")
    importlib.import_module("sgl_kernel")
    assert torch.zeros((2, 3), dtype=torch.int32, device="cpu", pin_memory=True).shape == (2, 3)


def test_a_step_that_is_missing_or_unreadable_is_an_error() -> None:
    with pytest.raises(ValueError, match="step 1 follows 0"):
        read_log("model.py:918 - step 1: {'train/loss': 1.0}")
    with pytest.raises(ValueError, match="cannot read"):
        read_log("model.py:918 - step 0: {'train/loss': tensor(1.0)}")


def test_runs_that_correct_alike_pass() -> None:
    results = [ran(name) for name in ALIKE] + [ran("nothing", grad_norm=1.6395)]
    assert faults_of_comparison(results) == []
    assert [fault for result in results for fault in faults_of_run(result)] == []


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("times", [10.0, math.nan])
def test_another_first_gradient_norm_is_a_fault(name, times) -> None:
    (close,) = (case.close for case in SLIME.cases if case.name == name)
    norm = NORM * (1 + times * close)
    results = [ran(each, grad_norm=norm if each == name else NORM) for each in ALIKE]
    assert faults_of_comparison(results)
    assert any(name in fault for fault in faults_of_comparison(results))


def test_a_correction_that_does_not_show_is_a_fault() -> None:
    (fault,) = faults_of_comparison([ran(name) for name in ("nothing", *ALIKE)])
    assert fault.startswith("nothing: ")


@MEGATRON_HOSTS
def test_each_layout_has_the_host_without_a_correction_with_its_own_and_with_ours(host) -> None:
    # What is compared with a computation by hand stands for itself, and what a second node lacks.
    cases = [case for case in host.cases if case.by_hand is None and case.second_node is None]
    by_name = {case.name: case for case in cases}
    of_layout = {case.layout: [] for case in cases if case.layout}
    for case in cases:
        if case.layout:
            of_layout[case.layout].append(case)
    everything = ["nothing", f"{host.package}_tis", "hook", "policy_loss", "no_logits"]
    for layout in ("one rank", "DP 2", "CP 2", "TP 2, `--sequence-parallel`", "PP 2"):
        assert sorted(case.name.rpartition("_")[0] for case in of_layout[layout]) == sorted(
            f"{name}_tp2" if layout.startswith("TP") else name for name in everything
        )
    assert [case.name for case in of_layout["TP 2"]] == ["nothing_tp2", "policy_loss_tp2", "no_logits_tp2"]
    for layout in ("PP 2, two stages a rank", "PP 2, CP 2"):
        assert sorted(case.name.split("_pp2")[0] for case in of_layout[layout]) == sorted(
            name for name in everything if not name.endswith("_tis")
        )
    assert [case.name for case in of_layout["EP 2"]] == ["mixture_ep2", "mixture_replayed_ep2", "mixture_loss_ep2"]
    # slime itself refuses it with a model like this one.
    assert ("CP 2, `--allgather-cp`, no positions" in of_layout) == (host is MILES_MEGATRON)
    for case in cases:
        if case.layout:
            names = (*everything, "max_staleness", "mixture_replayed", "mixture_loss", "mixture")
            plain = by_name[next(name for name in names if case.name.startswith(f"{name}_"))]
            assert (case.config, case.metrics, case.says) == (plain.config, plain.metrics, plain.says)
            assert case.flags[: len(plain.flags)] == plain.flags
            assert ("--actor-num-gpus-per-node" in case.flags) == (not case.layout.startswith("one rank"))
        if case.partner:
            partner = by_name[case.partner]
            assert "--actor-num-gpus-per-node" not in partner.flags
            assert (partner.config, partner.is_float32) == (case.config, case.is_float32)
            assert ("none" in partner.flags) == ("none" in case.flags)
        else:
            assert "--actor-num-gpus-per-node" not in case.flags
    by_default = [case.name for case in host.chosen([], everything=False) if case.layout]
    assert by_default == (["hook_cp2_bfloat16"] if host is SLIME else [])


def test_runs_on_two_ranks_that_have_the_numbers_of_one_rank_pass() -> None:
    assert len(on_cp_2()) == 10
    assert faults_of_comparison(on_cp_2()) == []
    rounded = NORM * (1 + 2e-6)
    assert faults_of_comparison(on_cp_2(slime_tis_cp2=rounded, hook_cp2=rounded, policy_loss_cp2=rounded)) == []
    # In bfloat16.
    assert faults_of_comparison([ran("hook"), ran("hook_cp2_bfloat16", grad_norm=NORM * (1 + 2e-4))]) == []


@pytest.mark.parametrize("norm", [NORM * (1 + 1e-3), NORM * (1 + 5e-5), NORM / 2, math.nan])
def test_another_norm_than_that_of_one_rank_is_a_fault(norm) -> None:
    found = faults_of_comparison(on_cp_2(slime_tis_cp2=norm, hook_cp2=norm, policy_loss_cp2=norm))
    for name in ("slime_tis_cp2", "hook_cp2", "policy_loss_cp2"):
        assert any(fault.startswith(f"{name}: train/grad_norm") for fault in found)
    found = faults_of_comparison([ran("hook"), ran("hook_cp2_bfloat16", grad_norm=norm)])
    assert bool(found) == (norm != NORM * (1 + 5e-5))


def test_the_runs_of_a_layout_are_compared_with_each_other_too() -> None:
    # Each is within the tolerance of one rank.
    found = faults_of_comparison(on_cp_2(hook_cp2=NORM * (1 - 8e-6), policy_loss_cp2=NORM * (1 + 8e-6)))
    assert found == []
    found = faults_of_comparison(on_cp_2(slime_tis_cp2=NORM * (1 - 8e-6), policy_loss_cp2=NORM * (1 + 8e-6)))
    assert [fault.partition(":")[0] for fault in found] == ["policy_loss_cp2"]
    found = faults_of_comparison(on_cp_2(nothing_float32=NORM, nothing_cp2=NORM))
    assert [fault.partition(":")[0] for fault in found] == ["nothing_float32", "nothing_cp2"]


def test_only_the_whole_loss_in_miles_may_be_further_off_as_miles_rounds_its_own_gradient() -> None:
    loose = {case.name for case in MILES_MEGATRON.cases if case.close > 1e-5}
    ours = ("policy_loss", "no_logits")
    rounded = {case.name for case in MILES_MEGATRON.cases if case.layout and case.name.startswith(ours)}
    # Numbers of fp16 are rounded otherwise than those of bf16, and logits that are never made not at all.
    assert loose == rounded | {"fp16", "no_logits"}
    assert {case.name for case in (*SLIME.cases, *MILES.cases) if case.close > 1e-5} == {"fp16", "no_logits"}
    own, ours = ran("slime_tis_cp2"), ran("policy_loss_cp2", grad_norm=NORM * (1 - 3e-4))
    assert len(faults_of_comparison([own, ours])) == 1
    assert faults_of_comparison([own, replace(ours, case=replace(ours.case, close=5e-4))]) == []
    far = replace(ran("policy_loss_cp2", grad_norm=NORM * 1.001), case=replace(ours.case, close=5e-4))
    assert len(faults_of_comparison([own, far])) == 1
    # Miles' own function scores for it.
    (scored,) = (case for case in MILES_MEGATRON.cases if case.name == "policy_loss_cp2_allgather")
    assert scored.partner == "hook_no_positions"


def test_a_replay_of_the_experts_that_does_not_show_is_a_fault() -> None:
    own, replayed = ran("mixture"), ran("mixture_replayed")
    (fault,) = faults_of_comparison([own, replayed])
    assert fault == "mixture_replayed: the largest train/mis_k3_kl is 1.0, and 1.0 without the replay"
    own.logged.steps[1]["train/mis_k3_kl"] = 2.0
    assert faults_of_comparison([own, replayed]) == []
    assert faults_of_comparison([replayed]) == []


def test_another_metric_than_that_of_one_rank_is_a_fault() -> None:
    one, two = ran("hook_float32"), ran("hook_cp2")
    metrics = two.logged.steps[0]
    assert faults_of_comparison([one, two]) == []
    assert off(two, one) == dict.fromkeys(["train/grad_norm", *sorted(two.case.metrics)], 0.0)
    # As if each rank counted its own tokens.
    halved = replace(two, logged=replace(two.logged, steps=[metrics | {"train/mis_k3_kl": 0.5}, metrics]))
    assert faults_of_comparison([one, halved]) == [
        "hook_cp2: train/mis_k3_kl of its first step is 5.0e-01 off from hook_float32"
    ]
    more = replace(two, logged=replace(two.logged, steps=[metrics | {"train/mis_other": 0.5}, metrics]))
    (fault,) = faults_of_comparison([one, more])
    assert fault == "hook_cp2: train/mis_other of its first step is nan off from hook_float32"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_chunks_are_those_that_miles_and_slime_cut(size) -> None:
    lengths = [2 * size * factor for factor in (1, 3, 2)]
    tokens = torch.arange(sum(lengths))
    cut = []
    for rank in range(size):
        for sequence in tokens.split(lengths):
            chunk = len(sequence) // (2 * size)
            low, high = rank * chunk, (2 * size - rank - 1) * chunk
            cut += [sequence[low : low + chunk], sequence[high : high + chunk]]
    assert torch.equal(zigzag_places(lengths, size), torch.cat(cut))
    # A rank's first chunk is early, its second late.
    assert zigzag_places([8], 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_a_wrapped_group_passes_on_the_collectives_that_it_does_not_know() -> None:
    class Group:
        def all_gather_single(self, *args, **kwargs):
            return "gathered", args, kwargs

    class Wrapper:
        group = Group()

        def reduce_scatter_single(self):
            return "its own"

    device._pass_on_new_names(Wrapper)
    assert Wrapper().all_gather_single(1, group=2) == ("gathered", (1,), {"group": 2})
    assert Wrapper().reduce_scatter_single() == "its own"


def test_a_run_without_the_line_of_the_check_or_without_metrics_is_a_fault() -> None:
    hook = ran("hook")
    silent = replace(hook, logged=replace(hook.logged, text=""))
    assert faults_of_run(silent) == [f"hook: its log has no line with {hook.case.says[0]!r}"]
    bare = replace(hook, logged=replace(hook.logged, steps=[step(0), step(1)]))
    assert len(faults_of_run(bare)) == 2
    assert "train/mis_k3_kl" in faults_of_run(bare)[0]


def test_a_run_that_stops_early_or_logs_a_nan_is_a_fault() -> None:
    hook = ran("hook")
    assert faults_of_run(replace(hook, return_code=1)) == ["hook: exit code 1"]
    assert (
        "1 optimizer steps in its log, not 2"
        in faults_of_run(replace(hook, logged=replace(hook.logged, steps=hook.logged.steps[:1])))[0]
    )
    assert faults_of_run(ran("hook", grad_norm=math.nan))
    for name, is_fault in (("train/mis_raised_fraction", False), ("train/mis_ratio_max", True)):
        steps = [each | {name: math.nan} for each in hook.logged.steps]
        assert bool(faults_of_run(replace(hook, logged=replace(hook.logged, steps=steps)))) is is_fault
    # Two steps a rollout.
    assert faults_of_run(ran("prepare_rollout")) == []


def test_a_refusal_must_come_with_its_error_and_before_the_model() -> None:
    text = "ValueError: unknown keys: 'tis_uper_bound'"
    assert faults_of_run(refused("misspelt_key", text)) == []
    assert "not refused" in faults_of_run(refused("misspelt_key", text, return_code=0))[0]
    assert "has no 'tis_uper_bound'" in faults_of_run(refused("misspelt_key", "out of memory"))[0]
    assert "after the model was built" in faults_of_run(refused("misspelt_key", f"> {MODEL_BUILT} rank 0\n{text}"))[0]
    # On two nodes it must say where.
    text = "ModuleNotFoundError: No module named 'mis_ext'"
    assert faults_of_run(refused("nodes_missing", f"Error (pid=1, ip=10.77.0.2)\n{text}")) == []
    assert "no line with 'ip=10.77.0.2'" in faults_of_run(refused("nodes_missing", text))[0]


def test_a_node_that_may_not_have_a_network_of_its_own_says_so(tmp_path: Path) -> None:
    log = tmp_path / "node-b.log"
    log.write_text("unshare: unshare failed: Operation not permitted")
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ChildProcessError, match="Operation not permitted"):
            nodes._link([process], log)


def test_two_nodes_without_a_network_tool_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    started = nodes.two_nodes(
        ["true"], nodes.SecondNode(), root=tmp_path, folder=tmp_path, scratch=tmp_path, environment={}
    )
    with pytest.raises(FileNotFoundError, match="iproute2"), started:
        pass


def test_the_table_has_a_row_for_each_run() -> None:
    error = "(Actor pid=1) ValueError: unknown keys: 'tis_uper_bound'"
    results = [ran("hook"), ran("log_mismatch"), refused("misspelt_key", f"Traceback\n{error}\n")]
    shown = table(results)
    assert "| three flags | 1.67064593049769 | 1.67064593049769 | 0.5 | 3 | yes | 0.50 | 30 |" in shown
    assert "| a misspelt key | yes | 20 | `ValueError: unknown keys: 'tis_uper_bound'` |" in shown
    two_ranks = table([ran("hook_float32"), ran("hook_cp2", grad_norm=NORM * (1 + 1e-4)), ran("nothing_cp2")])
    assert (
        "| CP 2 | three flags | 1.67081299509074 | 1.0e-04 | 1.67081299509074 | 0.5 | 3 | 0.0e+00 | 30 |" in two_ranks
    )
    assert (
        "| CP 2 | no correction | 1.67064593049769 | not compared | 1.67064593049769 | 0.5 | 0 | none | 30 |"
        in two_ranks
    )
    about = {"command": "bash x", "date": "today", "commits": {"slime": "1a"}, "versions": {"torch": "2"}}
    about |= {"cpu": "C", "cores": 2, "memory_gib": 4}
    assert shown in page(results, host=SLIME, about=about, verdict="")
    assert "*Off*" not in page(results, host=SLIME, about=about, verdict="")
    assert "*Off*" in page([*results, ran("hook_cp2")], host=SLIME, about=about, verdict="")
    # So says argparse.
    by_parser = refused("misspelt_flag", f"usage\ntrain.py: error: {CASES['misspelt_flag'].refusal}\n")
    assert f"| `train.py: error: {CASES['misspelt_flag'].refusal}` |" in table([by_parser])
    runs = record(results, about=about)["runs"]
    assert runs["hook"]["steps"][0]["train/grad_norm"] == NORM
    two = record([ran("hook_cp2"), ran("hook_cp2_bfloat16")], about=about)["runs"]
    assert [run["dtype"] for run in two.values()] == ["float32", "bfloat16"]
    assert two["hook_cp2"].items() >= {"layout": "CP 2", "compared_with": "hook_float32"}.items()
    assert runs["misspelt_key"]["error"] == "ValueError: unknown keys: 'tis_uper_bound'"


def test_runs_are_chosen_by_name_and_those_of_the_comparison_are_the_default() -> None:
    assert {"nothing", "slime_tis", "hook", "policy_loss", "misspelt_key"} <= {
        case.name for case in SLIME.chosen([], everything=False)
    }
    assert [case.name for case in SLIME.chosen(["hook", "nothing"], everything=False)] == ["nothing", "hook"]
    # What a run must be equal to comes with it: alone, nothing would judge it.
    assert [case.name for case in SLIME.chosen(["hook_cp2"], everything=False)] == ["hook_float32", "hook_cp2"]
    assert SLIME.chosen([], everything=True) == list(SLIME.cases)
    with pytest.raises(ValueError, match="run 'hok': must be one of nothing, "):
        SLIME.chosen(["hok"], everything=False)


@pytest.mark.parametrize("host", [SLIME, MILES, MILES_MEGATRON], ids=lambda host: host.name)
def test_every_run_has_its_file_and_with_megatron_the_check_at_start(host, tmp_path) -> None:
    for case in host.cases:
        words = case.command(host.common(tmp_path), root=ROOT, folder=tmp_path)
        ours = any(word.startswith("mis_ext.") for word in words)
        assert (" ".join(CHECK) in " ".join(words)) == (ours and host is not MILES), case.name
        if "--custom-config-path" in words:
            assert Path(words[words.index("--custom-config-path") + 1]).is_file()


def test_the_pages_have_launches_and_all_their_flags_are_found(tmp_path) -> None:
    launches = documented.launches(ROOT)
    assert len(launches) > 8
    assert {"--use-tis", "--loss-type", "--custom-megatron-init-path"} <= {
        word for launch in launches for word in launch.words
    }
    configurations = [word for launch in launches for word in launch.words if word.endswith(".yaml")]
    assert configurations
    for word in configurations:
        assert Path(documented.located(word, root=ROOT, own=ROOT / "yaml" / "mis.yaml")).is_file(), word
    named = documented.named_flags(ROOT)
    assert named.keys() >= {"--use-tis", "--use-rollout-logprobs", "--eps-clip"}
    options = (ROOT / "tests/data/host_flags/names.txt").read_text().split()
    for flag in named:
        assert flag.startswith("--sglang-") or flag.removeprefix("--").replace("-", "_") in options, flag
    # Options of the script itself.
    assert not named.keys() & {"--all", "--record"}
    pages = " ".join(page.read_text() for pattern in documented.PAGES for page in ROOT.glob(pattern))
    assert not [flag for flag in documented.ELSEWHERE if flag not in pages]
    assert len(documented.made_launches(ROOT)) == len(list((ROOT / "yaml").glob("*.yaml")))

    (tmp_path / "README.md").write_text("Give\n\n```\n--use-tis  # a\n--loss-type my.yaml\n```\n\nand `--use-tsi`.\n")
    (launch,) = documented.launches(tmp_path)
    assert launch == documented.Launch("README.md:3", ["--use-tis", "--loss-type", "my.yaml"])
    assert documented.named_flags(tmp_path)["--use-tsi"] == "README.md:8"


def test_a_documented_flag_that_slime_drops_or_reads_otherwise_is_a_fault() -> None:
    launches = [documented.Launch("a.md:1", ["--use-tis", "--loss-type", "custom_loss"])]
    options = ["--use-tis", "--loss-type"]
    read = {"--use-tis": "True", "--loss-type": "'custom_loss'"}

    def faults(*, dropped=(), read=read, named=(), options=options) -> list[str]:
        answers = [{"dropped": list(dropped), "read": read}]
        unknown = documented.unknown(dict.fromkeys(named, "b.md:2"), options)
        return documented.faults(launches, answers, host="slime") + unknown

    assert faults(named=["--use-tis"]) == []
    assert faults(dropped=["--use-tis"]) == ["a.md:1: slime drops --use-tis without a word"]
    assert faults(read=read | {"--loss-type": "'policy_loss'"}) == [
        "a.md:1: --loss-type custom_loss: slime reads 'policy_loss'"
    ]
    assert faults(read=read | {"--use-tis": "False"}) == ["a.md:1: --use-tis --loss-type: slime reads False"]
    assert faults(named=["--use-tsi"]) == ["b.md:2: --use-tsi is no option of slime"]
    assert len(faults(options=[*options, "--true-on-policy-mode"])) == 1


@pytest.fixture
def repository(tmp_path) -> tuple[Path, str]:
    """A repository with one commit."""
    folder = tmp_path / "there"
    name = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], [*name, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(
            ["git", "-C", str(folder), *words] if folder.exists() else ["git", *words, str(folder)], check=True
        )
    head = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return folder, head.stdout.strip()


def checkout(folder: Path, url: str, commit: str, **environment: str) -> subprocess.CompletedProcess:
    """What lab/hosts/checkouts.sh says of a checkout, and the folder that it takes."""
    script = f'. {ROOT}/lab/hosts/checkouts.sh; checkout_at HOST_DIR host "{url}" {commit}; echo "$HOST_DIR"'
    return subprocess.run(
        ["bash", "-e", "-u", "-c", script], cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )


def test_a_checkout_of_another_commit_is_taken_with_a_warning_that_names_both(repository, tmp_path) -> None:
    folder, commit = repository
    taken = checkout(tmp_path, "unused:", commit, HOST_DIR=str(folder))
    assert (taken.stdout, taken.stderr) == (f"{folder}\n", "")
    other = checkout(tmp_path, "unused:", "1234", HOST_DIR=str(folder))
    assert other.stdout == f"{folder}\n"
    assert commit in other.stderr
    assert "1234" in other.stderr


def test_a_checkout_that_is_not_given_is_fetched_once_or_the_variable_is_named(repository, tmp_path) -> None:
    folder, commit = repository
    # A second call needs no network.
    for url in (str(folder), "/no/such/place"):
        fetched = checkout(tmp_path, url, commit)
        assert fetched.stdout == f"{tmp_path}/.checkouts/host\n", fetched.stderr
    other = tmp_path / "other"
    other.mkdir()
    failed = checkout(other, "/no/such/place", commit)
    assert failed.returncode != 0
    assert f"set HOST_DIR to a checkout of commit {commit}" in failed.stderr
    absent = checkout(other, "unused:", commit, HOST_DIR="/no/such/place")
    assert absent.returncode != 0
    assert "HOST_DIR=/no/such/place" in absent.stderr


def checkouts_are_there(*names: str) -> bool:
    fetched = {"SLIME_DIR": "slime", "MEGATRON_DIR": "Megatron-LM", "MILES_DIR": "miles"}
    fetched |= {"MILES_MEGATRON_DIR": "miles-Megatron-LM"}
    return all(os.environ.get(name) or (ROOT / ".checkouts" / fetched[name] / "README.md").exists() for name in names)


def run_on_cpu(host: Host, folder: Path) -> str:
    # VENV is that of these tests.
    environment = os.environ | {"VENV": os.environ.get(f"{host.package.upper()}_VENV", f".venv-{host.package}")}
    command = ["bash", host.script, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "FAULT" not in done.stdout
    return done.stdout


@pytest.mark.whole_run
@pytest.mark.skipif(
    not checkouts_are_there("SLIME_DIR", "MEGATRON_DIR"),
    reason="no checkouts of both: set SLIME_DIR and MEGATRON_DIR, or run lab/hosts/slime_cpu.sh once",
)
def test_unmodified_slime_trains_alike_with_its_own_correction_and_with_ours(tmp_path) -> None:
    assert "8 runs passed" in run_on_cpu(SLIME, tmp_path)


@pytest.mark.whole_run
@pytest.mark.skipif(
    not checkouts_are_there("MILES_DIR"),
    reason="no checkout of Miles: set MILES_DIR, or run lab/hosts/miles_cpu.sh once",
)
def test_unmodified_miles_trains_alike_with_its_own_correction_and_with_ours(tmp_path) -> None:
    assert "5 runs passed" in run_on_cpu(MILES, tmp_path)


@pytest.mark.whole_run
@pytest.mark.skipif(
    not checkouts_are_there("MILES_DIR", "MILES_MEGATRON_DIR"),
    reason="no checkouts of both: set MILES_DIR and MILES_MEGATRON_DIR, or run lab/hosts/miles_megatron_cpu.sh once",
)
def test_the_megatron_trainer_of_unmodified_miles_trains_alike_with_its_own_correction_and_with_ours(tmp_path) -> None:
    assert "7 runs passed" in run_on_cpu(MILES_MEGATRON, tmp_path)


def test_a_first_gradient_norm_that_is_not_the_one_by_hand_is_a_fault() -> None:
    names = [case.name for case in SLIME.cases if case.by_hand is not None]
    assert {"fan_out", "group_rewards", "gate", "kept", "kept_dp2"} <= {*names}
    for name in names:
        result = ran(name)
        assert faults_of_run(replace(result, by_hand=NORM * (1 + 5e-6))) == []
        (fault,) = faults_of_run(replace(result, by_hand=NORM * (1 + 2e-5)))
        assert "by hand" in fault


def test_a_record_of_some_runs_has_a_name_of_its_own_and_what_was_computed_by_hand(tmp_path: Path) -> None:
    result = replace(ran("kept"), by_hand=NORM)
    about = {"command": "bash", "date": "today", "commits": {}, "versions": {}, "cpu": "x", "cores": 2, "memory_gib": 1}
    write(tmp_path, [result], host=SLIME, about=about, verdict="1 run", part="prompts")
    assert {path.name for path in tmp_path.iterdir()} == {"slime_cpu_prompts.md", "slime_cpu_prompts.json"}
    assert f"| {NORM:.15g} | {NORM:.15g} | 0.0e+00 |" in (tmp_path / "slime_cpu_prompts.md").read_text()


class Drawn:
    """A sample of a host, as far as the inputs need it."""

    Status = types.SimpleNamespace(COMPLETED="completed")

    def __init__(self, **fields: object) -> None:
        self.fields = {"rollout_id": None, "remove_sample": False} | fields

    def to_dict(self) -> dict[str, object]:
        return dict(self.fields)


def test_what_is_computed_by_hand_follows_from_the_rule(tmp_path: Path) -> None:
    model = inputs.write_model(tmp_path / "model")
    samples = [sample.to_dict() for sample in inputs.rollout(model, 0, Drawn)]
    for name, saved in (("rollouts", samples), ("fan_out", inputs.fanned_out(samples))):
        (tmp_path / name).mkdir()
        torch.save({"samples": saved}, tmp_path / name / "0.pt")

    def norm(**rule: object) -> float:
        return ByHand(**{"folder": "rollouts", "over": "all"} | rule).first_gradient_norm(tmp_path)

    # Qwen3's norms round their gradients to float32.
    assert norm(leave_one_out=True) == pytest.approx(norm() * 4 / 3, rel=1e-7)
    # Nothing is rejected, and each trajectory is a sample.
    assert norm(over="kept") == pytest.approx(norm(), rel=1e-12)
    others = [norm(folder="fan_out", over=over) for over in ("batch", "all", "trained")]
    assert len({round(each, 6) for each in (norm(), *others)}) == 4
