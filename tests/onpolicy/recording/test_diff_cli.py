# SPDX-License-Identifier: Apache-2.0
"""``mis-ext diff``: recordings and SGLang's dumps, by exit code and by what is printed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from commands import json_of
from tiny_decoder import TinyDecoder, packed, planted, recording_of
from torch import Tensor, nn

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording, read_sglang_dumps
from mis_ext.onpolicy.recording.rows import Rows
from mis_ext.tools.cli import main

needs_rich = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A recording, and the same with one ULP planted in layer 1."""
    model = TinyDecoder()
    recording_of(model, packed()).save(tmp_path / "a.pt")
    with planted(model.layers[1].attention.core, (0, 6, 2)):
        recording_of(model, packed()).save(tmp_path / "b.pt")
    return str(tmp_path / "a.pt"), str(tmp_path / "b.pt")


@needs_rich
def test_equal_recordings_exit_with_0(files, capsys) -> None:
    assert main(["diff", files[0], files[0]]) == 0
    assert "EXACT: " in capsys.readouterr().out


@needs_rich
def test_a_difference_exits_with_1_and_names_the_place(files, capsys) -> None:
    assert main(["diff", *files]) == 1
    inputs = "inputs equal but for tokens (not compared)"
    place = f"layers.1.attention.core (sequence 1, position 1): {inputs}, output differs, max 1 ULP"
    assert f"first divergence: {place}" in " ".join(capsys.readouterr().out.split())
    code, found = json_of("diff", *files)
    assert code == 1
    assert found["verdict"] == "DIFFERENT"
    assert found["first_divergent"] == "layers.1.attention.core"
    assert found["culprits"] == ["layers.1.attention.core"]
    core = next(module for module in found["modules"] if module["name"] == "layers.1.attention.core")
    assert core["first"] == {"sequence": 1, "position": 1}
    assert core["num_differing"] == 1


