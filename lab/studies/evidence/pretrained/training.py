# SPDX-License-Identifier: Apache-2.0
"""The training of one run: Megatron-Core, an engine, and the hosts' own call of mis_ext."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from grpo.engine import Completion
from grpo.rollout import grade_groups, own_share
from grpo.run_settings import package_version
from grpo.trainer import MicroBatch, Trainer
from torch import Tensor

from evidence.archives import Row

from . import numbers
from .compact import CompactTrainer
from .group import PretrainedGroup
from .workplace import EVALUATION_SEED, Workplace

# Of a greedy response: equal logits draw lots.
GREEDY = 1e-3

Keep = Callable[[str, dict[str, Any]], None]


class PretrainedTraining:
    """A run, step by step; its state can be saved between steps.

    Attributes:
        num_steps_done: Rollouts trained on.
        sampling_seconds: That the engine took for all of them.
        record: What else results say of where they come from.
    """

    def __init__(self, group: PretrainedGroup, workplace: Workplace) -> None:
        self.group, self.device = group, workplace.device
        self.num_steps_done, self.sampling_seconds = 0, 0.0
        self.record = {name: str(package_version(name)) for name in ("transformers", "megatron-core")}
        if workplace.model is not None:
            self.record["model"] = workplace.model.name
        self._workplace = workplace
        self._engine = workplace.engine(group)
        self._task, self._held_out = workplace.task(group), workplace.held_out(group)
        start = workplace.pretrained
        self._args = _arguments(group)
        workplace.free()
        trainer = CompactTrainer if group.max_tokens else Trainer
        self._trainer = trainer(self._args, start.shape, workplace.ranks(), start.weights)
        self._problems = Random(10_000 + group.run[1])

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to save."""
        return self.num_steps_done > 0

    def step(self, keep: Keep) -> list[Row]:
        """One rollout and its optimizer steps. ``keep`` takes log-probs for later analysis, by name."""
        group, trainer, step = self.group, self._trainer, self.num_steps_done
        start = time.perf_counter()
        data, reward = self._rollout(step)
        sampled = time.perf_counter()
        batches = trainer.micro_batches(data)
        data["rollout_log_probs"] = trainer.own_tokens(data["engine_log_probs"], batches)
        learned = {}
        if self._scores_in_training:
            data["log_probs"] = [None] * len(data["tokens"])
            learned = self._update(data, batches)
        else:
            data["log_probs"] = trainer.score(batches)
        found = numbers.mismatch(data["log_probs"], data["rollout_log_probs"])
        found |= {"reward": float(reward.mean()), "solved": float((reward == 1).float().mean())}
        if step in group.dump_steps:
            # Where responses are sorted by length, of all lengths.
            chosen = slice(0, group.num_dumped)
            if group.max_tokens:
                chosen = slice(0, None, -(-len(data["tokens"]) // group.num_dumped))
            streams = (data[name][chosen] for name in ("log_probs", "rollout_log_probs"))
            keep(f"step{step}", numbers.dump(*streams, group.response_length))
        if group.updates and not self._scores_in_training:
            learned = self._update(data, batches)
        found |= learned
        trained = time.perf_counter()
        if group.updates and (step % group.eval_interval == 0 or step + 1 == group.num_steps):
            found |= self._evaluate()
        found["seconds"] = time.perf_counter() - start
        found |= {"sampling_seconds": sampled - start, "training_seconds": trained - sampled}
        self.sampling_seconds += sampled - start
        self.num_steps_done += 1
        method, seed = group.run
        row = {"group": group.name, "method": method.name, "seed": seed, "step": step}
        return [row | {name: float(f"{value:.4g}") for name, value in found.items()}]

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs to go on with the next step."""
        return {
            "num_steps_done": self.num_steps_done,
            "sampling_seconds": self.sampling_seconds,
            "trainer": self._trainer.state_dict(),
            "problems": self._problems.getstate(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same group."""
        self.num_steps_done, self.sampling_seconds = state["num_steps_done"], state["sampling_seconds"]
        self._trainer.load_state_dict(state["trainer"])
        self._problems.setstate(state["problems"])

    def _rollout(self, step: int) -> tuple[dict[str, Any], Tensor]:
        """Questions, responses of the engine's weights, and what they are worth."""
        group, (_, seed) = self.group, self.group.run
        problems = [self._task.sample(self._problems) for _ in range(group.num_prompts)]
        prompts = [problem.prompt_ids for problem in problems for _ in range(group.samples_per_prompt)]
        if (longest := max(map(len, prompts))) > group.max_prompt:
            raise ValueError(f"{group.name}: a prompt of {longest} tokens, max_prompt is {group.max_prompt}")
        self._engine.load(self._trainer.weights())
        responses = self._engine.sample(
            prompts,
            num_tokens=group.response_length,
            temperature=group.temperature,
            end_token=self._end_token,
            seed=1_000_000 * (seed + 1) + step,
        )
        completions = [
            Completion(token_ids=ids, log_probs=logprobs, weight_version=step)
            for ids, logprobs in zip(responses.ids, responses.logprobs, strict=True)
        ]
        samples, reward = grade_groups(
            problems, completions, num_samples=group.samples_per_prompt, divided=group.divides_advantages
        )
        if group.max_tokens:
            samples.sort(key=lambda sample: len(sample.problem.prompt_ids) + len(sample.response_ids))
        data = own_share(self._task, samples, dp_rank=0, dp_size=1, padded=True, device=self.device)
        data["train_weight_version"] = step
        return data, reward

    @property
    def _scores_in_training(self) -> bool:
        """Whether log-probs may come of the pass that trains: nothing before it asks for them."""
        return bool(self.group.max_tokens and self.group.updates)

    def _update(self, data: dict[str, Any], batches: list[MicroBatch]) -> dict[str, float]:
        """The optimizer steps of one rollout."""
        per_update = len(batches) // self.group.updates
        logged = []
        for start in range(0, len(batches), per_update):
            logged.append(self._trainer.train(data, batches[start : start + per_update]))
        names = {
            "grad_norm": "grad_norm",
            "kept_tokens": "mis_kept_token_fraction",
            "kept_sequences": "mis_kept_seq_fraction",
        }
        return {ours: sum(part.get(name, 1.0) for part in logged) / len(logged) for ours, name in names.items()}

    def _evaluate(self) -> dict[str, float]:
        """Mean reward of the trainer policy on the held-out questions."""
        group = self.group
        evaluator = self._workplace.evaluator(group)
        evaluator.load(self._trainer.weights())
        temperatures = {"own_reward": group.temperature} | ({"own_greedy": GREEDY} if group.evaluates_greedily else {})
        found = {}
        for name, temperature in temperatures.items():
            responses = evaluator.sample(
                [question.prompt_ids for question in self._held_out],
                num_tokens=group.response_length,
                temperature=temperature,
                end_token=self._end_token,
                seed=EVALUATION_SEED,
            )
            rewards = [question.grade(ids) for question, ids in zip(self._held_out, responses.ids, strict=True)]
            found[name] = sum(rewards) / len(rewards)
        return found

    @property
    def _end_token(self) -> int:
        return self._workplace.pretrained.config.eos_token_id


def _arguments(group: PretrainedGroup) -> Namespace:
    """What a host's command line would say."""
    method, seed = group.run
    return Namespace(
        **{
            "seed": seed,
            "bf16": group.dtype == "bfloat16",
            "fp16": group.dtype == "float16",
            "calculate_per_token_loss": group.per_token_loss,
            "warmup_lr": group.learning_rate,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
            "micro_batch_size": group.micro_batch_size,
            "max_tokens": group.max_tokens,
            "qkv_format": "bshd",
            "rollout_temperature": group.temperature,
            "loss_type": "policy_loss",
            "eps_clip": 0.2,
            "eps_clip_high": 0.28,
            "use_rollout_logprobs": False,
            "use_tis": False,
            "get_mismatch_metrics": False,
            "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp",
            **({"mis_max_reject_fraction": 1.0} if method.keys else {}),
            **method.keys,
        }
    )
