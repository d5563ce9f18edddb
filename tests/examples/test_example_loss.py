# SPDX-License-Identifier: Apache-2.0
"""The example with every mode of the whole loss, as a host would call it."""

import math
from pathlib import Path

import pytest
import yaml
from example_runs import SMALL_RUN, WHOLE_LOSS, target, train
from grpo.arguments import parse_args

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOKEN_TIS = {"use_tis": True, "tis_level": "token", "tis_upper_bound": 2.0}
MODES = {
    "baseline": {},
    "decoupled": {},
    # Nothing to correct is left in PPO's ratio; gates still reject.
    "bypass": {"tis_level": "none", "rs_veto_threshold": 1.0e-4},
    "reinforce": {},
}
SKIPS_SCORING = ("bypass", "reinforce")


@pytest.mark.whole_run
@pytest.mark.parametrize("mode", MODES)
def test_a_short_run_with_every_mode_learns_from_a_finite_loss_and_logs_the_hosts_names(tmp_path: Path, mode: str):
    keys = {key: value for key, value in (TOKEN_TIS | MODES[mode]).items() if not (mode == "bypass" and "bound" in key)}
    config = tmp_path / "mode.yaml"
    config.write_text(yaml.safe_dump(keys | {"mis_loss_mode": mode}))
    flags = ["--use-rollout-logprobs"] if mode in SKIPS_SCORING else []
    run = ["--custom-config-path", str(config), "--entropy-coef", "0.01", "--num-rollout", "2"]
    rows = train(tmp_path / "run", *SMALL_RUN, *WHOLE_LOSS, *flags, *run)
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        names = ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "mis_k3_kl", "mis_kept_token_fraction")
        assert all(math.isfinite(row[f"train/{name}"]) for name in names)
        assert row["train/grad_norm"] > 0
        assert ("perf/score_seconds" in row) is (mode not in SKIPS_SCORING)
        assert row["train/entropy_loss"] > 0
        assert row["train/mis_k3_kl"] > 0


@pytest.mark.whole_run
@pytest.mark.parametrize("inplace", [False, True])
def test_with_one_step_per_rollout_no_pass_scores_and_the_ratio_is_one(tmp_path: Path, inplace: bool):
    config = tmp_path / "current.yaml"
    config.write_text(yaml.safe_dump(TOKEN_TIS | {"mis_loss_proximal": "current", "mis_loss_inplace": inplace}))
    flags = ["--use-rollout-logprobs", "--num-steps-per-rollout", "1", "--entropy-coef", "0.01", "--num-rollout", "1"]
    (row,) = train(tmp_path / "run", *SMALL_RUN, *WHOLE_LOSS, *flags, "--custom-config-path", str(config))
    assert "perf/score_seconds" not in row
    assert row["train/ppo_kl"] == row["train/pg_clipfrac"] == 0.0
    assert row["train/mis_k3_kl"] > 0
    assert row["train/grad_norm"] > 0


CHOSEN = {
    "gspo": {},
    "dispo": {"positive": [0.7, 1.5]},
    "dppo_tv": {"delta": 0.1},
    "prime_rl": {},
    "vaco": {},
}
"""Of a sequence, with two bands, of probabilities, with a penalty, and with a mean over the data-parallel ranks."""


# Two of them for .ci/run: one that scores, and one with a mean over ranks that scores nothing.
@pytest.mark.whole_run
@pytest.mark.parametrize(
    "method", [name if name in ("gspo", "vaco") else pytest.param(name, marks=pytest.mark.long_run) for name in CHOSEN]
)
def test_a_short_run_with_a_method_by_its_name_learns(tmp_path: Path, method: str):
    gates = {"use_tis": True, "tis_level": "none", "rs_veto_threshold": 1.0e-4}
    config = tmp_path / "method.yaml"
    config.write_text(yaml.safe_dump(gates | {"mis_loss_method": {"name": method} | CHOSEN[method]}))
    skips = method in ("dppo_tv", "prime_rl", "vaco")
    flags = ["--use-rollout-logprobs"] if skips else []
    (row,) = train(
        tmp_path / "run", *SMALL_RUN, *WHOLE_LOSS, *flags, "--custom-config-path", str(config), "--num-rollout", "1"
    )
    names = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "mis_k3_kl", "mis_kept_token_fraction")
    assert all(math.isfinite(row[f"train/{name}"]) for name in names)
    assert row["train/grad_norm"] > 0
    assert ("perf/score_seconds" in row) is not skips


def test_a_clip_beside_a_method_is_the_users(tmp_path: Path):
    config = tmp_path / "method.yaml"
    config.write_text("mis_loss_method: gspo\n")
    flags = [*WHOLE_LOSS, "--custom-config-path", str(config)]
    assert parse_args(flags).eps_clip_high is None
    assert parse_args([*flags, "--eps-clip-high", "0.3"]).eps_clip_high == 0.3
    assert parse_args(WHOLE_LOSS).eps_clip_high == 0.28


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--entropy-coef", "0.1"], "need --loss-type custom_loss"),
        (["--eps-clip-c", "3"], "need --loss-type custom_loss"),
        (["--loss-type", "other"], "invalid choice: 'other'"),
    ],
)
def test_options_that_the_examples_own_loss_has_not_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert message in capsys.readouterr().err


def test_the_help_says_where_the_mode_comes_from(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (*MODES, "--loss-type", "mis_loss_mode", "mis_loss_method", "--use-rollout-logprobs"):
        assert part in text


@pytest.mark.whole_run
def test_a_run_keeps_the_share_of_responses_that_is_asked_for(tmp_path: Path):
    rows = train(tmp_path / "run", *SMALL_RUN, *target(tmp_path, gain=1.0), "--num-rollout", "3")
    for row in rows:
        # 24 of the rollout's 32 responses, on both ranks and in both optimizer steps together.
        assert row["train/mis_kept_seq_fraction"] == pytest.approx(0.75, abs=1e-6)
        assert 0.99 < row["train/mis_rs_mask_bound_low"] < 1.0 < row["train/mis_rs_mask_bound_high"] < 1.01
    assert len({row["train/mis_rs_mask_bound_low"] for row in rows}) == 3
