# SPDX-License-Identifier: Apache-2.0
"""`mis-ext check-rollouts` compares the text that an agent kept with what was sampled."""

import pytest

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")
pytest.importorskip("msgspec", reason="the command reads logs with msgspec: pip install msgspec")
pytest.importorskip("transformers")

from conversations import QUESTION, call
from rollout_logs import genuine, logged, main, report_of, write
from tiny_tokenizers import TURN_END, encode, english_tokenizer, render

pytestmark = pytest.mark.usefixtures("wide_terminal")


TEXTS = {
    "It is mild.": ("stop_trimmed", True),
    f"It is mild.{TURN_END}": ("exact", True),
    "It is": ("prefix_truncated", False),
    "is mild.": ("prefix_removed", False),
    "It is mild. Yes.": ("suffix_added", False),
    "It was mild.": ("edited", False),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_that_an_agent_kept_is_compared_with_what_was_sampled(
    tmp_path, capsys, tokenizer_folder, text
) -> None:
    tokenizer = english_tokenizer()
    kind, passes = TEXTS[text]
    generation = call("a", render(tokenizer, QUESTION), encode(tokenizer, f"It is mild.{TURN_END}"))
    path = write(tmp_path, logged("a", generation, text=text))
    report = report_of(path, "--tokenizer", tokenizer_folder)
    assert {kind: found["count"] for kind, found in report["texts"].items()} == {kind: 1}
    assert report["passed"] is passes
    cure = report["texts"][kind]["first"]["cure"]
    assert bool(cure) is (kind != "exact")
    main(path, "--tokenizer", tokenizer_folder)
    assert cure in capsys.readouterr().out
    unchecked = report_of(path)
    assert unchecked["reasons"] == ["1 texts were not compared with the sampled ids: give --tokenizer"]
    assert unchecked["texts"] == {}


def test_what_was_not_compared_is_counted(tmp_path, tokenizer_folder) -> None:
    without_text = logged("a", call("a", [3], [7, 8]))
    report = report_of(write(tmp_path, without_text), "--tokenizer", tokenizer_folder)
    assert report["texts"]["not_compared"]["first"]["cure"] == "log the text that was kept"
    without_tokenizer = report_of(write(tmp_path, genuine("generate_length")))
    assert without_tokenizer["texts"]["not_compared"]["first"]["cure"] == "give a tokenizer"
    assert report["passed"] is without_tokenizer["passed"] is True


def test_stop_strings_of_the_request_explain_a_text_that_ends_before_them(tmp_path, tokenizer_folder) -> None:
    tokenizer = english_tokenizer()
    row = logged(
        "a", call("a", render(tokenizer, QUESTION), encode(tokenizer, "It is mild.\nuser")), text="It is mild."
    )
    for parameters in ({"sampling_params": {"stop": "\nuser"}}, {"stop": ["x", "\nuser"]}):
        path = write(tmp_path, row | {"request": row["request"] | parameters})
        assert list(report_of(path, "--tokenizer", tokenizer_folder)["texts"]) == ["stop_trimmed"]
    assert list(report_of(write(tmp_path, row), "--tokenizer", tokenizer_folder)["texts"]) == ["prefix_truncated"]
