# SPDX-License-Identifier: Apache-2.0
"""Trains all runs of a group at once: GRPO with PPO's clip, and mis_ext's correction for each run.

Shapes as in ``policy.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

import mis_ext

from .engines import Engine, EngineSpec, Sampled
from .group import Group, Method
from .mixture import differ
from .policy import Scores, Shape, Weights, new_weights, score
from .task import PROMPT_LENGTH, Problems, grade

Row = dict[str, Any]
# A forward and backward pass keeps about 16 KB per token, with 8 experts 31 KB.
TOKENS_AT_ONCE = 1_000_000
DUMPED_SEQUENCES = 96
EVALUATED_PROBLEMS = 256


@dataclass(frozen=True)
class Choices:
    """What the engine chose and the trainer repeats: see ``Group.replays_routing`` and ``Group.scoring``.

    Attributes:
        experts: ``[R, B, S - 1, N, K]``; None: the trainer's own.
        kept: ``[R, B, L, V]``; None: all tokens.
    """

    experts: Tensor | None = None
    kept: Tensor | None = None

    def part(self, part: slice) -> Choices:
        """Those of a part of the batch."""
        return Choices(*(None if tensor is None else tensor[:, part] for tensor in (self.experts, self.kept)))


class Trainer:
    """The weights of all runs ``[R, ...]``, in float32, and their optimizer."""

    def __init__(self, shape: Shape, weights: Weights, *, learning_rate: float, temperature: float) -> None:
        self._shape, self._temperature = shape, temperature
        self.weights = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        self._optimizer = torch.optim.Adam(self.weights.values(), lr=learning_rate, betas=(0.9, 0.98))

    def score(self, ids_RBS: Tensor, choices: Choices | None = None) -> Scores:
        """Log-probs of the responses, with the trainer's own choices or with the engine's."""
        choices = choices or Choices()
        return score(
            self._shape,
            self.weights,
            ids_RBS,
            PROMPT_LENGTH,
            temperature=self._temperature,
            replayed=choices.experts,
            kept=choices.kept,
        )

    def step(self, losses_R: Iterable[Tensor]) -> Tensor:
        """One optimizer step of every run for the sum of losses ``[R]``, each of which is let go after its gradient.

        Returns the gradient norms ``[R]``, of which at most 1 is used.
        """
        self._optimizer.zero_grad()
        for loss_R in losses_R:
            loss_R.sum().backward()
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        norm_R = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
        scale_R = (1 / (norm_R + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient *= scale_R.view(-1, *[1] * (gradient.dim() - 1))
        self._optimizer.step()
        return norm_R

    def state(self) -> dict[str, Any]:
        """Weights and optimizer."""
        return {"weights": self.weights, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])


class WarmUp:
    """Supervised steps before the first rollout, one by one; its state can be saved between them.

    Attributes:
        num_steps_done: So far.
    """

    def __init__(
        self,
        shape: Shape,
        seeds: tuple[int, ...],
        num_steps: int,
        length: int,
        temperature: float,
        device: torch.device,
    ) -> None:
        self.num_steps_done = 0
        self._num_steps, self._length, self._device = num_steps, length, device
        weights = new_weights(shape, list(seeds), device)
        self._trainer = Trainer(shape, weights, learning_rate=3e-3, temperature=temperature)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return self.num_steps_done >= self._num_steps

    @property
    def weights(self) -> Weights:
        """``[seeds, ...]``, as they are now."""
        return {name: weight.detach() for name, weight in self._trainer.weights.items()}

    def step(self) -> None:
        """One of them."""
        drawn = [Problems.draw(256, self._length, generator) for generator in self._generators]
        ids = torch.stack([torch.cat([problems.prompts_BP, problems.solve()], 1) for problems in drawn])
        self._trainer.step([-self._trainer.score(ids.to(self._device)).logprobs.mean((1, 2))])
        self.num_steps_done += 1

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs to go on with the next step."""
        generators = [generator.get_state() for generator in self._generators]
        return {"num_steps_done": self.num_steps_done, "trainer": self._trainer.state(), "generators": generators}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, unless another group that starts alike has come further."""
        if state["num_steps_done"] <= self.num_steps_done:
            return
        self.num_steps_done = state["num_steps_done"]
        self._trainer.restore(state["trainer"])
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved.cpu())


# Groups that start alike share it.
_warm_up_of = lru_cache(maxsize=1)(WarmUp)


class Training:
    """The training of a group, step by step; its state can be saved between steps.

    Attributes:
        num_steps_done: Rollouts trained on.
        sampling_seconds: That the engine took for all of them.
        record: What else results say of where they come from.

    Raises:
        ValueError: A method has what only runs of a pretrained model read.
    """

    record: ClassVar[dict[str, str]] = {}

    def __init__(self, group: Group, engine: Engine, device: torch.device) -> None:
        for method in group.methods:
            if method != Method(name=method.name, keys=method.keys, like=method.like):
                raise ValueError(f"{group.name}: {method.name}: more than keys is for a pretrained model: {method}")
        self.group, self.device, self._engine = group, device, engine
        self.num_steps_done = 0
        self.sampling_seconds = 0.0
        self._warm_up = _warm_up_of(
            group.shape, group.seeds, group.warmup_steps, group.response_length, group.temperature, device
        )
        self._history: deque[Weights] = deque(maxlen=group.staleness + 1)
        self._rejecters = _Rejecters(group, device)
        self._evaluator = EngineSpec(dtype="float32").create(group.shape, batch=0, length=0, device=device)
        self._problems = {seed: torch.Generator().manual_seed(10_000 + seed) for seed in group.seeds}

    @property
    def is_warm(self) -> bool:
        """Whether the next step is a rollout."""
        return "_trainer" in self.__dict__ or self._warm_up.is_done

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to save."""
        return self.num_steps_done > 0 or self._warm_up.num_steps_done > 0

    def warm_up(self) -> None:
        """One of the supervised steps, which :meth:`step` makes up for if they are left out."""
        self._warm_up.step()

    @cached_property
    def _trainer(self) -> Trainer:
        while not self._warm_up.is_done:
            self._warm_up.step()
        return self._trainer_of(self._warm_up.weights)

    def _trainer_of(self, first: Weights) -> Trainer:
        """Every run begins with the weights of its seed."""
        group = self.group
        seed_R = torch.tensor([group.seeds.index(seed) for _, seed in group.runs], device=self.device)
        weights = {name: weight[seed_R] for name, weight in first.items()}
        return Trainer(group.shape, weights, learning_rate=group.learning_rate, temperature=group.temperature)

    def step(self, keep: Callable[[str, dict[str, Any]], None]) -> list[Row]:
        """One rollout and its optimizer steps; a row per run. ``keep`` takes log-probs for later analysis, by name."""
        group, trainer, step = self.group, self._trainer, self.num_steps_done
        self._history.append({name: weight.detach().clone() for name, weight in trainer.weights.items()})
        held = self._history[0] if step >= group.branch_step else self._history[-1]
        rollout, seconds = _sample(group, self._engine, held, self._problems, step, self.device)
        self.sampling_seconds += seconds
        proximal, flips = _score(trainer, rollout)
        if step in group.dump_steps:
            keep(f"step{step}", _dump(group, rollout, proximal, flips))
        numbers = _mismatch(proximal, rollout.behavior, rollout.mask)
        if flips is not None:
            numbers["routing_flips"] = (flips & rollout.mask).sum((1, 2)) / rollout.mask.sum((1, 2))
        numbers |= {"reward": rollout.reward.mean(1), "solved": (rollout.reward == 1).float().mean(1)}
        numbers |= _update(group, trainer, rollout, proximal, self._rejecters, corrects=step >= group.branch_step)
        if step % group.eval_interval == 0 or step + 1 == group.num_steps:
            numbers["own_reward"] = _evaluate(group, self._evaluator, trainer.weights, self.device)
        self.num_steps_done += 1
        return _rows(group, step, numbers)

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs to go on with the next step."""
        if not self.is_warm:
            return {"warm_up": self._warm_up.state()}
        return {
            "num_steps_done": self.num_steps_done,
            "sampling_seconds": self.sampling_seconds,
            "trainer": self._trainer.state(),
            "history": list(self._history),
            "rejecters": self._rejecters.generator.get_state(),
            "problems": {seed: generator.get_state() for seed, generator in self._problems.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same group. An engine's own random numbers begin anew."""
        if "warm_up" in state:
            self._warm_up.restore(state["warm_up"])
            return
        # Of weights that are about to be replaced: nothing is warmed up twice.
        self._trainer = self._trainer_of(self._warm_up.weights)
        self.num_steps_done, self.sampling_seconds = state["num_steps_done"], state["sampling_seconds"]
        self._trainer.restore(state["trainer"])
        self._history.extend(state["history"])
        self._rejecters.generator.set_state(state["rejecters"].cpu())
        for seed, generator in self._problems.items():
            generator.set_state(state["problems"][seed].cpu())


