# SPDX-License-Identifier: Apache-2.0
"""The training of one run: Megatron-Core, an engine, and the hosts' own call of mis_ext."""

from __future__ import annotations

import dataclasses
import fcntl
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from grpo.engine import Completion
from grpo.rollout import grade_groups, own_share
from grpo.run_settings import package_version
from grpo.trainer import MicroBatch, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor

from evidence.archives import Row
from evidence.study import NONE
from mis_ext.onpolicy import RoutedExperts

from . import numbers, routing
from .aligned import AlignedTrainer
from .compact import CompactTrainer
from .group import PretrainedGroup
from .rate import share
from .workplace import EVALUATION_SEED, Workplace

# Of the rollouts that are scored again later.
NUM_SCORED_AGAIN = 64
STEPS_BETWEEN_AGES = 5
# Of a greedy answer: equal logits draw lots.
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
        start = workplace.start(group)
        weights = start.weights if group.trained_steps == 0 else _trained_weights(group, workplace)
        self._args = _arguments(group)
        workplace.free()
        trainer = AlignedTrainer if group.is_aligned else CompactTrainer if group.max_tokens else Trainer
        self._trainer = trainer(self._args, start.shape, workplace.ranks(), weights)
        self._round_weights()
        if group.simulated_cache:
            self._trainer.simulate_kv_cache(group.engine.cache, queries=group.simulated_cache == "qkv")
        self._problems = Random(10_000 + group.run[1])
        self._history: deque[dict[str, Tensor]] = deque(maxlen=group.staleness)
        self._past: deque[dict[str, Any]] = deque(maxlen=max(group.ages, default=0) + 1)
        self._k3: list[float] = []

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
        flips, learned = routing.Flips(), {}
        if self._scores_in_training:
            data["log_probs"] = [None] * len(data["tokens"])
            learned = self._update(data, batches, step)
        else:
            flips = self._score(data, batches)
        found = numbers.mismatch(data["log_probs"], data["rollout_log_probs"])
        found |= flips.shares()
        found |= {"reward": float(reward.mean()), "solved": float((reward == 1).float().mean())}
        found |= self._by_age(data, step)
        if step in group.dump_steps:
            # Where answers are sorted by length, of all lengths.
            chosen = slice(0, group.num_dumped)
            if group.max_tokens:
                chosen = slice(0, None, -(-len(data["tokens"]) // group.num_dumped))
            streams = (data[name][chosen] for name in ("log_probs", "rollout_log_probs"))
            flipped = flips.by_answer[chosen]
            keep(f"step{step}", numbers.dump(*streams, group.response_length, flips=flipped))
        found |= self._set_rate(found)
        if group.updates and not self._scores_in_training:
            learned = self._update(data, batches, step)
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
            "history": list(self._history),
            "problems": self._problems.getstate(),
            "k3": self._k3,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same group; the next ages are measured once there are rollouts of such an age."""
        self.num_steps_done, self.sampling_seconds = state["num_steps_done"], state["sampling_seconds"]
        self._trainer.load_state_dict(state["trainer"])
        self._history.extend(
            {name: weight.to(self.device) for name, weight in weights.items()} for weights in state["history"]
        )
        self._problems.setstate(state["problems"])
        # A state of before has none, and no rule.
        self._k3 = list(state["k3"])

    def _rollout(self, step: int) -> tuple[dict[str, Any], Tensor]:
        """Questions, answers of the engine's weights, and what they are worth."""
        group, (method, seed) = self.group, self.group.run
        problems = [self._task.sample(self._problems) for _ in range(group.num_prompts)]
        prompts = [problem.prompt_ids for problem in problems for _ in range(group.samples_per_prompt)]
        if (longest := max(map(len, prompts))) > group.max_prompt:
            raise ValueError(f"{group.name}: a prompt of {longest} tokens, max_prompt is {group.max_prompt}")
        self._engine.load(self._weights_of_engine())
        answers = self._engine.sample(
            prompts,
            num_tokens=group.response_length,
            temperature=group.temperature,
            end_token=self._end_token,
            seed=1_000_000 * (seed + 1) + 100_000 * method.stream + step,
        )
        version = max(0, step - group.staleness)
        completions = [
            Completion(token_ids=ids, log_probs=logprobs, weight_version=version)
            for ids, logprobs in zip(answers.ids, answers.logprobs, strict=True)
        ]
        samples, reward = grade_groups(
            problems, completions, num_samples=group.samples_per_prompt, divided=group.divides_advantages
        )
        if group.max_tokens:
            samples.sort(key=lambda sample: len(sample.problem.prompt_ids) + len(sample.response_ids))
        data = own_share(self._task, samples, dp_rank=0, dp_size=1, padded=True, device=self.device)
        data["train_weight_version"] = step
        if answers.experts is not None:
            data["rollout_routed_experts"] = [
                RoutedExperts.from_rows(rows, num_tokens=length, num_experts=group.experts)
                for rows, length in zip(answers.experts, data["total_lengths"], strict=True)
            ]
        return data, reward

    def _weights_of_engine(self) -> dict[str, Tensor]:
        """The trainer's weights, or those of some steps ago."""
        weights = self._trainer.weights()
        if not self.group.staleness:
            return weights
        oldest = self._history[0] if self._history else weights
        self._history.append({name: weight.clone() for name, weight in weights.items()})
        return oldest

    def _score(self, data: dict[str, Any], batches: list[MicroBatch]) -> routing.Flips:
        """Put in the trainer's log-probs; which of its experts differ from the engine's, where it uses its own."""
        if self.group.run[0].replays_routing or "rollout_routed_experts" not in data:
            data["log_probs"] = self._trainer.score(batches)
            return routing.Flips()
        with self._trainer.recorded_routing() as record:
            data["log_probs"] = self._trainer.score(batches)
        return routing.Flips.of(record.micro_batches(), batches)

    @property
    def _scores_in_training(self) -> bool:
        """Whether log-probs may come of the pass that trains: nothing before it asks for them."""
        group, method = self.group, self.group.run[0]
        asked = method.slows_down or group.ages
        return bool(group.max_tokens and group.updates and not asked)

    def _set_rate(self, found: Mapping[str, float]) -> dict[str, float]:
        """Of this step's update, where it follows k3."""
        if not self.group.run[0].slows_down:
            return {}
        self._k3.append(found["k3"])
        rate = self.group.learning_rate * share(self._k3)
        self._trainer.set_learning_rate(rate)
        return {"learning_rate": rate}

    def _update(self, data: dict[str, Any], batches: list[MicroBatch], step: int) -> dict[str, float]:
        """The optimizer steps of one rollout."""
        per_update = len(batches) // self.group.updates
        logged = []
        for start in range(0, len(batches), per_update):
            logged.append(self._trainer.train(data, batches[start : start + per_update]))
            self._round_weights()
        names = {
            "grad_norm": "grad_norm",
            "kept_tokens": "mis_kept_token_fraction",
            "kept_sequences": "mis_kept_seq_fraction",
        }
        return {ours: sum(part.get(name, 1.0) for part in logged) / len(logged) for ours, name in names.items()}

    def _round_weights(self) -> None:
        if self.group.rounded_to:
            self._trainer.round_weights(getattr(torch, self.group.rounded_to))

    def _by_age(self, data: dict[str, Any], step: int) -> dict[str, float]:
        """k3 of what the engine sampled some steps ago against the trainer's weights of now, by age."""
        if not self.group.ages:
            return {}
        self._past.append(
            {name: values[:NUM_SCORED_AGAIN] for name, values in data.items() if isinstance(values, list)}
        )
        if step % STEPS_BETWEEN_AGES:
            return {}
        found = {}
        for age in self.group.ages:
            if age < len(self._past):
                old = self._past[-1 - age]
                log_probs = self._trainer.score(self._trainer.micro_batches(old))
                found[f"k3_age_{age}"] = numbers.k3(torch.cat(log_probs) - torch.cat(old["rollout_log_probs"]))
        return found

    def _evaluate(self) -> dict[str, float]:
        """Mean reward of the trainer's own policy on the held-out questions."""
        group = self.group
        evaluator = self._workplace.evaluator(group)
        evaluator.load(self._trainer.weights())
        temperatures = {"own_reward": group.temperature} | ({"own_greedy": GREEDY} if group.evaluates_greedily else {})
        found = {}
        for name, temperature in temperatures.items():
            answers = evaluator.sample(
                [question.prompt_ids for question in self._held_out],
                num_tokens=group.response_length,
                temperature=temperature,
                end_token=self._end_token,
                seed=EVALUATION_SEED,
            )
            rewards = [question.grade(ids) for question, ids in zip(self._held_out, answers.ids, strict=True)]
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
            "use_rollout_logprobs": method.bypasses,
            "use_rollout_routing_replay": method.replays_routing,
            "use_tis": False,
            "get_mismatch_metrics": False,
            "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp",
            **({"mis_max_reject_fraction": 1.0} if method.keys else {}),
            **method.keys,
        }
    )


