# SPDX-License-Identifier: Apache-2.0
"""The experiment: train and generate with some pieces aligned, compare every log-prob, and find the causes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import torch
from grpo.model import ModelShape
from grpo.pretrained import Pretrained

from mis_ext.onpolicy.audit.audit_report import AuditReport
from mis_ext.onpolicy.audit.log_probs import audit_logprobs
from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.recordings import describe

from .engines import ContinuousBatching, Engine
from .pieces import Piece, Pieces
from .policy import Policy
from .sglang_arm import DeterministicSGLang, SGLang
from .static_context import StaticContext
from .trainer import Sample, Trainer

EngineName = Literal["transformers", "megatron", "sglang", "sglang-deterministic"]
PIECES: dict[EngineName, Pieces] = {
    "transformers": ContinuousBatching.pieces,
    "megatron": StaticContext.pieces,
    "sglang": SGLang.pieces,
    "sglang-deterministic": DeterministicSGLang.pieces,
}


def pieces_of(engine: EngineName, cache: str | None) -> Pieces:
    """The pieces that matter with this engine, which may have an 8-bit cache."""
    return PIECES[engine] - (frozenset() if cache is not None else {Piece.CACHE})


_ENGINES = {"transformers": ContinuousBatching, "sglang": SGLang, "sglang-deterministic": DeterministicSGLang}

SEED = 5
LEARNING_RATE = 1e-4
# Enough tokens to include one whose log-prob two formulas round differently: about one in seven.
RECORDED_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, prompts and lengths.

    Attributes:
        policy: The decoder.
        prompts: Token ids.
        max_new_tokens: Tokens of each response, unless an end token comes first.
        max_batch_tokens: Tokens of an engine's forward; longer prompts are split into chunks.
    """

    policy: Policy
    prompts: list[list[int]]
    max_new_tokens: int
    max_batch_tokens: int

    @classmethod
    def random(
        cls, *, shape: ModelShape, prompt_lengths: Sequence[int], max_new_tokens: int, max_batch_tokens: int
    ) -> Workload:
        """An untrained model, and prompts of random tokens."""
        random = Random(SEED)
        prompts = [[random.randrange(shape.vocab_size) for _ in range(length)] for length in prompt_lengths]
        return cls(
            policy=Policy.random(shape),
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            max_batch_tokens=max_batch_tokens,
        )

    def pretrained(self, found: Pretrained) -> Workload:
        """The same numbers of prompts and tokens for a pretrained model: short requests for long responses."""
        prompts = [
            found.tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Write a story in which the number {number} matters."}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            for number in range(2, len(self.prompts) + 2)
        ]
        longest = max(len(prompt) for prompt in prompts) + max(self.max_new_tokens, RECORDED_TOKENS)
        return replace(self, policy=Policy.pretrained(found, max_length=longest), prompts=prompts)


_SMALL = {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "max_length": 512}

