"""The pictures of the evidence are drawn from its results, as small files."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

pytest.importorskip("matplotlib")

from evidence import front  # noqa: E402
from evidence.results import Results  # noqa: E402

PALETTE = 3
"""The color type of such a PNG, in its header."""


def test_the_front_picture_is_drawn_of_complete_studies_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front.report(Results(tmp_path), tmp_path)
    assert "not complete" in capsys.readouterr().out
    assert not (tmp_path / "front.png").exists()
    front.report(Results(REPOSITORY / "benchmarks" / "evidence" / "results"), tmp_path)
    assert (tmp_path / "front.png").read_bytes()[25] == PALETTE


def test_pictures_of_the_repository_have_a_palette() -> None:
    pictures = [*(REPOSITORY / "benchmarks").rglob("*.png"), *(REPOSITORY / "docs").rglob("*.png")]
    assert len(pictures) > 40
    assert [path.name for path in pictures if path.read_bytes()[25] != PALETTE] == []
