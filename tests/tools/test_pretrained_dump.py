# SPDX-License-Identifier: Apache-2.0
"""A dump of a pretrained model with nothing wrong (`tests/data/pretrained_dump`): the usual case is said first."""

import lzma
from pathlib import Path

import pytest

from mis_ext.tools.cli import main
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report.findings import Findings, Unexplained, read_findings

ARCHIVE = Path(__file__).parents[1] / "data" / "pretrained_dump" / "dump.pt.xz"
USUAL = "likely: kernels in bfloat16 of a pretrained model (usual, no fault), or lower precision on one side"


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pretrained") / "0.pt"
    path.write_bytes(lzma.decompress(ARCHIVE.read_bytes()))
    return path


@pytest.fixture(scope="module")
def run(dump) -> Findings:
    return read_findings(Dumps([dump]))


def test_the_first_line_is_the_usual_case(dump, run, capsys, monkeypatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    assert [f"{found.confidence}: {found.title}" for found in run.diagnoses] == [USUAL]
    main(["audit", str(dump)])
    (cause,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cause")]
    assert " ".join(cause.split()).startswith(f"cause {USUAL.replace(': ', ' ')}")


def test_it_is_no_fault_and_explains_everything(run) -> None:
    (found,) = run.diagnoses
    assert (found.cause, found.is_fault, found.k3_share) == ("bf16_or_low_precision", False, 1.0)
    assert run.summary.overall.k3 == pytest.approx(1.9e-3, abs=1e-4)
    assert found.advice.startswith("Nothing is wrong if the model is pretrained and both sides compute in bfloat16.")


def test_what_is_left_is_held_against_kernels_of_a_pretrained_model(run) -> None:
    assert run.unexplained.in_words == "The causes explain up to all of k3."
    assert Unexplained(0.1, 1.0, is_of_rest=True).in_words.startswith("Left unexplained: 10 % of the k3 of the rest,")
    usual = ", of the size of kernels in bfloat16 (up to 0.003 in a pretrained model)."
    assert Unexplained(0.1, 2.9e-3).in_words == f"Left unexplained: 10 % of k3, 0.0029 per token{usual}"
    assert Unexplained(0.1, 3.1e-3).in_words == "Left unexplained: 10 % of k3, 0.0031 per token."
