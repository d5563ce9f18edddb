# SPDX-License-Identifier: Apache-2.0
"""`mis-ext check-rollouts` on several files, compressed ones and pipes."""

import gzip
import json
import os
import threading
from typing import Any

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("transformers")

from rollout_logs import every_case, good, report_of, write

pytestmark = pytest.mark.usefixtures("wide_terminal")


def test_conversations_may_be_interleaved_and_spread_over_files_and_compressed(tmp_path, tokenizer_folder) -> None:
    rows = every_case()
    whole = report_of(write(tmp_path, *rows), "--tokenizer", tokenizer_folder)
    parts = [write(tmp_path, *rows[:7], name="1.jsonl"), tmp_path / "2.jsonl.gz"]
    parts[1].write_bytes(gzip.compress(write(tmp_path, *rows[7:], name="2.jsonl").read_bytes()))
    spread = report_of(parts[0], parts[1], "--tokenizer", tokenizer_folder)
    assert counts(spread) == counts(whole)
    apart = sorted(rows, key=lambda row: row["conversation"])
    assert counts(report_of(write(tmp_path, *apart), "--tokenizer", tokenizer_folder)) == counts(whole)
    assert spread["boundaries"]["retry"]["first"]["file"] == str(parts[1])


def counts(report: dict[str, Any]) -> dict[str, Any]:
    tables = {name: {kind: found["count"] for kind, found in report[name].items()} for name in ("boundaries", "texts")}
    return tables | {name: report[name] for name in ("conversations", "calls", "sampled_tokens")}


def test_what_comes_before_the_damage_of_a_compressed_file_is_read(tmp_path) -> None:
    path = tmp_path / "log.jsonl.gz"
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in good()).encode())
    path.write_bytes(whole[:-8])
    report = report_of(path)
    assert report["boundaries"]["contiguous"]["count"] == 1
    assert report["refused"]["LogLineError"]["first"]["line"] == 3
    assert "cannot be decompressed" in report["refused"]["LogLineError"]["first"]["message"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_read(tmp_path) -> None:
    path, rows = tmp_path / "pipe", good()
    os.mkfifo(path)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    report = report_of(path)
    writer.join()
    assert (report["passed"], report["calls"]) == (True, 2)
