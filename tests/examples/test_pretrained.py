# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face in Megatron-Core's decoder, and questions with a verifiable answer."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from collections.abc import Iterator
from io import StringIO
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

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from example_runs import CORRECTION, learned, on_ranks
    from grpo.arguments import parse_args
    from grpo.conversion import export_weights, load_weights
    from grpo.cpu import megatron_device
    from grpo.distributed import Ranks, StopRequest
    from grpo.evaluation import Evaluation
    from grpo.model import ModelShape, build_model, transformer_config
    from grpo.pretrained import Pretrained, load_pretrained
    from grpo.questions import QuestionTask
    from grpo.report import read_metrics
    from grpo.run import Run
    from grpo.trainer import Trainer
    from megatron.core import parallel_state
    from rich.console import Console
    from safetensors.torch import load_file, save_file
    from tiny_checkpoint import write_tiny_checkpoint
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        MixtralConfig,
        PretrainedConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

# Megatron-Core warns of its own choices.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope is deprecated")

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rms_norm_eps": 1e-5,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama, a head per query, wide heads": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 4}, head_dim=24),
    "qwen2, tied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=5, tie_word_embeddings=False),
    "qwen3, tied, one key head": lambda: Qwen3Config(
        **SMALL | {"num_key_value_heads": 1}, head_dim=16, tie_word_embeddings=True
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron-Core's groups, of this process alone."""
    dist = torch.distributed
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def ranks_of_one() -> Ranks:
    group = torch.distributed.group.WORLD
    return Ranks(device=CPU, rank=0, dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, control_group=group)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    return load_pretrained(folder)


def random_model(config: PretrainedConfig) -> Any:
    """With weights that make far from uniform distributions, and biases and norms that are not neutral."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5) + (parameter.dim() < 2))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_computes_the_logits_of_transformers_and_gives_the_weights_back(name: str) -> None:
    config = CONFIGS[name]()
    model, shape = random_model(config), ModelShape.of(config)
    settings = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False)
    token_BT = torch.randint(0, 40, (3, 21), generator=torch.Generator().manual_seed(1))
    position_BT = torch.arange(21).expand(3, 21)
    with megatron_device(CPU):
        ours = build_model(shape, settings, seed=0)
        load_weights(ours, model.state_dict(), shape)
        with torch.no_grad():
            logits = ours(token_BT, position_BT, None)
    expected = model(token_BT).logits.detach()
    # Both in float32; logits are of the size of 10.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
    assert expected.std() > 1
    exported = export_weights(ours, shape)
    assert exported.keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        assert torch.equal(exported[key], weight), key


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SMALL | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}), "rope"),
        (Qwen2Config(**SMALL, hidden_act="gelu"), "hidden_act is 'gelu'"),
        (MixtralConfig(**SMALL, sliding_window=8), "sliding_window is 8"),
        (Qwen3MoeConfig(**SMALL), "model_type 'qwen3_moe'"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.of(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "1.mlp.up_proj.weight is not in the check"),
        (
            lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "0.self_attn.q_proj.bias has no place in the model",
        ),
    ],
)
def test_a_weight_too_few_or_too_many_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    write_tiny_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


def run_of(output: Path, model: Path, *flags: str, ranks: Ranks) -> Run:
    """A run of the program before its first step."""
    given = ["--output-dir", str(output), "--model", str(model), *CORRECTION, "--rollout-max-response-len", "2"]
    given += ["--num-steps-per-rollout", "1", "--qkv-format", "bshd", *flags]
    args = parse_args(given, world_size=torch.distributed.get_world_size())
    return Run(args, ranks, StopRequest())


@pytest.mark.whole_run
@pytest.mark.usefixtures("graded")
def test_a_checkpoint_trains_in_bf16_and_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_checkpoint(model)
    flags = ["--bf16", "--rollout-batch-size", "2", "--n-samples-per-prompt", "8", "--micro-batch-size", "8"]
    flags += ["--num-rollout", "2"]
    whole = run_of(tmp_path / "run", model, *flags, ranks=ranks_of_one())
    whole._trainer.reset_optimizer(lr=1e-3)
    whole._update_weights(version=0)
    rows = [whole._step(0)]
    whole._save(next_step=1)
    rows.append(whole._step(1))
    whole._engine.close()
    assert any(row["train/grad_norm"] > 0 for row in rows)
    assert all(0 < row["train/mis_k3_kl"] < 0.01 for row in rows)
    run_of(tmp_path / "run", model, *flags, "--resume", ranks=ranks_of_one()).execute(Console(file=StringIO()))
    assert learned(read_metrics(tmp_path / "run" / "metrics.jsonl")) == learned(rows[1:])


def evaluated(model: Path, output: Path) -> None:
    """On a rank: what the own policy is worth where two ranks share questions, and where they share sequences."""
    found = []
    for cp_size in (1, 2):
        ranks = Ranks.start(context_parallel_size=cp_size, seed=1)
        run = run_of(output, model, *EVALUATION, "--context-parallel-size", str(cp_size), ranks=ranks)
        found.append(run._evaluate(0))
        parallel_state.destroy_model_parallel()
    (output / f"{ranks.rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


EVALUATION = ["--num-rollout", "3", "--eval-interval", "2", "--num-eval-prompts", "101", "--eval-temperature", "1"]
EVALUATION += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "32", "--micro-batch-size", "32"]


@pytest.mark.long_run
@pytest.mark.whole_run
@pytest.mark.slow
@pytest.mark.distributed
def test_the_own_policy_is_worth_the_same_on_data_parallel_and_on_context_parallel_ranks(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_checkpoint(model)
    alone = run_of(tmp_path, model, *EVALUATION, ranks=ranks_of_one())
    rewards = [alone._evaluate(step) for step in range(3)]
    assert rewards == [rewards[0], {}, rewards[0]]
    assert 0 < rewards[0]["eval/reward"] < 1
    on_ranks(evaluated, model, tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == rewards[:1] * 2


class Recorded:
    """A trainer that keeps what it was asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.asked = trainer, []

    def next_logits(self, sequences: list[list[int]]) -> Any:
        self.asked += [list(sequence) for sequence in sequences]
        return self._trainer.next_logits(sequences)


def test_greedy_answers_of_the_trainer_are_those_that_transformers_generates(checkpoint: Pretrained) -> None:
    args = parse_args(["--model", ".", "--no-bf16"])
    ranks = ranks_of_one()
    task = QuestionTask("arithmetic", checkpoint.tokenizer, response_length=5)
    end = checkpoint.config.eos_token_id
    sizes = {"num_questions": 12, "batch_size": 5, "end_token": end}
    greedy = Evaluation(task, ranks, temperature=0.0, **sizes)
    recorded = Recorded(Trainer(args, checkpoint.shape, ranks, checkpoint.weights))
    reward = greedy.reward(recorded)
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    model.load_state_dict(checkpoint.weights)
    graded = []
    for question in greedy._questions:
        ids = torch.tensor([question.prompt_ids])
        answer = model.generate(ids, do_sample=False, max_new_tokens=5, eos_token_id=end, pad_token_id=end)[0]
        assert answer[:-1].tolist() in recorded.asked
        graded.append(question.grade(answer[ids.shape[1] :].tolist()))
    assert reward == pytest.approx(sum(graded) / 12)
    # Sampled answers differ from those, and are the same at every call.
    sampled = Evaluation(task, ranks, temperature=1.0, **sizes)
    drawn = Recorded(recorded._trainer)
    again = Recorded(recorded._trainer)
    assert sampled.reward(drawn) == sampled.reward(again)
    assert drawn.asked == again.asked != recorded.asked


def test_questions_are_asked_in_the_chat_template_and_answers_checked(checkpoint: Pretrained) -> None:
    task = QuestionTask("arithmetic", checkpoint.tokenizer, response_length=8)
    rng, text = Random(1), checkpoint.tokenizer.decode
    learned, held_out = ({task.sample(rng, held_out=kind).text for _ in range(200)} for kind in (False, True))
    assert not learned & held_out
    question = task.sample(Random(1))
    assert (question.text, text(question.prompt_ids)) == (
        "What is 3 x 6? Answer with the number only.",
        "<|start|>u What is 3 x 6? Answer with the number only.<|end|><|start|>a ",
    )
    answers = {"18<|end|>": 1.0, "3 x 6 is 18.<|end|>": 1.0, "3 x 6": 0.0, "": 0.0}
    ids = {answer: checkpoint.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers}
    assert {answer: question.grade(ids[answer]) for answer in answers} == answers
    assert task.loss_mask(question, 3) == [1, 1, 1]
    assert text([checkpoint.config.eos_token_id]) == "<|end|>"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda folder: None, FileNotFoundError, "neither config.json nor a GGUF"),
        (lambda folder: [(folder / name).touch() for name in ("a.gguf", "b.gguf")], ValueError, "a.gguf, b.gguf"),
        (lambda folder: folder.rmdir(), FileNotFoundError, "expected a folder"),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path: Path, make: Any, error: Any, message: str) -> None:
    (tmp_path / "model").mkdir()
    make(tmp_path / "model")
    with pytest.raises(error, match=message):
        load_pretrained(tmp_path / "model")


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
def test_reasoning_gym_checks_answers_that_talk_around_their_number(checkpoint: Pretrained) -> None:
    task = QuestionTask("reasoning_gym:basic_arithmetic", checkpoint.tokenizer, response_length=8)
    question = task.sample(Random(1))
    assert question.text == "Calculate 9 * -4 + -3."
    assert [question.worth(f"9 times -4, so it is {x}.") for x in (-39, 39, "-39.0")] == [1.0, 0.0, 1.0]
    large = task.sample(Random(541))
    assert large.text == "Calculate -8311 * -8351 * -6743 * -8703 * 4760."
    # A float has fewer digits.
    assert [large.worth(f"It is {x}.") for x in ("19,387,457,639,528,572,440", "19387457639528572441")] == [1.0, 0.0]
    with pytest.raises(ValueError, match="reasoning-gym has no task 'sums'"):
        QuestionTask("reasoning_gym:sums", checkpoint.tokenizer, response_length=8)


