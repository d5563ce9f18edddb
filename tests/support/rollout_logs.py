# SPDX-License-Identifier: Apache-2.0
"""Logs for `mis-ext check-rollouts`, and what it says of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import json_of
from conversations import CASES, Case
from responses import recorded
from tiny_tokenizers import english_tokenizer

from mis_ext.rollout.generation import Generation
from mis_ext.tools.cli import main as mis_ext_command


def main(*arguments: object) -> int:
    return mis_ext_command(["check-rollouts", *map(str, arguments)])


def error_of(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(*arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def report_of(path: Path, *arguments: object) -> dict[str, Any]:
    code, found = json_of("check-rollouts", path, *arguments)
    assert code == (0 if found["passed"] else 1)
    return found


def write(folder: Path, *rows: dict[str, Any] | str, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def genuine(name: str, **keys: Any) -> dict[str, Any]:
    request, response = recorded(name)
    api = name.partition("_")[0]
    format = "sglang" if api == "generate" else f"sglang-{api}"
    return {"conversation": name, "format": format, "request": request, "response": response, **keys}


def logged(conversation: str, generation: Generation, **keys: Any) -> dict[str, Any]:
    """The line of a call, as SGLang would have answered it."""
    ids = generation.sampled_ids
    meta = {
        "id": generation.request_id,
        "finish_reason": {"type": generation.finish_reason},
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": len(ids),
        "output_token_logprobs": [[x, i, None] for x, i in zip(generation.log_probs, ids, strict=True)],
        "weight_version": generation.weight_version,
    }
    response = {"output_ids": ids, "meta_info": meta}
    request = {"input_ids": generation.prompt_ids}
    return {"conversation": conversation, "format": "sglang", "request": request, "response": response, **keys}


def case_rows(name: str, case: Case) -> list[dict[str, Any]]:
    return [logged(name, each) for each in case.calls]


def every_case() -> list[dict[str, Any]]:
    """Two calls for each case, all first calls before all second ones."""
    rows = [case_rows(name, make(english_tokenizer())) for name, make in CASES.items()]
    return [pair[0] for pair in rows] + [pair[1] for pair in rows]


def good(conversation: str = "good") -> list[dict[str, Any]]:
    return case_rows(conversation, CASES["contiguous"](english_tokenizer()))
