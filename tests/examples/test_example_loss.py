# SPDX-License-Identifier: Apache-2.0
"""The example with every mode of the whole loss, as a host would call it."""

import json
import math
from pathlib import Path

import pytest
import yaml
from example_runs import SMALL_RUN, WHOLE_LOSS, on_ranks
from grpo.arguments import parse_args

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOKEN_TIS = {"use_tis": True, "tis_level": "token", "tis_upper_bound": 2.0}
GATES = {"use_tis": True, "tis_level": "none", "rs_veto_threshold": 1.0e-4}
MODES = {
    "baseline": TOKEN_TIS,
    "decoupled": TOKEN_TIS,
    # Nothing to correct is left in PPO's ratio; gates still reject.
    "bypass": GATES,
    "reinforce": TOKEN_TIS,
}
METHODS = {
    "gspo": {},
    "vaco": {},
}
"""Of the ratio to the scored policy, and of what the engine reported, with a mean over the data-parallel ranks."""
SKIPS_SCORING = ("bypass", "reinforce", "vaco")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The rows of the first steps of two ranks, by mode, method or what else is in the configuration."""
    folder = tmp_path_factory.mktemp("losses")
    configs = {mode: keys | {"mis_loss_mode": mode} for mode, keys in MODES.items()}
    configs |= {name: GATES | {"mis_loss_method": {"name": name} | keys} for name, keys in METHODS.items()}
    for is_inplace in (False, True):
        keys = TOKEN_TIS | {"mis_loss_proximal": "current", "mis_loss_inplace": is_inplace}
        configs[f"current {is_inplace}"] = keys
    cases = {}
    for name, keys in configs.items():
        (config := folder / f"{name}.yaml").write_text(yaml.safe_dump(keys))
        cases[name] = [*WHOLE_LOSS, "--custom-config-path", str(config), "--num-rollout", "1"]
        if name in (*SKIPS_SCORING, "current False", "current True"):
            cases[name].append("--use-rollout-logprobs")
        if name not in METHODS:
            cases[name] += ["--entropy-coef", "0.01"]
        if name.startswith("current"):
            cases[name] += ["--num-steps-per-rollout", "1"]
    on_ranks(take_steps, cases, folder)
    return json.loads((folder / "rows.json").read_text())


def take_steps(cases: dict[str, list[str]], folder: Path) -> None:
    """On a rank: the steps of the program's runs, without what a run writes."""
    import torch.distributed as dist
    from grpo.distributed import Ranks, StopRequest
    from grpo.run import Run
    from megatron.core import parallel_state

    rows = {}
    for name, flags in cases.items():
        args = parse_args([*SMALL_RUN, "--output-dir", str(folder / name), *flags])
        ranks = Ranks.start(context_parallel_size=1, seed=args.seed)
        run = Run(args, ranks, StopRequest())
        run._update_weights(version=0)
        rows[name] = [run._step(step) for step in range(args.num_rollout)]
        if run._engine is not None:
            run._engine.close()
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


@pytest.mark.whole_run
@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_every_mode_learns_from_a_finite_loss_and_logs_the_hosts_names(rows, mode: str):
    (row,) = rows[mode]
    names = ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "mis_k3_kl", "mis_kept_token_fraction")
    assert all(math.isfinite(row[f"train/{name}"]) for name in names)
    assert row["train/grad_norm"] > 0
    assert ("perf/score_seconds" in row) is (mode not in SKIPS_SCORING)
    assert row["train/entropy_loss"] > 0
    assert row["train/mis_k3_kl"] > 0


@pytest.mark.whole_run
@pytest.mark.parametrize("inplace", [False, True])
def test_with_one_step_per_rollout_no_pass_scores_and_the_ratio_is_one(rows, inplace: bool):
    (row,) = rows[f"current {inplace}"]
    assert "perf/score_seconds" not in row
    assert row["train/ppo_kl"] == row["train/pg_clipfrac"] == 0.0
    assert row["train/mis_k3_kl"] > 0
    assert row["train/grad_norm"] > 0


@pytest.mark.whole_run
@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_a_method_by_its_name_learns(rows, method: str):
    (row,) = rows[method]
    names = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "mis_k3_kl", "mis_kept_token_fraction")
    assert all(math.isfinite(row[f"train/{name}"]) for name in names)
    assert row["train/grad_norm"] > 0
    assert ("perf/score_seconds" in row) is (method not in SKIPS_SCORING)


def test_a_clip_beside_a_method_is_the_users(tmp_path: Path):
    config = tmp_path / "method.yaml"
    config.write_text("mis_loss_method: gspo\n")
    flags = [*WHOLE_LOSS, "--custom-config-path", str(config)]
    assert parse_args(flags).eps_clip_high is None
    assert parse_args([*flags, "--eps-clip-high", "0.3"]).eps_clip_high == 0.3
    assert parse_args(WHOLE_LOSS).eps_clip_high == 0.28