def test_prepared_questions_are_drawn_and_the_last_number_of_an_answer_counts(
    checkpoint: Pretrained, tmp_path: Path
) -> None:
    file = tmp_path / "questions.json"
    asked = {f"How many are {number} and 1,233?": str(number + 1233) for number in range(64)}
    file.write_text(json.dumps({"source": "here", "license": "none", "questions": [*asked.items()]}))
    task = QuestionTask(f"prepared:{file}", checkpoint.tokenizer, response_length=8)
    learned, held_out = ({task.sample(Random(seed), held_out=kind).text for seed in range(300)} for kind in (0, 1))
    assert learned | held_out == asked.keys()
    assert not learned & held_out
    question = next(
        question for seed in range(999) if (question := task.sample(Random(seed))).text.startswith("How many are 1 ")
    )
    answers = {"1,234": 1.0, "It is $1,234.00.": 1.0, "1233+1=1234": 1.0, "1234, not 1233": 0.0, "-1234": 0.0, "": 0.0}
    assert {answer: question.worth(answer) for answer in answers} == answers
    with pytest.raises(FileNotFoundError, match=r"examples/questions/prepare\.py"):
        QuestionTask("prepared:nowhere.json", checkpoint.tokenizer, response_length=8)


def test_a_story_that_ends_with_the_right_number_is_worth_1(checkpoint: Pretrained) -> None:
    question = QuestionTask("story_answer", checkpoint.tokenizer, response_length=8).sample(Random(0))
    numbers = [int(number) for number in re.findall(r"\d+", question.text)]
    assert len(set(numbers)) == 3
    story = " ".join(f"{a}{b}c" for a in "abcdfg" for b in "lmnopqrstu")
    assert question.worth(f"{story}. The largest is {max(numbers)}.") == 1.0
    assert question.worth(f"{max(numbers)}. {story} {min(numbers)}") == 0.0
    assert question.worth(f"{story[4:]} {story[4:8]}. It is {max(numbers)}") == 0.0
    assert question.worth(story) == 0.0
