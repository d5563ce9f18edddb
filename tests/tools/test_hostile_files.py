# SPDX-License-Identifier: Apache-2.0
"""Files that are none, or are meant to harm: exit code 2, one line of error, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mis_ext import __version__, files
from mis_ext.tools.cli import main
from mis_ext.tools.dumps import Dumps

pytest.importorskip("jinja2")
pytest.importorskip("rich")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

REPOSITORY = Path(__file__).parents[2]
LOG_PROBS = [torch.tensor([-0.5, -1.0, -0.3]), torch.tensor([-0.2, -0.9])]
GOOD = {
    "log_probs": LOG_PROBS,
    "rollout_log_probs": [values + 0.01 for values in LOG_PROBS],
    "loss_masks": [torch.ones(3), torch.ones(2)],
}
ROW = {"log_probs": [-0.5, -1.0], "rollout_log_probs": [-0.5, -1.1], "loss_mask": [1, 1]}


def dump(**columns):
    return lambda path: torch.save({"rollout_id": 0, "rollout_data": GOOD | columns}, path)


def content(data: bytes):
    return lambda path: path.write_bytes(data)


def row(**values):
    return content(json.dumps(ROW | values).encode())


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


DUMPS = {
    "a pipe": (".jsonl", os.mkfifo),
    "an endless device": (".jsonl", lambda path: path.symlink_to("/dev/zero")),
    "an endless pickle": (".pt", lambda path: path.symlink_to("/dev/zero")),
    "a folder in a file's place": (".jsonl.pt", lambda path: path.mkdir()),
    "a link to itself": (".pt", lambda path: path.symlink_to(path)),
    "nothing": (".pt", lambda path: None),
    "no byte": (".pt", content(b"")),
    "text": (".pt", content(b"hello\n")),
    "a pickle that ends early": (".pt", lambda path: (dump()(path), os.truncate(path, 900))),
    "lists in lists": (".pt", dump(log_probs=[[[[-0.5]]], [-0.1, -0.2]])),
    "words": (".pt", dump(log_probs=["abc", ["x", "y"]])),
    "a number for a list": (".pt", dump(log_probs=5)),
    "lengths of another dump": (".pt", dump(response_lengths=[30, 2])),
    "nothing of the trainer": (".pt", dump(log_probs=None)),
    "no trained token": (".pt", dump(loss_masks=[torch.zeros(3), torch.zeros(2)])),
    "deep": (".jsonl", content(b'{"log_probs":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")),
    "a huge number": (".jsonl", content(b'{"log_probs":[-' + b"9" * 400 + b'],"rollout_log_probs":[-1]}\n')),
    "more digits than Python reads": (".jsonl", content(b'{"log_probs":[-' + b"9" * 5000 + b"]}\n")),
    "no UTF-8": (".jsonl", content(b"{}\n\xff\xfe{}\n")),
    "a list a line": (".jsonl", content(b"{}\n[1, 2]\n")),
    "words in a mask": (".jsonl", row(loss_mask=["a", "b"])),
    "another format": (".parquet", content(b"PAR1xxxxPAR1")),
    "code": (".pt", lambda path: torch.save([torch.ones(2), Runs(path.parent / "made")], path)),
    "a program of TorchScript": (".pt", lambda path: torch.jit.script(Scripted()).save(path)),
}
REASONS = {
    "text": "cannot be read",
    "no UTF-8": "line 2: 'utf-8' codec can't decode",
    "a list a line": "line 2: a list",
    "another format": "must end in .pt or .jsonl",
}
"""What the line says of some."""
JUDGED = ("lengths of another dump", "nothing of the trainer", "no trained token", "words in a mask")
"""Of these the audit has a verdict."""
YAMLS = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "no YAML": content(b"a: [1, 2\nb: }"),
    "a key twice": content(b"rs_gates:\n- {level: token, high: 2.0, high: 3.0}\n"),
    "a list as a key": content(b"? [a, b]\n: 1\n? [a]\n: 2\n"),
    "a tab": content(b"a:\n\t- 1\n"),
    "deep": content(b"a: " + b"[" * 600 + b"]" * 600),
    "a bomb of aliases": content(
        b"a: &a [x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 8)) for c in b"abcdefgh")
    ),
    "a list that holds itself": content(b"a: &a [*a]\n"),
    "a list": content(b"- 1\n"),
    "no UTF-8": content(b"\xff\xfe\x00"),
    "a call": content(b'!!python/object/apply:os.system ["touch called"]\n'),
    "numbers as names": content(b"1: 2\n"),
    "too long": content(b"# " + b"x" * (1 << 20) + b"\na: 1\n"),
    "an escape sequence": content(b'"mis_\\e[31m": 1\n'),
    "no byte": content(b""),
}


@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """Run a command that must be refused in a folder of its own; returns the line."""

    def check(*arguments) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.chdir(tmp_path)
        with limit(20), pytest.raises(SystemExit, match=r"^2$"):
            main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"mis-ext {arguments[0]}: ")
        assert printed.err.count("\n") == 1
        assert len(printed.err) < 2100
        assert printed.err.rstrip("\n").isprintable()
        assert sorted(tmp_path.rglob("*")) == before
        return printed.err

    return check


@contextmanager
def limit(seconds: int):
    """An alarm in place of a test that never ends."""

    def ring(*_):
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_that_cannot_be_read_is_refused_in_a_line(name, fails, tmp_path):
    ending, make = DUMPS[name]
    path = tmp_path / f"dump{ending}"
    make(path)
    line = fails("report", path, "--out", tmp_path / "out")
    assert str(path) in line
    assert REASONS.get(name, "") in line
    if name not in JUDGED:
        assert str(path) in fails("audit", path)
    # A recording has an ending of its own, and no JSON lines.
    fails("diff", path, path)


@pytest.mark.parametrize("name", YAMLS)
def test_a_configuration_that_cannot_be_read_is_refused_in_a_line(name, fails, tmp_path):
    path = tmp_path / "keys.yaml"
    YAMLS[name](path)
    dump()(tmp_path / "dump.pt")
    for command in (
        ("explain", path),
        ("convert", "verl", path),
        ("report", tmp_path / "dump.pt", "--config", path, "--out", tmp_path / "out"),
    ):
        fails(*command)
    assert not (tmp_path / "called").exists()


def test_a_key_that_a_merge_brings_may_be_set_anew(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("use_tis: true\nmis:\n  weight: {<<: &w {level: token, high: 2.0}, mode: truncate, high: 3.0}\n")
    assert files.read_yaml(path)["mis"]["weight"] == {"level": "token", "mode": "truncate", "high": 3.0}


@pytest.mark.parametrize("mask", [[1, 2], [1, -1], [1, float("nan")]], ids=str)
def test_a_mask_that_is_none_takes_its_sample_out(mask, tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(ROW | {"loss_mask": mask}) + "\n" + json.dumps(ROW) + "\n")
    bad, good = Dumps([path])
    assert (bad.problem, good.problem) == ("loss_mask has values that are not in [0, 1]", None)


@pytest.mark.parametrize("ids", [[1, None], ["a", "b"], [1, 10**30], [1, 1e308], [1, 0.5]], ids=str)
@pytest.mark.parametrize("key", ["tokens", "rollout_token_ids"])
def test_ids_that_are_none_take_their_sample_out(key, ids, tmp_path, capsys):
    path = tmp_path / "dump.jsonl"
    # Ids of one side alone compare with nothing.
    path.write_text("".join(json.dumps(ROW | more) + "\n" for more in ({key: ids}, {}, {key: [1, 2]})))
    assert main(["report", str(path), "--json", "--preset", "mis"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["skipped"]
    assert f"dump.jsonl, its sample 0: {key} is not comparable" in said


def test_what_a_terminal_would_obey_is_escaped(tmp_path, capsys, wide_terminal):
    path = tmp_path / "a\x1b[31mb\udcff.pt"
    dump(loss_masks=[torch.tensor([1, 2, 1]), torch.ones(2)])(path)
    assert main(["audit", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"a\x1b[31mb\udcff.pt" in printed


def test_a_disk_that_is_full_leaves_the_file_of_before(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    files.write_whole(path, "before")
    monkeypatch.setattr(files.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        files.write_whole(path, "after")
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_written_through_a_link_and_a_pipe_directly(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write_whole(tmp_path / "link", "\udcff")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == r"\udcff"
    # Not a device: a mistake here would replace it by a file, for every program of the machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_whole(pipe, "line")
    assert pipe.is_fifo()
    assert os.read(reader, 100) == b"line"
    os.close(reader)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (MemoryError("4 GiB"), 2, "mis-ext presets: out of memory (4 GiB)\n"),
        (RecursionError("depth"), 2, "mis-ext presets: nested too deeply (depth)\n"),
        (
            FileNotFoundError(2, "No such file", "a\nb"),
            2,
            "mis-ext presets: a b: No such file\n",
        ),
        (ValueError("x" * 5000), 2, f"mis-ext presets: {'x' * 2000} ...\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_a_command_early_has_a_code_and_a_line(error, code, said, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr("mis_ext.tools.cli.configurations.run_presets", fail)
    try:
        found = main(["presets"])
    except SystemExit as end:
        found = end.code
    assert found == code
    assert capsys.readouterr().err == said


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "mis_ext", "presets"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"mis_ext {__version__}\n"
