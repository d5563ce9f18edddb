# SPDX-License-Identifier: Apache-2.0
"""Files that were good until some bytes of them changed: a result, or exit code 2 and one line of error."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_hostile_files import ROW, dump, limit

from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.rows import Rows
from mis_ext.tools.cli import main

pytest.importorskip("rich")
# What torch and others say of a file that they can still read.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_DRAWS = 10
CALL = {
    "conversation": "a",
    "format": "sglang",
    "request": {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0}},
    "response": {
        "output_ids": [4, 5],
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 4, None], [-0.7, 5, None]],
        },
    },
}


def recorded(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with record(model) as recorder, recorder.rows(Rows.packed([3])), torch.no_grad():
        model(torch.ones(1, 3, 4))
    recorder.recording().save(path)


FILES: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "torch": (".pt", dump(), ["report", "audit"]),
    "lines": (".jsonl", lambda path: path.write_text(f"{json.dumps(ROW)}\n" * 3), ["report", "audit"]),
    "recording": (".recording", recorded, ["diff"]),
    "calls": (".jsonl", lambda path: path.write_text(f"{json.dumps(CALL)}\n" * 3), ["check-rollouts"]),
    "packed calls": (
        ".gz",
        lambda path: path.write_bytes(gzip.compress(json.dumps(CALL).encode())),
        ["check-rollouts"],
    ),
    "keys": (".yaml", lambda path: path.write_text("use_tis: true\ntis_upper_bound: 2.0\n"), ["explain"]),
}


def damaged(good: bytes, rng: random.Random) -> bytes:
    """Cut, or with some bytes changed, taken out, put in, repeated or set to 0."""
    start = rng.randrange(len(good))
    end = min(len(good), start + rng.choice((1, 1, 4, 64, 1024)))
    part, kind = good[start:end], rng.randrange(6)
    if kind == 0:
        return good[:start]
    new = (rng.randbytes(len(part)), b"", part + rng.randbytes(4), part * 2, bytes(len(part)))[kind - 1]
    return good[:start] + new + good[end:]


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_ends_a_command_with_a_result_or_a_line(kind, tmp_path, monkeypatch, capsys) -> None:
    ending, make, commands = FILES[kind]
    good, path = tmp_path / f"good{ending}", tmp_path / f"damaged{ending}"
    make(good)
    monkeypatch.chdir(tmp_path)
    seed = random.SystemRandom().randrange(1 << 32)
    codes = set[int]()
    for draw in range(-1, NUM_DRAWS):
        # The first is not damaged.
        path.write_bytes(good.read_bytes() if draw < 0 else damaged(good.read_bytes(), random.Random(seed + draw)))
        before = sorted(tmp_path.rglob("*"))
        for command in commands:
            arguments = {"diff": [good, path], "explain": [path]}.get(command, [path])
            arguments += ["--preset", "mis"] if command == "report" else []
            where = f"{command}, seed {seed}, draw {draw}"
            try:
                with limit(20):
                    code = main([command, *map(str, arguments), "--json"])
            except SystemExit as end:
                code = end.code
            except Exception as error:
                pytest.fail(f"{where}: {type(error).__name__}: {error}")
            codes.add(code)
            printed = capsys.readouterr()
            if code == 2:
                assert printed.out == "", where
                assert printed.err.startswith(f"mis-ext {command}: "), where
                assert printed.err.count("\n") == 1, where
            else:
                assert code in (0, 1), where
                json.loads(printed.out)
            assert sorted(tmp_path.rglob("*")) == before
    assert len(codes) > 1
