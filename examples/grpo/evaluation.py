# SPDX-License-Identifier: Apache-2.0
"""Evaluate the trainer's own policy on held-out questions.

The reward of the rollout is that of the engine, whose policy differs with another cache, other kernels, or stale
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from .distributed import Ranks
from .questions import Question, QuestionTask
from .trainer import Trainer

SEED = 99


class Evaluation:
    """Asks the same held-out questions at every call, split over data-parallel ranks.

    Args:
        task: Source of the questions.
        ranks: The ranks of this process.
        num_questions: Number of questions over all ranks.
        batch_size: Questions per rank and batch.
        temperature: Divides the logits. 0 takes the most probable token.
        end_token: Token that ends a response.
    """

    def __init__(
        self,
        task: QuestionTask,
        ranks: Ranks,
        *,
        num_questions: int,
        batch_size: int,
        temperature: float,
        end_token: int,
    ) -> None:
        rng = Random(SEED)
        questions = [task.sample(rng, held_out=True) for _ in range(num_questions)]
        self._questions = questions[ranks.dp_rank :: ranks.dp_size]
        # Independent of the number of ranks and the batch size, and equal at every call.
        chance_QL = torch.rand(num_questions, task.response_length, generator=torch.Generator().manual_seed(SEED))
        self._chance_QL = chance_QL[ranks.dp_rank :: ranks.dp_size].to(ranks.device)
        self._ranks, self._num_questions, self._batch_size = ranks, num_questions, batch_size
        self._temperature, self._end_token = temperature, end_token

    def reward(self, trainer: Trainer) -> float:
        """Return the mean reward of one response per question, equal on every rank."""
        total = torch.zeros(1, device=self._ranks.device)
        for start in range(0, len(self._questions), self._batch_size):
            batch = slice(start, start + self._batch_size)
            asked = self._questions[batch]
            total += sum(map(Question.grade, asked, self._answers(trainer, asked, self._chance_QL[batch])))
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total) / self._num_questions

    def _answers(self, trainer: Trainer, asked: Sequence[Question], chance_BL: Tensor) -> list[list[int]]:
        """Generate token by token with passes over the whole sequence: the trainer's computation, without a cache."""
        sequences = [list(question.prompt_ids) for question in asked]
        unfinished = list(range(len(asked)))
        for chance_B in chance_BL.T:
            tokens = self._next_tokens(trainer, [sequences[index] for index in unfinished], chance_B[unfinished])
            for index, token in zip(unfinished, tokens, strict=True):
                sequences[index].append(token)
            unfinished = [index for index in unfinished if sequences[index][-1] != self._end_token]
            if not unfinished:
                break
        return [row[len(question.prompt_ids) :] for row, question in zip(sequences, asked, strict=True)]

    def _next_tokens(self, trainer: Trainer, sequences: list[list[int]], chance_B: Tensor) -> list[int]:
        """Each token comes from the context-parallel rank with the end of its sequence."""
        logits_RV, held = trainer.next_logits(sequences)
        token_B = torch.zeros(len(sequences), dtype=torch.long, device=self._ranks.device)
        if held:
            token_B[held] = _draw(logits_RV, chance_B[held], self._temperature)
        dist.all_reduce(token_B, group=parallel_state.get_context_parallel_group())
        return token_B.tolist()


def _draw(logits_RV: Tensor, chance_R: Tensor, temperature: float) -> Tensor:
    """Take the token at which the cumulative probability exceeds a number between 0 and 1."""
    if temperature == 0:
        return logits_RV.argmax(-1)
    reached_RV = (logits_RV.double() / temperature).softmax(-1).cumsum(-1)
    place_R = torch.searchsorted(reached_RV, chance_R.double()[:, None] * reached_RV[:, -1:], right=True).squeeze(-1)
    return place_R.clamp(max=logits_RV.shape[-1] - 1)