def _trained_weights(group: PretrainedGroup, workplace: Workplace) -> dict[str, Tensor]:
    """The weights that a group begins with: of a file that the first process which needs it writes."""
    name = f"first_weights_{group.task.replace(':', '_')}_{group.trained_steps}_{group.learning_rate:g}"
    first = dataclasses.replace(
        group,
        name=name + (f"_{group.experts}_experts_{group.expert_noise:g}" if group.experts else ""),
        **{"methods": (NONE,), "seeds": (0,), "num_steps": group.trained_steps, "trained_steps": 0},
        **{"staleness": 0, "ages": (), "dump_steps": (), "eval_interval": group.trained_steps + 1},
    )
    workplace.scratch.mkdir(parents=True, exist_ok=True)
    file = workplace.scratch / f"{first.name}.safetensors"
    with (workplace.scratch / f"{first.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            training = PretrainedTraining(first, workplace)
            for _ in range(first.num_steps):
                training.step(lambda name, arrays: None)
            weights = {name: weight.cpu().contiguous() for name, weight in training._trainer.weights().items()}
            if workplace.pretrained.config.tie_word_embeddings:
                del weights["lm_head.weight"]
            part = file.with_suffix(".part")
            save_file(weights, part)
            part.replace(file)
    weights = load_file(file)
    return weights | {"lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}