def test_a_nan_is_valid_json(tmp_path) -> None:
    for name, value in (("a", 1.0), ("b", float("nan"))):
        with record(nn.Identity()) as recorder, recorder.rows(Rows.packed([1])):
            recorder._model(torch.tensor([[[value]]]))
        recorder.recording().save(tmp_path / f"{name}.pt")
    code, found = json_of("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    assert found["modules"][0]["max_abs"] is None


@needs_rich
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_map_and_allowances_are_read(tmp_path, capsys, suffix: str) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyDecoder()
            self.extra = nn.Identity()

        def forward(self, ids: Tensor, rows: Rows) -> Tensor:
            return self.extra(self.model(ids, rows))

    ids, rows = packed()
    with record(Renamed()) as recorder, recorder.rows(rows), torch.no_grad():
        recorder._model(ids, rows)
    recorder.recording().save(tmp_path / "b.pt")
    recording_of(TinyDecoder(), packed()).save(tmp_path / "a.pt")
    names = {"layers.{i}": "model.layers.{i}", "": "model", "head": "model.head", "embedding": "model.embedding"}
    for inner in ("norm", "attention", "attention.{x}", "mlp", "mlp.{x}"):
        names[f"layers.{{i}}.{inner}"] = f"model.layers.{{i}}.{inner}"
    path = tmp_path / f"names.{suffix}"
    path.write_text(json.dumps(names) if suffix == "json" else "\n".join(f"'{a}': '{b}'" for a, b in names.items()))
    command = ["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--map", str(path), "--allow", "extra"]
    assert main(command) == 1
    assert "problem: (model): missing in a" in capsys.readouterr().out
    assert main([*command, "--allow", ""]) == 0
    assert main(command[:3]) == 1


def test_a_map_that_is_none_and_a_folder_without_dumps_are_refused(files, tmp_path) -> None:
    (tmp_path / "list.yaml").write_text("- a list")
    (tmp_path / "number.yaml").write_text("model.norm: 3")
    (tmp_path / "empty").mkdir()
    maps = ([*files, "--map", str(tmp_path / name)] for name in ("list.yaml", "number.yaml"))
    for command in (*maps, [files[0], str(tmp_path / "empty")]):
        with pytest.raises(SystemExit, match="2"):
            main(["diff", *command])


class Dumps:
    """Writes files as SGLang's dumper does."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self.folder, self.rank, self.index, self.step = folder, rank, 0, 0
        folder.mkdir(parents=True, exist_ok=True)

    def dump(self, name: str, value: object, **tags: object) -> None:
        self.index += 1
        tags = {"step": self.step, "rank": self.rank, "dump_index": self.index, "name": name, **tags}
        file = "___".join(f"{key}={value}" for key, value in tags.items()) + ".pt"
        torch.save({"value": value, "meta": {**tags, "world_size": 1}}, self.folder / file)

    def forward(self, positions: list[int], lengths: list[int], requests: list[str]) -> None:
        self.dump("positions", torch.tensor(positions), recompute_status="disabled")
        self.dump("seq_lens", torch.tensor(lengths), recompute_status="disabled")
        self.dump("rids", requests, recompute_status="disabled")

    def hidden(self, module: str, value: Tensor, **tags: object) -> None:
        self.dump(f"non_intrusive__{module}", value, recompute_status="disabled", **tags)


def value_of(sequence: int, position: int) -> list[float]:
    return [10.0 * sequence + position, 0.5]


def dumped(folder: Path) -> Path:
    """A warm-up; a prefill of b (3 tokens) and a piece of a (2); the rest of a (1) beside a decoded token of b."""
    dumps = Dumps(folder)
    steps = [
        ([0], [1], ["warm-up"], [(9, 0)]),
        ([0, 1, 2, 0, 1], [3, 2], ["b", "a"], [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]),
        ([2, 3], [3, 4], ["a", "b"], [(0, 2), (1, 3)]),
    ]
    for step, (positions, lengths, requests, tokens) in enumerate(steps):
        dumps.step = step
        dumps.forward(positions, lengths, requests)
        dumps.dump("positions", torch.tensor(positions), recompute_status="disabled", layer_id=0)
        values = torch.tensor([value_of(*token) for token in tokens])
        dumps.hidden("model.layers.0.output.dense.inputs.0", values, layer_id=0)
        dumps.hidden("model.layers.0.output.dense.output", values + 1, layer_id=0)
        dumps.hidden("model.norm.output.1", values * 2)
        dumps.hidden("model.rotary.output", torch.ones(17))
        dumps.dump("input_ids", torch.tensor(positions) + 7, recompute_status="disabled")
        dumps.dump("req_pool_indices", torch.arange(len(requests)), recompute_status="disabled")
        dumps.dump("mine", values - 1, layer_id=4)
        dumps.dump("grad__mine", values - 1)
        dumps.dump("again", values, recompute_status="recompute")
        last = torch.tensor(lengths).cumsum(0) - 1 if step == 1 else torch.arange(len(lengths))
        dumps.hidden("logits_processor.output.next_token_logits", values[last])
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_dumps_are_read_by_module_and_token(tmp_path, nested: bool) -> None:
    dumped(tmp_path / "experiment")
    Dumps(tmp_path / "experiment", rank=1).hidden("model.other.output", torch.ones(3))
    (tmp_path / "experiment" / "plots").mkdir()
    recording = read_sglang_dumps(tmp_path if nested else tmp_path / "experiment", requests=["a", "b"])
    dense = recording.outputs["model.layers.0.output.dense"][""]
    tokens = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    expected = torch.tensor([value_of(*token) for token in tokens])
    assert [*zip(dense.sequence_N.tolist(), dense.position_N.tolist(), strict=True)] == tokens
    assert torch.equal(dense.values, expected + 1)
    assert torch.equal(recording.inputs["model.layers.0.output.dense"]["0"].values, expected)
    assert torch.equal(recording.outputs["model.norm"]["1"].values, expected * 2)
    assert torch.equal(recording.outputs["mine.4"][""].values, expected - 1)
    assert torch.equal(recording.inputs[""]["input_ids"].values, torch.tensor([7, 8, 9, 7, 8, 9, 10]))
    logits = recording.outputs["logits_processor"]["next_token_logits"]
    assert torch.equal(logits.values, expected[[1, 2, 5, 6]])
    assert {*recording.outputs} == {"model.layers.0.output.dense", "model.norm", "mine.4", "logits_processor"}
    assert recording.skipped == {"model.rotary outputs": "no token dimensions in [17]"}
    # Without a list of requests they are numbered as they appear.
    appeared = read_sglang_dumps(tmp_path / "experiment").outputs["model.norm"]["1"]
    assert appeared.sequence_N.tolist() == [0, 1, 1, 1, 1, 2, 2, 2]


@needs_rich
def test_runs_with_request_ids_of_their_own_are_paired_by_order(tmp_path, capsys) -> None:
    a, b = dumped(tmp_path / "a"), dumped(tmp_path / "b")
    for path in b.glob("*name=rids*"):
        content = torch.load(path)
        content["value"] = [{"a": "7f", "b": "03"}.get(request, request) for request in content["value"]]
        torch.save(content, path)
    command = ["diff", str(a), str(b)]
    pairs = ["--request-a", "a", "--request-b", "7f", "--request-a", "b", "--request-b", "03"]
    assert main([*command, *pairs]) == 0
    assert main([*command, "--request", "a", "--request", "b", *pairs[2:4], *pairs[6:]]) == 0
    capsys.readouterr()
    for wrong, message in (
        (["--request", "a"], "has no request ['a']; it has ['warm-up', '03', '7f']"),
        (pairs[:6], "pass as many requests of A as of B, got ['a', 'b'] and ['7f']"),
        (pairs[:2], "pass as many requests of A as of B, got ['a'] and None"),
    ):
        with pytest.raises(SystemExit) as error:
            main([*command, *wrong])
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_a_request_that_never_ran_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"has no request \['c'\]; it has \['warm-up', 'b', 'a'\]"):
        read_sglang_dumps(dumped(tmp_path), requests=["a", "c"])


def test_a_module_that_first_runs_in_a_later_step_has_its_place_in_the_order(tmp_path) -> None:
    dumps = Dumps(tmp_path)
    for step, modules in enumerate((["first", "last"], ["before", "first", "adapter", "last"])):
        dumps.step = step
        dumps.forward([2 * step, 2 * step + 1], [2 * step + 2], ["r"])
        for module in modules:
            dumps.hidden(f"{module}.output", torch.ones(2, 3))
    assert [*read_sglang_dumps(tmp_path).outputs] == ["before", "first", "adapter", "last"]


def test_a_module_dumped_twice_in_a_step_was_called_twice(tmp_path) -> None:
    dumps = Dumps(tmp_path / "a")
    dumps.forward([0, 1], [2], ["r"])
    for factor in (1, 2):
        dumps.hidden("shared.output", torch.ones(2, 3) * factor)
    outputs = read_sglang_dumps(tmp_path / "a").outputs
    assert (outputs["shared"][""].values.unique().tolist(), outputs["shared#1"][""].values.unique().tolist()) == (
        [1],
        [2],
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: (d / "step=1___rank=0___dump_index=1___name=x.pt").write_text("x"),
            "step 1 has no dump 'positions'",
        ),
        (lambda d: next(d.glob("*name=rids*")).unlink(), "step 0 has no dump 'rids'"),
        (lambda d: Dumps(d).dump("seq_lens", torch.tensor([9])), "several different dumps 'seq_lens'"),
        (lambda d: next(d.glob("*name=x*")).write_text("x"), "is not a file of tensors"),
        (lambda d: torch.save([1], next(d.glob("*name=x*"))), "is not a dump"),
    ],
)
def test_dumps_without_their_tokens_are_an_error(tmp_path, spoil, message: str) -> None:
    dumps = Dumps(tmp_path)
    dumps.forward([0, 1], [2], ["r"])
    dumps.dump("x", torch.ones(2, 3))
    assert read_sglang_dumps(tmp_path).outputs["x"][""].position_N.tolist() == [0, 1]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_sglang_dumps(tmp_path)


@pytest.mark.parametrize(
    ("positions", "lengths", "requests"),
    [
        ([0, 1], [3], ["r"]),
        ([0, 2], [3], ["r"]),
        ([0, 1, 0], [2], ["r"]),
        ([0, 2, 1], [3], ["r"]),
        ([0, 1], [2], ["r", "s"]),
        ([[0], [1]], [2], ["r"]),
    ],
    ids=["too short", "with a gap", "too long", "out of order", "another request", "two dimensions"],
)
def test_positions_that_contradict_the_lengths_are_an_error(tmp_path, positions, lengths, requests) -> None:
    Dumps(tmp_path).forward(positions, lengths, requests)
    with pytest.raises(ValueError, match=r"step 0: .*positions"):
        read_sglang_dumps(tmp_path)


def test_several_experiments_in_a_directory_must_be_told_apart(tmp_path) -> None:
    dumped(tmp_path / "a")
    dumped(tmp_path / "b")
    with pytest.raises(ValueError, match=r"several experiments: \['a', 'b'\]"):
        read_sglang_dumps(tmp_path)


def test_a_saved_recording_can_be_compared_with_dumps(tmp_path) -> None:
    read_sglang_dumps(dumped(tmp_path / "a"), requests=["a", "b"]).save(tmp_path / "a.pt")
    assert compare(Recording.load(tmp_path / "a.pt"), read_sglang_dumps(tmp_path / "a", requests=["a", "b"])).passed


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_files_of_the_real_dumper_are_read(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "examples" / "grpo" / "sglang_cpu"))
    from sglang.srt.debug_utils.dumper import DumperConfig, _Dumper

    model, (ids, rows) = TinyDecoder(), packed([[3, 1, 4], [9, 2]])
    dumper = _Dumper(
        config=DumperConfig(
            enable=True, dir=str(tmp_path), exp_name="e", non_intrusive_mode="all", enable_output_console=False
        )
    )
    dumper.register_non_intrusive_dumper(model)
    dumper.dump("positions", rows.position[0])
    dumper.dump("seq_lens", torch.tensor([3, 2]))
    dumper.dump("rids", ["x", "y"])
    with torch.no_grad():
        model.forward(ids, rows)
    dumper.step()
    dumper.reset()
    read = read_sglang_dumps(tmp_path, requests=["x", "y"])
    result = compare(recording_of(TinyDecoder(), packed([[3, 1, 4], [9, 2]])), read)
    assert result.passed, result.summary()
    assert result.num_rows == 5 * len(result.modules) > 100
    assert all(module.inputs_equal for module in result.modules if module.name != "(model)")
    assert sys.modules["sglang"]
