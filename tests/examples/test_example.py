# SPDX-License-Identifier: Apache-2.0
"""The example run: its task, its trainer against transformers and across topologies, and the whole run end to end."""

# The imports after the skip need packages that only the example's environment has.
# ruff: noqa: E402

import importlib
import importlib.util
import math
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

MISSING = [
    name for name in ("megatron", "transformers", "matplotlib", "rich") if importlib.util.find_spec(name) is None
]
if MISSING:
    pytest.skip(f"{', '.join(MISSING)} not installed (requirements/example.txt)", allow_module_level=True)

from example_runs import SMALL_RUN, WHOLE_LOSS, learned, leave_a_run, on_ranks, train, with_all_metrics
from grpo.arguments import parse_args
from grpo.engine import Completion
from grpo.engine_settings import check_settings
from grpo.report import read_metrics
from grpo.rollout import Sample, grade_groups, own_share
from grpo.task import FIRST_STEP_TOKEN, CountingTask, Problem, grade

from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report import Parts, summarize

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PROBLEM = Problem(step=3, start=8, noise=(5, 0), num_graded=4)


def test_samples_of_a_rank_say_which_weights_sampled_them_as_the_hosts_do():
    answers = [
        Completion(token_ids=[1, 4, 7, 0], log_probs=[-1.0] * 4, weight_version=version) for version in (8, 8, 9)
    ]
    samples, _ = grade_groups([PROBLEM], answers, num_samples=3)
    share = partial(own_share, CountingTask(response_length=4), dp_size=2, padded=False, device=torch.device("cpu"))
    assert share(samples, dp_rank=0)["weight_versions"] == [["8"], ["9"]]
    assert share([Sample(problem=PROBLEM, response_ids=[1])], dp_rank=0)["weight_versions"] == [[]]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        pytest.param([1, 4, 7, 0], 1.0, id="right"),
        pytest.param([1, 4, 7, 0, 9, 9], 1.0, id="ungraded tail is not read"),
        pytest.param([1, 5, 8, 1], 0.75, id="a slip costs one digit"),
        pytest.param([1, 4], 0.5, id="missing digits are wrong"),
        pytest.param([], 0.0, id="nothing"),
        pytest.param([1, FIRST_STEP_TOKEN + 4, 7, 0], 0.5, id="a token that is no digit, and the digit after it"),
    ],
)
def test_reward_is_the_share_of_right_steps(response: list[int], reward: float):
    assert grade(PROBLEM, response) == reward


def test_drawn_problems_are_graded_on_32_to_40_tokens_and_masked_after():
    task, rng = CountingTask(), Random(0)
    problems = [task.sample(rng) for _ in range(300)]
    assert {problem.num_graded for problem in problems} == set(range(32, 41))
    assert {len(problem.prompt_ids) for problem in problems} == set(range(2, 10))
    for problem in problems:
        mask = task.loss_mask(problem, 40)
        assert mask == sorted(mask, reverse=True)
        assert (len(mask), sum(mask)) == (40, problem.num_graded)


def test_an_incomplete_last_line_of_the_metrics_is_left_out(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_engine_settings_have_the_types_of_yaml_scalars():
    texts = ["mem_fraction_static=0.1", "enable_metrics=true", "kv_cache_dtype=fp8_e5m2", "page_size=16", "a=null"]
    args = parse_args(["--rollout-engine", "sglang", "--engine-settings", *texts])
    expected = {
        **{"mem_fraction_static": 0.1, "enable_metrics": True, "kv_cache_dtype": "fp8_e5m2"},
        **{"page_size": 16, "a": None},
    }
    assert args.engine_settings == expected
    assert [*map(type, args.engine_settings.values())] == [*map(type, expected.values())]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine-settings", "page_size=16"], "--rollout-engine sglang or vllm, the engine is transformers"),
        (["--rollout-engine", "sglang", "--engine-settings", "a=1e-4"], "such as 1.0e-4"),
        (["--resume", "--overwrite"], "choose one"),
        (["--rollout-top-p", "0.9"], "--rollout-engine sglang or vllm, the engine is transformers"),
        (["--rollout-engine", "sglang", "--rollout-top-p", "0"], "above 0, at most 1"),
        (["--micro-batch-size", "0"], "--micro-batch-size 0: expected at least 1"),
        (["--save-interval", "0"], "--save-interval 0: expected at least 1"),
        (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt 1: expected at least 2"),
        (["--task", "arithmetic"], "--task arithmetic needs --model"),
        (["--model", ".", "--num-layers", "3"], "are for the random decoder"),
        (["--entropy-coef", "0.1"], "need --loss-type custom_loss"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], message: str):
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert message in capsys.readouterr().err


def test_a_setting_that_sglang_lacks_is_refused_with_those_close_to_it():
    known = ["mem_fraction_static", "page_size", "tp_size"]
    check_settings({"page_size": 16}, known=known, fixed=("tp_size",), engine="SGLang 1")
    with pytest.raises(ValueError, match="SGLang 1 has no 'mem_fraction'; close to it: mem_fraction_static"):
        check_settings({"mem_fraction": 0.1}, known=known, fixed=("tp_size",), engine="SGLang 1")
    with pytest.raises(ValueError, match="tp_size is set by the example"):
        check_settings({"tp_size": 2}, known=known, fixed=("tp_size",), engine="SGLang 1")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_engine_reports_the_log_probs_of_its_tokens_under_the_latest_weights(dtype: torch.dtype, tolerance: float):
    """Float32 differs by summation order; bfloat16 keeps 8 bits of logits of a few units."""
    from grpo.engine import TransformersEngine
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    )
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]] * 3
    engine = TransformersEngine(config, seed=0, dtype=dtype)
    try:
        for version in (3, 4):
            policy = Qwen3ForCausalLM(config).eval()
            engine.update_weights(policy.state_dict(), version=version)
            completions = engine.generate(prompts, max_new_tokens=7, temperature=0.7)
            for prompt, completion in zip(prompts, completions, strict=True):
                assert completion.weight_version == version
                assert len(completion.token_ids) == 7
                with torch.no_grad():
                    logits = policy(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
                expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=tolerance, rtol=0)
    finally:
        engine.close()


