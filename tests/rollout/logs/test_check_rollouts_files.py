# SPDX-License-Identifier: Apache-2.0
"""`mis-ext check-rollouts` on several files, compressed ones and pipes."""

import gzip
import json
import os
import threading
from typing import Any

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("msgspec", reason="the command reads logs with msgspec: pip install msgspec")
pytest.importorskip("transformers")

from conversations import CASES
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


def test_only_one_conversation_is_kept(tmp_path, monkeypatch) -> None:
    from mis_ext.rollout.rollout_log import RolloutLog

    path = write(tmp_path, *every_case())
    with RolloutLog([path]) as log:
        assert sum(log.scan()) == log.size == path.stat().st_size
        assert [*log.places] == [*CASES]
        calls = log.calls(log.places["retry"])
        assert [each.line for each in calls] == [7, 17]


def test_the_progress_of_a_large_log_is_shown(tmp_path, monkeypatch, capfd) -> None:
    from mis_ext.tools.cli import command

    monkeypatch.setenv("FORCE_COLOR", "1")
    path = write(tmp_path, *good())
    report_of(path)
    assert "checking" not in capfd.readouterr().err
    monkeypatch.setattr(command, "_LARGE", 1)
    report_of(path)
    shown = capfd.readouterr().err
    size = path.stat().st_size / 1000
    assert "reading" in shown
    # Bytes done of all bytes, and the time that is left.
    assert f"{size:.1f}/{size:.1f} kB" in shown
    assert "0:00:00" in shown


def test_a_log_gets_a_line_where_a_terminal_has_a_bar(tmp_path, monkeypatch, capfd) -> None:
    from mis_ext.tools.cli import command

    path = write(tmp_path, *good())
    report_of(path)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(command, "_LARGE", 1)
    report_of(path)
    assert capfd.readouterr().err == "reading 0 MB\nchecking 0 MB\n"
