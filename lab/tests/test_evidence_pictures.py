# SPDX-License-Identifier: Apache-2.0
"""Pictures and the overview of the evidence are made of its results; pictures are small files."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from evidence import front, overview, precision  # noqa: E402
from evidence.floor import Floor  # noqa: E402
from evidence.pictures import draw_rewards  # noqa: E402
from evidence.results import Results  # noqa: E402
from evidence.studies import STUDIES  # noqa: E402

PALETTE = 3
"""The color type of such a PNG, in its header."""


@pytest.mark.parametrize(
    ("picture", "name", "said"),
    [
        (front, "front.png", "front: pretrained_stale_4 lacks one of none, token_tis"),
        (precision, "fp16.png", "fp16: nothing ran of pretrained_precision_bf16, pretrained_precision_fp16, "),
    ],
)
def test_a_picture_is_drawn_of_what_ran_only(picture, name, said, tmp_path: Path, capsys) -> None:
    picture.report(Results(tmp_path), tmp_path)
    assert said in capsys.readouterr().out
    assert not (tmp_path / name).exists()
    picture.report(Results(REPOSITORY / "lab" / "evidence" / "results"), tmp_path)
    assert (tmp_path / name).read_bytes()[25] == PALETTE


@pytest.mark.usefixtures("blank_pictures")
def test_the_picture_of_dashboards_is_drawn_of_all_its_runs_or_not_at_all(tmp_path: Path, capsys) -> None:
    evidence = REPOSITORY / "lab" / "evidence"
    front.dashboards(Results(tmp_path), evidence / "first_look.jsonl", tmp_path)
    assert "dashboards: nothing ran of healthy: fp8 cache, fresh weights, sick: weights 8" in capsys.readouterr().out
    assert not (tmp_path / "dashboards.png").exists()
    front.dashboards(Results(evidence / "results"), evidence / "first_look.jsonl", tmp_path)
    assert (tmp_path / "dashboards.png").read_bytes()[25] == PALETTE


def test_each_method_has_a_line_per_seed_and_their_mean_where_the_policy_was_evaluated() -> None:
    seeds = [np.array([0.25, np.nan, 0.75]), np.array([0.5, np.nan, 0.5])]
    axis = plt.figure().subplots()
    draw_rewards(axis, {"no correction": ("black", seeds), "bypass": ("C0", seeds[:1])}, title="two")
    lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    assert [line[1:] for line in lines[:3]] == [([0, 2], [0.25, 0.75]), ([0, 2], [0.5, 0.5]), ([0, 2], [0.375, 0.625])]
    labels = [label for label, *_ in lines if not str(label).startswith("_")]
    assert labels == ["no correction, 2 seeds", "bypass, 1 seeds"]
    plt.close(axis.figure)


@pytest.mark.whole_run
def test_the_overview_is_that_of_the_results(tmp_path: Path) -> None:
    page, results = tmp_path / "README.md", Results(REPOSITORY / "lab" / "evidence" / "results")
    published = (REPOSITORY / "lab" / "evidence" / "README.md").read_text(encoding="utf-8")
    page.write_text(overview.BLOCK.sub(r"\1\2", published), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != published
    overview.report(results, page, Floor.of_results(STUDIES.values(), results))
    assert page.read_text(encoding="utf-8") == published
    # Counted over the archives by another program too.
    assert "**1,330 runs.** 56 have no pair" in published
    assert "33 are bit by bit" in published
    assert "40 repeat another one" in published
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="no line <!-- overview"):
        overview.report(results, page, Floor(()))


def test_pictures_of_the_repository_have_a_palette() -> None:
    pictures = [*(REPOSITORY / "lab").rglob("*.png"), *(REPOSITORY / "docs").rglob("*.png")]
    assert len(pictures) > 40
    assert [path.name for path in pictures if path.read_bytes()[25] != PALETTE] == []
