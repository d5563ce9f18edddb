# SPDX-License-Identifier: Apache-2.0
"""The first gradient norm of a run, from definitions alone: one sample after the other, in float64, without mis_ext."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

CAP = 2.0


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """The computation of a run.

    Attributes:
        folder: Of its rollouts, below the inputs.
        over: Which trajectories count in the baseline of a prompt: ``all``, ``trained``, ``kept``; or ``batch``, where
            slime takes all samples for one prompt, because their number is not what it expects.
        leave_one_out: Whether a reward is compared only with the other rewards.
        band: Bounds of the geometric mean of a sample's ratios, or None.
        prompt_mean: Whether a prompt is a mean over its kept tokens, and the loss one over prompts.
    """

    folder: str
    over: str
    leave_one_out: bool = False
    band: tuple[float, float] | None = None
    prompt_mean: bool = False

    def first_gradient_norm(self, inputs: Path) -> float:
        """The gradient norm of PPO's loss, whose ratio is 1 in the first step, with token weights of at most `CAP`."""
        model = Qwen3ForCausalLM.from_pretrained(inputs / "model").double()
        samples = torch.load(inputs / self.folder / "0.pt", weights_only=False)["samples"]
        for sample in samples:
            self._score(sample, model)
        trajectories: dict[Any, list[Any]] = {}
        for place, sample in enumerate(samples):
            own = place if sample["rollout_id"] is None else f"rollout {sample['rollout_id']}"
            trajectories.setdefault((sample["group_index"], own), []).append(sample)
        loss = torch.zeros((), dtype=torch.float64)
        prompts = {prompt for prompt, _ in trajectories}
        alive = [prompt for prompt in prompts if any(s["kept"].any() for s in samples if s["group_index"] == prompt)]
        for (prompt, own), members in trajectories.items():
            advantage = self._advantage(trajectories, prompt, own, samples)
            divisor = len(trajectories) * max(1, sum(int(each["mask"].sum()) for each in members))
            if self.prompt_mean:
                of_prompt = [each for each in samples if each["group_index"] == prompt]
                divisor = len(alive) * sum(int(each["kept"].sum()) for each in of_prompt)
            for each in members:
                kept = each["kept"]
                loss = loss - advantage * (each["weight"][kept] * each["log_probs"][kept]).sum() / divisor
        loss.backward()
        return sum(float(each.grad.square().sum()) for each in model.parameters()) ** 0.5

    def _score(self, sample: dict[str, Any], model: Qwen3ForCausalLM) -> None:
        length = sample["response_length"]
        tokens = torch.tensor([sample["tokens"]])
        scores = model(tokens).logits[0, -length - 1 : -1].log_softmax(-1).gather(1, tokens[0, -length:, None])[:, 0]
        log_ratio = scores.detach() - torch.tensor(sample["rollout_log_probs"], dtype=torch.float64)
        mask = torch.tensor(sample["loss_mask"]).bool() & (not sample["remove_sample"])
        mean = float(log_ratio[mask].mean().exp()) if mask.any() else 1.0
        is_kept = self.band is None or self.band[0] <= mean <= self.band[1]
        sample |= {"log_probs": scores, "weight": log_ratio.exp().clamp(max=CAP), "mask": mask, "kept": mask & is_kept}

    def _advantage(self, trajectories: dict[Any, list[Any]], prompt: Any, own: Any, samples: list[Any]) -> float:
        (reward,) = {each["reward"] for each in trajectories[prompt, own]}
        counts = {"all": lambda _: True, "trained": lambda s: s["mask"].any(), "kept": lambda s: s["kept"].any()}
        if self.over == "batch":
            rewards = {place: each["reward"] for place, each in enumerate(samples)}
            others = [*rewards.values()]
        else:
            rewards = {
                key: members[0]["reward"]
                for key, members in trajectories.items()
                if key[0] == prompt and any(counts[self.over](each) for each in members)
            }
            others = [each for key, each in rewards.items() if not self.leave_one_out or key != (prompt, own)]
            if (prompt, own) not in rewards or not others:
                return 0.0
        deviation = torch.tensor([*rewards.values()], dtype=torch.float64).std()
        return float((reward - sum(others) / len(others)) / (deviation + 1e-6))
