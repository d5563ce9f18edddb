# SPDX-License-Identifier: Apache-2.0
"""The pictures of the pages show what was measured, and what the code does."""

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

for needed in ("matplotlib", "tokenizers", "transformers"):
    pytest.importorskip(needed)

import picture_of_engines  # noqa: E402
import picture_of_scoring  # noqa: E402
import picture_of_tokens  # noqa: E402
from picture_of_engines import draw_engines, read_differences, read_pretrained  # noqa: E402
from picture_of_tokens import EXACT, NEVER, PROMPT, SHIFTED  # noqa: E402
from pictures import draw_bounds, draw_slime  # noqa: E402

RESULTS = ROOT / "lab" / "RESULTS.md"
PALETTE, MOST_BYTES = 3, 80_000


def test_they_are_drawn_as_small_files(tmp_path: Path) -> None:
    draw_bounds(tmp_path / "bounds.png")
    for read, name in ((read_differences, "true_on_policy.png"), (read_pretrained, "true_on_policy_pretrained.png")):
        draw_engines(read(RESULTS), tmp_path / name)
    picture_of_tokens.draw_tokens(tmp_path / "on_policy_tokens.png")
    picture_of_scoring.draw_scoring(ROOT / "lab" / "benchmarks" / "results" / "scoring.json", tmp_path / "scoring.png")
    draw_slime(ROOT / "lab" / "real_stack" / "slime_gpu.json", tmp_path / "slime.png")
    for path in tmp_path.iterdir():
        assert (ROOT / "docs" / "images" / path.name).is_file()
        assert path.read_bytes()[25] == PALETTE
        assert path.stat().st_size < MOST_BYTES


def test_of_the_engines_all_rows_of_the_page_are_shown_and_only_all_aligned_is_zero_in_both_dtypes() -> None:
    found = read_differences(RESULTS)
    largest = {(each.row, each.dtype): each.high for each in found}
    assert len(found) == len(largest) == 2 * (3 + len(picture_of_engines.TITLES))
    assert all(math.isfinite(each.low) and each.low <= each.high for each in found)
    rows = dict.fromkeys(each.row for each in found)
    assert [row for row in rows if largest[row, "bfloat16"] == largest[row, "float32"] == 0.0] == ["all aligned"]
    assert min(size for size in largest.values() if size) > picture_of_engines.EXACT
    assert largest["nothing aligned", "bfloat16"] == 9.7e-2


def test_of_the_pretrained_model_every_row_of_the_page_is_shown() -> None:
    found = {each.row: each for each in read_pretrained(RESULTS)}
    assert len(found) == 10
    assert found["nothing aligned"][1:] == ("bfloat16", 3.9e-2, 5.0e-2)
    assert [row for row, each in found.items() if each.high == 0.0] == ["all but fixed-tile matmuls", "all aligned"]
    assert found[picture_of_engines.STALE].low == found[picture_of_engines.STALE].high == 7.2e-2


def test_of_the_tokens_one_written_again_makes_the_rest_of_its_turn_another_context() -> None:
    sampled, from_text, first, second = picture_of_tokens.conversation().values()
    assert [box.kind for box in from_text] == [PROMPT, *[EXACT] * 3, NEVER, *[SHIFTED] * 3, PROMPT, EXACT]
    assert from_text[4].token_id != sampled[4].token_id
    # With mis_ext all that was sampled is trained, as it was sampled.
    assert first == sampled == [sampled[0], *(box for box in sampled[1:] if box.kind is EXACT)]
    assert [box.kind for box in second] == [PROMPT, *[EXACT] * 6]


def record_of_scoring(path: Path, **changes: object) -> Path:
    """As `lab/benchmarks/bench_scoring.py` writes it; the memory and time of a loss are its place."""
    rows = [
        {"problem": panel.problem, "host": host, "contender": loss, "median_s": place * 1e-3, "peak_bytes": place << 30}
        for panel in picture_of_scoring.PANELS[1:]
        for host in ("miles", "slime")
        for place, loss in enumerate([*picture_of_scoring.LOSSES, "policy_loss, the host's scoring"], start=1)
    ]
    rows[0] |= changes
    path.write_text(json.dumps({"A": rows}))
    return path


def test_of_the_scoring_every_loss_has_its_own_number_in_every_panel(tmp_path: Path) -> None:
    record = record_of_scoring(tmp_path / "scoring.json")
    for panel in picture_of_scoring.PANELS:
        found = picture_of_scoring.read_bars(record, panel)
        assert [(bar.host, bar.loss) for bar in found] == [
            (host, loss) for host in ("miles", "slime") for loss in picture_of_scoring.LOSSES.values()
        ]
        assert [round(bar.value, 9) for bar in found] == 2 * [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_record_of_a_cpu_is_not_drawn(tmp_path: Path) -> None:
    record = record_of_scoring(tmp_path / "scoring.json", peak_bytes=None)
    with pytest.raises(ValueError, match=r"no peak_bytes of 8x2048:151936:float32 for its own loss, no correction"):
        picture_of_scoring.draw_scoring(record, tmp_path / "scoring.png")