@dataclass(frozen=True)
class _Rollout:
    """``ids`` ``[R, B, S]``, ``behavior`` and ``mask`` ``[R, B, L]``, ``reward`` and ``advantage`` ``[R, B]``.

    ``experts`` ``[R, B, S - 1, N, K]`` are the engine's, where it tells; ``choices`` what the trainer is to repeat.
    """

    ids: Tensor
    behavior: Tensor
    mask: Tensor
    reward: Tensor
    advantage: Tensor
    experts: Tensor | None
    choices: Choices


def _sample(
    group: Group,
    engine: Engine,
    weights: Weights,
    generators: Mapping[int, torch.Generator],
    step: int,
    device: torch.device,
) -> tuple[_Rollout, float]:
    """A rollout, and how many seconds the engine sampled."""
    drawn = {
        seed: Problems.draw(group.num_prompts, group.response_length, generator).repeat(group.samples_per_prompt)
        for seed, generator in generators.items()
    }
    prompts = torch.stack([drawn[seed].prompts_BP for _, seed in group.runs]).to(device)
    mask = torch.stack([drawn[seed].mask_BL for _, seed in group.runs]).to(device)
    draw_seeds = [1_000_000 * (seed + 1) + step for _, seed in group.runs]
    start = time.perf_counter()
    sampled = engine.sample(
        weights,
        prompts,
        group.response_length,
        temperature=group.temperature,
        draw_seeds=draw_seeds,
        top_p=group.top_p,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    if group.replays_routing and sampled.experts is None:
        raise ValueError("replays_routing: this engine does not tell its experts, or the model has none")
    reward = grade(prompts, sampled.ids, mask)
    grouped = reward.view(len(group.runs), group.num_prompts, group.samples_per_prompt)
    advantage = (grouped - grouped.mean(-1, keepdim=True)) / (grouped.std(-1, keepdim=True) + 1e-4)
    ids, (behavior, kept) = torch.cat([prompts, sampled.ids], -1), _behavior(group, sampled)
    choices = Choices(sampled.experts if group.replays_routing else None, kept)
    return _Rollout(ids, behavior, mask, reward, advantage.flatten(1), sampled.experts, choices), seconds


def _behavior(group: Group, sampled: Sampled) -> tuple[Tensor, Tensor | None]:
    """The engine's log-probs as the group scores, and the tokens that the trainer scores over."""
    if group.scoring == "reported":
        return sampled.logprobs, None
    if sampled.log_mass is None:
        raise ValueError(f"scoring {group.scoring} needs top_p below 1, got {group.top_p}")
    return sampled.logprobs - sampled.log_mass, sampled.kept if group.scoring == "kept" else None


@torch.no_grad()
def _score(trainer: Trainer, rollout: _Rollout) -> tuple[Tensor, Tensor | None]:
    """``[R, B, L]``: log-probs, and whether the trainer's routers choose others than the engine's for a token."""
    parts = _parts(rollout.ids)
    scores = [trainer.score(rollout.ids[:, part], rollout.choices.part(part)) for part in parts]
    proximal = torch.cat([piece.logprobs for piece in scores], 1)
    if rollout.experts is None:
        return proximal, None
    own = torch.cat([piece.experts for piece in scores if piece.experts is not None], 1)
    # A token's log-prob comes from the position before it.
    return proximal, differ(own, rollout.experts)[..., PROMPT_LENGTH - 1 :]


def _update(
    group: Group, trainer: Trainer, rollout: _Rollout, proximal: Tensor, rejecters: _Rejecters, *, corrects: bool
) -> dict[str, Tensor]:
    """The optimizer steps of one rollout."""
    num_samples = rollout.mask.shape[1]
    norms, kept, kept_sequences = [], [], []
    per_update = num_samples // group.updates
    for start in range(0, num_samples, per_update):
        own = slice(start, start + per_update)
        mask = rollout.mask[:, own]
        weights, keep = torch.ones_like(proximal[:, own]), mask.clone()
        if corrects:
            weights, keep = _correct(group, proximal[:, own], rollout.behavior[:, own], mask, rejecters)
        data = rollout.ids[:, own], proximal[:, own], rollout.advantage[:, own], weights, keep, mask
        choices = rollout.choices.part(own)
        losses_R = (
            _loss(trainer, *(tensor[:, part] for tensor in data), choices.part(part)) / per_update
            for part in _parts(data[0])
        )
        norms.append(trainer.step(losses_R))
        kept.append(keep.sum((1, 2)) / mask.sum((1, 2)))
        kept_sequences.append(keep.any(-1).float().mean(1))
    return {
        "grad_norm": torch.stack(norms).mean(0),
        "kept_tokens": torch.stack(kept).mean(0),
        "kept_sequences": torch.stack(kept_sequences).mean(0),
    }


def _loss(
    trainer: Trainer,
    ids: Tensor,
    proximal: Tensor,
    advantage: Tensor,
    weights: Tensor,
    keep: Tensor,
    mask: Tensor,
    choices: Choices,
) -> Tensor:
    """``[R]``: PPO's clipped loss, summed over sequences.

    The hosts' reduction: every sequence is divided by its original number of tokens, rejected or not.
    """
    ratio = (trainer.score(ids, choices).logprobs - proximal).exp()
    loss = torch.maximum(-ratio * advantage[..., None], -ratio.clamp(0.8, 1.28) * advantage[..., None])
    return (torch.where(keep, loss * weights, 0.0).sum(-1) / mask.sum(-1)).sum(1)


def _parts(ids: Tensor) -> list[slice]:
    """Parts of the batch ``[R, B, S]`` that fit into memory."""
    size = max(TOKENS_AT_ONCE // (ids.shape[0] * ids.shape[2]), 1)
    return [slice(start, start + size) for start in range(0, ids.shape[1], size)]


def _correct(
    group: Group, proximal: Tensor, behavior: Tensor, mask: Tensor, rejecters: _Rejecters
) -> tuple[Tensor, Tensor]:
    """Weights and keep mask ``[R, B, L]`` of all runs."""
    weights, keep = torch.ones_like(proximal), mask.clone()
    for run, (method, _) in enumerate(group.runs):
        if method.config is not None:
            corrected = mis_ext.correct_padded(
                method.config,
                proximal_logprobs=proximal[run],
                behavior_logprobs=behavior[run],
                response_mask=mask[run],
            )
            weights[run], keep[run] = corrected.weights, corrected.keep_mask
    rejecters.reject(keep, mask)
    return weights, keep


class _Rejecters:
    """Random rejection at the rate of another run."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        index = {(method.name, seed): run for run, (method, seed) in enumerate(group.runs)}
        self._of_run = {
            run: index[method.like, seed] for run, (method, seed) in enumerate(group.runs) if method.like is not None
        }

    def reject(self, keep: Tensor, mask: Tensor) -> None:
        """Change ``keep`` ``[R, B, L]`` of the controls."""
        for run, model in self._of_run.items():
            alive = keep[model].any(-1)
            order = torch.rand(alive.shape, generator=self.generator, device=keep.device).argsort()
            chosen = torch.zeros_like(alive)
            chosen[order] = torch.arange(len(order), device=keep.device) < alive.sum()
            share = keep[model].sum() / (mask[model] & alive[:, None]).sum().clamp(min=1)
            tokens = torch.rand(mask[run].shape, generator=self.generator, device=keep.device) < share
            keep[run] = mask[run] & chosen[:, None] & tokens


def _mismatch(proximal: Tensor, behavior: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Numbers of each run ``[R]`` over all its tokens."""
    d = torch.where(mask, proximal - behavior, 0.0)
    count = mask.sum((1, 2))
    sums = d.sum(-1)
    return {
        "k3": (d.exp() - 1 - d).sum((1, 2)) / count,
        "abs_diff": d.abs().sum((1, 2)) / count,
        "above_2": (d > 0.6931).sum((1, 2)) / count,
        "below_half": (d < -0.6931).sum((1, 2)) / count,
        "ratio_max": d.amax((1, 2)).exp(),
        "ess_sequence": sums.softmax(1).square().sum(1).reciprocal() / sums.shape[1],
        "entropy": -torch.where(mask, proximal, 0.0).sum((1, 2)) / count,
    }


def _evaluate(group: Group, evaluator: Engine, weights: Weights, device: torch.device) -> Tensor:
    """Mean reward ``[R]`` of the trainer's own policy in float32, on the same problems every time."""
    problems = Problems.draw(EVALUATED_PROBLEMS, group.response_length, torch.Generator().manual_seed(99))
    prompts = problems.prompts_BP.to(device).expand(len(group.runs), -1, -1)
    seeds = [77] * len(group.runs)
    sampled = evaluator.sample(weights, prompts, group.response_length, temperature=group.temperature, draw_seeds=seeds)
    return grade(prompts, sampled.ids, problems.mask_BL.to(device)).mean(1)


def _dump(group: Group, rollout: _Rollout, proximal: Tensor, flips: Tensor | None) -> dict[str, Any]:
    runs = [run for run, (method, _) in enumerate(group.runs) if method is group.methods[0]]
    tensors = {
        "behavior": rollout.behavior.half(),
        "log_ratio": (proximal - rollout.behavior).half(),
        "mask": rollout.mask,
    } | ({} if flips is None else {"flips": flips})
    return {name: tensor[runs, :DUMPED_SEQUENCES].cpu().numpy() for name, tensor in tensors.items()}


def _rows(group: Group, step: int, numbers: Mapping[str, Tensor]) -> list[Row]:
    table = torch.stack([numbers[name].double() for name in numbers]).cpu()
    return [
        {"group": group.name, "method": method.name, "seed": seed, "step": step}
        | {name: float(f"{value:.4g}") for name, value in zip(numbers, table[:, run].tolist(), strict=True)}
        for run, (method, seed) in enumerate(group.runs)
    ]