TOPOLOGIES = ["DP 2 thd", "DP 2 bshd", "CP 2 thd", "CP 2 bshd"]
LOSSES = {
    "per sample": TOPOLOGIES,
    "per token": ["DP 2 thd", "CP 2 bshd"],
    "whole loss": TOPOLOGIES[:1] + TOPOLOGIES[2:],
}


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What ``score_and_train`` found, by topology, layout and loss."""
    path = tmp_path_factory.mktemp("topologies") / "found.pt"
    on_ranks(score_and_train, path)
    return torch.load(path)


@pytest.mark.whole_run
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_trainer_scores_as_transformers_does_with_the_exported_weights(topologies, topology: str):
    found = topologies[f"{topology} per sample"]
    torch.testing.assert_close(found["log_probs"], found["hf_log_probs"], atol=1e-4, rtol=0)
    assert found["log_probs"].std() > 1


@pytest.mark.whole_run
@pytest.mark.parametrize(
    ("loss", "topology"), [(loss, topology) for loss in ("per sample", "per token") for topology in LOSSES[loss][1:]]
)
def test_context_parallelism_and_layout_change_neither_scores_nor_loss_nor_update(topologies, topology: str, loss: str):
    """Float32 sums in another order: about 1e-6 of log-probs of size 3; Adam's first step amplifies what is near 0."""
    expected, found = topologies[f"DP 2 thd {loss}"], topologies[f"{topology} {loss}"]
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=2e-5, rtol=0)
    for name in ("loss", "grad_norm", "mis_k3_kl", "mis_ess_ratio_seq", "mis_logprob_abs_diff"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found["log_probs_after"], expected["log_probs_after"], atol=1e-3, rtol=0)


