# SPDX-License-Identifier: Apache-2.0
"""The run: a supervised warm-up, then rollout, grading, scoring, training and weight update, step by step."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from .checkpoint import load_checkpoint, save_checkpoint
from .distributed import Ranks, StopRequest
from .engine import Completion, RolloutEngine, create_engine
from .evaluation import Evaluation
from .loss import load_function
from .model import ModelShape, hf_config
from .pretrained import load_pretrained
from .questions import Question, QuestionTask
from .report import MetricsLog, ProgressDisplay, Row, plot, read_metrics, summary_table
from .rollout import Sample, grade_groups, own_share, supervised_samples
from .run_settings import write_settings
from .task import CountingTask, Problem
from .trainer import Trainer


class Run:
    """One training run on this rank. Rank 0 also has the inference engine and writes the reports."""

    def __init__(self, args: Namespace, ranks: Ranks, stop: StopRequest) -> None:
        self._args, self._ranks, self._stop = args, ranks, stop
        self._rng = Random(args.seed)
        length = args.rollout_max_response_len
        if args.model is None:
            self._task: CountingTask | QuestionTask = CountingTask(response_length=length)
            shape = ModelShape(
                num_layers=args.num_layers,
                hidden_size=args.hidden_size,
                ffn_hidden_size=2 * args.hidden_size,
                max_length=self._task.max_length,
            )
            config, weights = hf_config(shape), None
        else:
            pretrained = load_pretrained(args.model)
            self._task = QuestionTask(args.task, pretrained.tokenizer, response_length=length)
            shape, config, weights = pretrained.shape, pretrained.config, pretrained.weights
            if self._task.max_length > shape.max_length:
                raise ValueError(
                    f"{self._task.max_length} tokens of prompt and response, but the model supports {shape.max_length}"
                )
        self._trainer = Trainer(args, shape, ranks, weights)
        self._evaluation: Evaluation | None = None
        if args.eval_interval is not None:
            self._evaluation = Evaluation(
                self._task,
                ranks,
                num_questions=args.num_eval_prompts,
                batch_size=args.micro_batch_size,
                temperature=args.eval_temperature,
                end_token=config.eos_token_id,
            )
        self._checkpoint = args.output_dir / "checkpoint.pt"
        self._metrics = args.output_dir / "metrics.jsonl"
        self._figure = args.output_dir / "metrics.png"
        self._engine: RolloutEngine | None = None
        self._phase_seconds: dict[str, float] = {}
        if self._is_main:
            args.output_dir.mkdir(parents=True, exist_ok=True)
            # The transformers engine samples from the generator of this process, which a checkpoint restores.
            self._engine = create_engine(
                args.rollout_engine,
                hf_config=config,
                seed=args.seed,
                workdir=args.output_dir / "engine",
                settings=args.engine_settings,
            )
            write_settings(
                args.output_dir / "settings.json", args, engine_settings=self._engine.settings, device=ranks.device
            )

    def execute(self, console: Console) -> None:
        """Run to the end, or until a stop is requested, and report."""
        first_step = 0
        if self._args.resume:
            first_step = load_checkpoint(self._checkpoint, trainer=self._trainer, rng=self._rng)
        elif self._is_main:
            self._checkpoint.unlink(missing_ok=True)
            self._figure.unlink(missing_ok=True)
        log = MetricsLog(self._metrics, first_step=first_step) if self._is_main else None
        try:
            with ProgressDisplay(console, enabled=self._is_main) as display:
                if self._args.resume or self._warm_up(display):
                    self._update_weights(version=first_step)
                    self._reinforce(display, log, first_step=first_step)
        finally:
            if self._engine is not None:
                self._engine.close()
            if log is not None:
                log.close()
                self._report(console)

    @property
    def _is_main(self) -> bool:
        return self._ranks.rank == 0

    def _warm_up(self, display: ProgressDisplay) -> bool:
        """Return True if the model is ready for the first rollout. A stopped warm-up writes no checkpoint."""
        advance = display.start_phase("warm-up", total=self._args.warmup_steps)
        for _ in range(self._args.warmup_steps):
            if self._stop_agreed():
                return False
            count = self._args.rollout_batch_size * self._args.n_samples_per_prompt
            samples = supervised_samples(self._task, self._rng, count)
            data = self._own_share(samples)
            logged = self._trainer.imitate(data, self._trainer.micro_batches(data))
            advance(f"loss {logged['loss']:.3f}")
        self._trainer.reset_optimizer(lr=self._args.lr)
        return True

    def _reinforce(self, display: ProgressDisplay, log: MetricsLog | None, *, first_step: int) -> None:
        advance = display.start_phase("GRPO", total=self._args.num_rollout, completed=first_step)
        for step in range(first_step, self._args.num_rollout):
            if self._stop_agreed():
                self._save(next_step=step)
                return
            row = self._step(step)
            if log is not None:
                log.write(row)
            advance(f"reward {row['rollout/reward']:.3f}")
            if (step + 1) % self._args.save_interval == 0 or step + 1 == self._args.num_rollout:
                self._save(next_step=step + 1)

    def _step(self, step: int) -> Row:
        """Sample and grade one rollout, and train on it."""
        self._phase_seconds = {}
        evaluated = self._evaluate(step)
        problems = [self._task.sample(self._rng) for _ in range(self._args.rollout_batch_size)]
        with self._timed("rollout"):
            completions = self._ranks.broadcast(self._generate(problems))
        samples, rewards = grade_groups(problems, completions, num_samples=self._args.n_samples_per_prompt)
        data = self._own_share(samples)
        # The version of the trainer's weights is the number of rollouts that it was trained on.
        data["train_weight_version"] = step
        batches = self._trainer.micro_batches(data)
        data["rollout_log_probs"] = self._trainer.own_tokens(data["engine_log_probs"], batches)
        # A full policy loss with the engine's policy as old policy needs no scoring pass; slime and Miles skip it too.
        if not (self._args.loss_type == "custom_loss" and self._args.use_rollout_logprobs):
            with self._timed("score"):
                data["log_probs"] = self._trainer.score(batches)
        if self._args.rollout_data_postprocess_path is not None:
            load_function(self._args.rollout_data_postprocess_path)(self._args, step, data)
        with self._timed("train"):
            per_step = len(batches) // self._args.num_steps_per_rollout
            logged = [
                self._trainer.train(data, batches[start : start + per_step])
                for start in range(0, len(batches), per_step)
            ]
        if (step + 1) % self._args.update_weights_interval == 0:
            with self._timed("update_weights"):
                self._update_weights(version=step + 1)
        return {
            "step": step,
            "rollout/reward": rewards.mean().item(),
            "rollout/solved": (rewards == 1).float().mean().item(),
            "rollout/weight_version_lag": step - completions[0].weight_version,
            **evaluated,
            **{f"train/{name}": sum(values[name] for values in logged) / len(logged) for name in logged[0]},
            **{f"perf/{name}_seconds": seconds for name, seconds in self._phase_seconds.items()},
        }

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the reward of the trainer's own policy before this step, at the evaluation interval and at the end."""
        is_last = step + 1 == self._args.num_rollout
        if self._evaluation is None or not (step % self._args.eval_interval == 0 or is_last):
            return {}
        with self._timed("evaluation"):
            return {"eval/reward": self._evaluation.reward(self._trainer)}

    def _generate(self, problems: list[Problem] | list[Question]) -> list[Completion] | None:
        if self._engine is None:
            return None
        prompts = [problem.prompt_ids for problem in problems for _ in range(self._args.n_samples_per_prompt)]
        return self._engine.generate(
            prompts,
            max_new_tokens=self._task.response_length,
            temperature=self._args.rollout_temperature,
            top_p=self._args.rollout_top_p,
        )

    def _own_share(self, samples: list[Sample]) -> dict[str, Any]:
        """Return the rollout data of this data-parallel rank."""
        return own_share(
            self._task,
            samples,
            dp_rank=self._ranks.dp_rank,
            dp_size=self._ranks.dp_size,
            padded=self._args.qkv_format == "bshd",
            device=self._ranks.device,
        )

    def _update_weights(self, *, version: int) -> None:
        if self._engine is not None:
            self._engine.update_weights(self._trainer.export_weights(), version=version)

    def _stop_agreed(self) -> bool:
        """Return True if any rank was asked to stop; equal on all ranks."""
        requested = torch.tensor(self._stop.requested, dtype=torch.int)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX, group=self._ranks.control_group)
        return bool(requested)

    def _save(self, *, next_step: int) -> None:
        if self._is_main:
            save_checkpoint(self._checkpoint, trainer=self._trainer, rng=self._rng, next_step=next_step)

    def _report(self, console: Console) -> None:
        rows = read_metrics(self._metrics)
        if not rows:
            console.print("stopped before the first step: nothing to show")
            return
        plot(rows, self._figure)
        console.print(summary_table(rows))
        console.print(f"metrics {self._metrics}\nplot    {self._figure}", highlight=False)
        if len(rows) < self._args.num_rollout and self._checkpoint.exists():
            console.print(f"stopped after {len(rows)} of {self._args.num_rollout} steps: --resume continues")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._phase_seconds[name] = time.perf_counter() - start