WORKLOADS = {
    "short": Workload.random(
        shape=ModelShape(ffn_hidden_size=384, vocab_size=512, **_SMALL),
        prompt_lengths=(5, 33, 33, 90),
        max_new_tokens=8,
        max_batch_tokens=64,
    ),
    "cpu": Workload.random(
        shape=ModelShape(ffn_hidden_size=768, vocab_size=2048, **_SMALL),
        prompt_lengths=(5, 17, 33, 33, 130, 130),
        max_new_tokens=16,
        max_batch_tokens=64,
    ),
    "gpu": Workload.random(
        shape=ModelShape(
            num_layers=8,
            hidden_size=1024,
            ffn_hidden_size=3072,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=32768,
            max_length=2048,
        ),
        prompt_lengths=(5, 100, 300, 700) * 8,
        max_new_tokens=128,
        max_batch_tokens=2048,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cell of the experiment.

    Attributes:
        engine: The inference engine.
        dtype: Of both models.
        pieces: The aligned pieces.
        cache: The engine's 8-bit cache format, ``fp8_e4m3`` or ``fp8_e5m2``; None: the dtype of the model.

    Raises:
        ValueError: If the engine has no 8-bit cache.
    """

    engine: EngineName
    dtype: torch.dtype
    pieces: Pieces
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.cache is not None and Piece.CACHE not in PIECES[self.engine]:
            raise ValueError(f"cache={self.cache!r}: engine {self.engine} has no 8-bit cache")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rollout, audited before the trainer changes.

    Attributes:
        report: The audit of all its log-probs.
        k3: Mean of ``r - 1 - log r`` over all tokens, with r the ratio of trainer to engine; k3 in the report.
        generate_seconds: Time of the engine.
    """

    report: AuditReport
    k3: float
    generate_seconds: float


class Experiment:
    """A trainer and an engine in one setting."""

    def __init__(self, setting: Setting, workload: Workload, device: torch.device) -> None:
        self._setting, self._workload, self._device = setting, workload, device
        policy, pieces, dtype = workload.policy, setting.pieces, setting.dtype
        self._trainer = Trainer(
            policy, pieces, dtype=dtype, device=device, seed=SEED, lr=LEARNING_RATE, cache=setting.cache
        )
        self._engine: Engine
        if setting.engine == "megatron":
            self._engine = StaticContext(policy, pieces, dtype=dtype, device=device, seed=SEED)
        else:
            engine = _ENGINES[setting.engine]
            self._engine = engine(
                policy,
                pieces,
                dtype=dtype,
                seed=SEED,
                max_batch_tokens=workload.max_batch_tokens,
                cache=setting.cache,
            )
        self._samples: list[Sample] = []

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def steps(self, count: int, *, forgotten_sync: int | None = None) -> Iterator[Step]:
        """Audit a rollout with the initial weights, and one after each optimizer step.

        Args:
            count: Optimizer steps.
            forgotten_sync: The weight version that is not sent to the engine.
        """
        for version in range(count + 1):
            if version != forgotten_sync:
                self._engine.update_weights(self._trainer, version=version)
            started = _now()
            completions = self._engine.generate(self._workload.prompts, max_new_tokens=self._workload.max_new_tokens)
            generate_seconds = _now() - started
            self._samples = [
                Sample(prompt=prompt, response=completion.token_ids)
                for prompt, completion in zip(self._workload.prompts, completions, strict=True)
            ]
            with torch.no_grad():
                scored = self._trainer.log_probs(self._samples)
            trained = [log_probs.cpu() for log_probs in scored]
            sampled = [torch.tensor(completion.log_probs) for completion in completions]
            report = audit_logprobs(
                trained,
                sampled,
                engine_records=sampled,
                train_weight_version=version,
                rollout_weight_versions=[completion.weight_version for completion in completions],
            )
            log_ratio = torch.cat(trained).double() - torch.cat(sampled).double()
            k3 = float((log_ratio.expm1() - log_ratio).mean())
            yield Step(report=report, k3=k3, generate_seconds=generate_seconds)
            if version < count:
                self._trainer.backward(self._samples, _rewards(self._samples, self._workload))
                self._trainer.step()

    def culprit(self) -> str:
        """The cause of the first difference at equal weights: a module, the log-prob formula, or none."""
        prompt = max(self._workload.prompts, key=len)[: self._workload.max_batch_tokens + 6]
        self._engine.update_weights(self._trainer, version=-1)
        with self._engine.record() as recorder:
            (completion,) = self._engine.generate([prompt], max_new_tokens=RECORDED_TOKENS)
        sample = Sample(prompt=prompt, response=completion.token_ids)
        comparison = compare(
            self._trainer.record(sample),
            recorder.recording(),
            names=self._engine.names,
            # An engine computes logits only for tokens that need them.
            allow=("", "output_layer", *self._engine.unpaired),
        )
        if comparison.problems:
            raise RuntimeError(f"the recordings cannot be compared: {'; '.join(comparison.problems)}")
        first = comparison.first_divergent
        if first is not None:
            # A module that only forwards its input is not a cause. The model itself is not informative.
            culprits = [module.name for module in comparison.culprits if module.name != describe("")]
            return culprits[0] if first.inputs_equal is False and culprits else first.name
        with torch.no_grad():
            (scored,) = self._trainer.log_probs([sample])
        equal = torch.equal(scored.cpu(), torch.tensor(completion.log_probs))
        return "nobody" if equal else "logits equal, log-probs differ"


def training_seconds(
    pieces: Pieces, workload: Workload, *, dtype: torch.dtype, device: torch.device, repeats: int
) -> float:
    """Median seconds of a trainer's forward and backward over random responses, after one warm-up."""
    trainer = Trainer(workload.policy, pieces, dtype=dtype, device=device, seed=SEED, lr=LEARNING_RATE)
    random, size = Random(SEED), workload.policy.shape.vocab_size
    samples = [
        Sample(prompt=prompt, response=[random.randrange(size) for _ in range(workload.max_new_tokens)])
        for prompt in workload.prompts
    ]
    seconds = []
    for _ in range(repeats + 1):
        started = _now()
        trainer.backward(samples, _rewards(samples, workload))
        seconds.append(_now() - started)
    return statistics.median(seconds[1:])


def _rewards(samples: list[Sample], workload: Workload) -> list[float]:
    """Mean token id over vocabulary size, as reward. It is never equal for all, so the weights change."""
    return [sum(sample.response) / len(sample.response) / workload.policy.shape.vocab_size for sample in samples]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