@pytest.mark.whole_run
@pytest.mark.parametrize("topology", LOSSES["whole loss"])
def test_the_whole_loss_gives_the_numbers_of_the_examples_own(topologies, topology: str):
    own, whole = (topologies[f"{topology} {loss}"] for loss in ("per sample", "whole loss"))
    names = ["loss", "grad_norm", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff"]
    for name in [*names, *(name for name in own if name.startswith("mis_"))]:
        torch.testing.assert_close(whole[name], own[name], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(whole["log_probs_after"], own["log_probs_after"], atol=1e-3, rtol=0)
    assert {"pg_loss", "entropy_loss"} <= whole.keys() - own.keys()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a long run that got Ctrl-C in its second step, on one rank."""
    folder = tmp_path_factory.mktemp("interrupted")
    stop = ("--rollout-data-postprocess-path", "example_runs.prepare_and_stop")
    rows = train(folder / "run", *SMALL_RUN, *with_all_metrics(folder), *stop, "--num-rollout", "100")
    assert [row["step"] for row in rows] == [0, 1]
    return folder / "run"


@pytest.mark.whole_run
def test_resumed_run_equals_one_that_never_stopped(interrupted: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_DUMP_DIR", str(tmp_path / "dumps"))
    flags = [*SMALL_RUN, *with_all_metrics(tmp_path), "--num-rollout", "3"]
    resumed = train(interrupted, *flags, "--resume")
    assert [row["step"] for row in resumed] == [0, 1, 2]
    leave_a_run(tmp_path)
    dump = ("--rollout-data-postprocess-path", "prepared_dump.save")
    whole = train(tmp_path, *flags, "--overwrite", *dump)
    assert learned(resumed) == learned(whole)
    summary = summarize(Parts(Dumps(sorted((tmp_path / "dumps").iterdir()))))
    assert [group.name for group in summary.by_version] == ["0 behind"]
    for row in whole:
        # The report's mean is over tokens, the logged one over samples.
        assert summary.steps[str(row["step"])].k3 == pytest.approx(row["train/mis_k3_kl"], rel=0.1)
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")

    for row in resumed:
        # At first no token is probable enough for this one.
        assert all(math.isfinite(value) for name, value in row.items() if name != "train/mis_raised_fraction")
        assert 0 <= row["rollout/reward"] <= 1
        # bfloat16 against float32: neither nothing nor more than rounding.
        assert 1e-5 < row["train/mis_logprob_abs_diff"] < 0.05
        assert row["train/mis_k3_kl"] > 0
        assert row["train/mis_ess_ratio_seq"] < 1


def examine(
    args: Any, ranks: Any, task: CountingTask, samples: list[Any], *, beside_transformers: bool
) -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from grpo.model import ModelShape
    from grpo.rollout import own_share
    from grpo.trainer import Trainer

    shape = ModelShape(max_length=task.max_length)
    trainer = Trainer(args, shape, ranks)
    with torch.no_grad():
        # Weights as initialized give nearly uniform distributions.
        for name, weight in trainer.state_dict()["model"].items():
            if "_extra_state" not in name:
                weight.mul_(4 if weight.dim() == 2 else 1.5)
    data = own_share(
        task,
        samples,
        dp_rank=ranks.dp_rank,
        dp_size=ranks.dp_size,
        padded=args.qkv_format == "bshd",
        device=ranks.device,
    )
    batches = trainer.micro_batches(data)
    indices = [index for batch in batches for index in batch.inputs.response_indices]

    def whole(log_probs: list[torch.Tensor]) -> torch.Tensor:
        values = torch.zeros(len(samples), task.response_length)
        for row, index, local in zip(values[ranks.dp_rank :: ranks.dp_size], indices, log_probs, strict=True):
            row[index] = local
        dist.all_reduce(values)
        return values

    data["log_probs"] = trainer.score(batches)
    differences = trainer.own_tokens(data["engine_log_probs"], batches)
    data["rollout_log_probs"] = [ours + other for ours, other in zip(data["log_probs"], differences, strict=True)]
    compared = {}
    if beside_transformers:
        compared["hf_log_probs"] = transformers_log_probs(shape, trainer.export_weights(), samples)
    logged = trainer.train(data, batches)
    return {
        **compared,
        "log_probs": whole(data["log_probs"]),
        "log_probs_after": whole(trainer.score(batches)),
        **{name: torch.tensor(value) for name, value in logged.items()},
    }


@torch.no_grad()
def transformers_log_probs(shape: Any, weights: dict[str, torch.Tensor], samples: list[Any]) -> torch.Tensor:
    from grpo.model import hf_config
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(hf_config(shape)).eval()
    model.load_state_dict(weights)
    rows = []
    for sample in samples:
        logits = model(torch.tensor([sample.problem.prompt_ids + sample.response_ids])).logits[0]
        log_probs = logits[len(sample.problem.prompt_ids) - 1 : -1].log_softmax(-1)
        rows.append(log_probs.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0])
    return torch.stack(rows)


def score_and_train(path: Path) -> None:
    """On each of two ranks: score a rollout, make one optimizer step on it, and score it again, on each topology."""
    import torch.distributed as dist
    from grpo.distributed import Ranks
    from grpo.rollout import Sample
    from megatron.core import parallel_state

    task, rng = CountingTask(response_length=11, min_graded=7), Random(3)
    samples = [
        Sample(
            problem=task.sample(rng),
            response_ids=[rng.randrange(12) for _ in range(task.response_length)],
            # The engine's difference from the trainer; ``examine`` adds the trainer's own log-probs.
            rollout_log_probs=[rng.gauss(0, 0.1) for _ in range(task.response_length)],
            advantage=rng.uniform(-1, 1),
        )
        for _ in range(8)
    ]
    found = {}
    for cp_size, parallel in ((1, "DP"), (2, "CP")):
        ranks = Ranks.start(context_parallel_size=cp_size, seed=1)
        cases = [(loss, name) for loss, names in LOSSES.items() for name in names if name.startswith(parallel)]
        for loss, topology in cases:
            flags = ["--context-parallel-size", str(cp_size), "--qkv-format", topology.split()[-1], *SMALL_RUN]
            # Four samples in a call over all data-parallel ranks, the scope of normalization and group metrics.
            flags += ["--num-steps-per-rollout", "1", "--micro-batch-size", "4" if cp_size == 2 else "2"]
            flags += {"per token": ["--calculate-per-token-loss"], "whole loss": WHOLE_LOSS}.get(loss, [])
            is_own = loss == "per sample"
            found[f"{topology} {loss}"] = examine(parse_args(flags), ranks, task, samples, beside_transformers=is_own)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(found, path)
    dist.destroy_process_group()
