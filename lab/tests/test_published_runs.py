# SPDX-License-Identifier: Apache-2.0
"""lab/benchmarks/published_runs.py reads the curves of the published runs as their files have them."""

import json
import sys
from pathlib import Path

import published_runs
import pytest

NUM_STEPS = 8


def write(checkout: Path, *, gap_in: int | None = None) -> None:
    """Curves in which each arm, metric and seed has a level of its own; steps are strings, out of their order."""
    (checkout / published_runs.RUNS).mkdir(parents=True)
    for seed in published_runs.SEEDS:
        levels = {"disease": 0.1, "cure": 0.5}
        found = {
            arm: {
                published_runs.REWARD: curve(level + step / 100 + seed / 10_000 for step in range(NUM_STEPS)),
                published_runs.KL: curve(0.03 * (1 + step) / level for step in range(NUM_STEPS)),
                published_runs.NORM: curve(3 / level + 20 * step for step in range(NUM_STEPS)),
            }
            for arm, level in levels.items()
        }
        if seed == gap_in:
            del found["cure"][published_runs.KL]["3"]
        (checkout / published_runs.RUNS / f"e1_seed{seed}.json").write_text(json.dumps(found))


def curve(values) -> dict[str, float]:
    by_step = {str(step): value for step, value in enumerate(values)}
    return dict(sorted(by_step.items(), reverse=True))


def test_the_table_has_each_seed_and_the_gain_of_the_last_steps(tmp_path, monkeypatch, capsys) -> None:
    write(tmp_path)
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["published_runs.py", str(tmp_path), "--picture", str(picture)])
    published_runs.main()
    table = capsys.readouterr().out
    assert "| no correction | 1234 | 0.24 | 0.27 | 0.300 | 1.8 | 2.4 | 1.7e+02 | never |" in table
    assert "| token mask, veto, normalized | 42 | 0.52 | 0.55 | 0.060 | 0.36 | 0.48 | 1.5e+02 | 7 |" in table
    assert "corrected minus not, by seed: +0.40 [+0.40, +0.40]" in table
    assert "not a git checkout" in table
    assert picture.stat().st_size > 1000


def test_a_curve_with_a_gap_is_refused(tmp_path) -> None:
    write(tmp_path, gap_in=1234)
    with pytest.raises(ValueError, match=r"e1_seed1234.json: cure, train/mis_kl: steps \[0, 1, 2, 4"):
        published_runs.read(tmp_path)


def test_an_alert_fires_behind_the_first_ten_steps_and_a_dip_of_the_reward_is_no_loss() -> None:
    quiet, grown = [0.01] * 20, [0.01] * 12 + [0.03, 0.09, 0.3, 0.3, 0.3, 0.3]
    dip, lost = [0.6] * 8 + [0.1] * 5 + [0.6] * 7, [0.6] * 9 + [0.1] * 9
    found = published_runs.alerts({"a": (quiet, dip), "b": (grown, lost), "c": (grown[:14], lost[:14])}).splitlines()[
        2:
    ]
    assert found == [
        "| a | 20 | 0.01 | never | never | 0.60, 0.60 | never |",
        # Means of steps 10 to 14 and of 11 to 15: 0.088 and 0.146; of the rewards of 9 to 12 and 8: 0.2.
        "| b | 18 | 0.01 | 14 | 15 | 0.60, 0.10 | 12 |",
        # The first mean behind the first ten steps ends at step 14.
        "| c | 14 | 0.01 | too short | too short | 0.60, 0.10 | 12 |",
    ]
