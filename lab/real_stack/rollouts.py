# SPDX-License-Identifier: Apache-2.0
"""Recorded rollouts for ``slime_gpu.py recorded``: easy sums, sampled by another engine than the trainer.

    python lab/real_stack/rollouts.py HOST MODEL FOLDER [--number 4] [--prompts 16] [--tokens N ...]

HOST is slime or miles. transformers samples from MODEL (``lab/hosts/slime_gpu/model.py`` writes one) with weights
rounded to e4m3, one scale per row: the mismatch is that of an engine with FP8 weights. The host's own ``Sample`` and
writer make the files, so the host must be on the path. Miles reads slime's files too.

With ``--tokens`` nothing is sampled, because long responses would take hours. The responses are one sum after the
other, until a rollout has so many tokens, scored by the same engine. Half of the rewards are 1. Each number makes a
rollout, whose samples are the first parts of those of a larger one; ``slime_gpu.py memory`` trains on them.
"""

import argparse
import importlib
import json
import random
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/questions"))
from arithmetic import draw_task, is_right

SAMPLES_PER_PROMPT, MAX_TOKENS = 8, 32
SCORED_AT_ONCE = 1024
LARGEST_E4M3 = 448.0


def round_to_e4m3(weight: Tensor) -> Tensor:
    """The nearest numbers of 8 bits, with one scale per row."""
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST_E4M3
    rounded = (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.to(torch.bfloat16).to(weight.dtype)


def engine_of(model: Path) -> Any:
    """The model in float32, all products but the embedding rounded; on a GPU where there is one."""
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine.to("cuda" if torch.cuda.is_available() else "cpu")
    for name, parameter in engine.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.data.copy_(round_to_e4m3(parameter.data))
    return engine


@torch.no_grad()
def sampled(engine: Any, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """``[B, MAX_TOKENS]`` each: tokens drawn at temperature 1, and their log-probs."""
    width = max(map(len, prompts))
    token_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=engine.device)
    mask_BT = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=engine.device
    )
    cache, tokens, log_probs = DynamicCache(config=engine.config), [], []
    for _ in tqdm(range(MAX_TOKENS), desc="tokens", leave=False):
        position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -token_BT.shape[1] :]
        output = engine(token_BT, mask_BT, position_BT, cache, logits_to_keep=1)
        log_prob_BV = output.logits[:, -1].float().log_softmax(-1)
        token_BT = log_prob_BV.exp().multinomial(1)
        tokens.append(token_BT)
        log_probs.append(log_prob_BV.gather(1, token_BT))
        mask_BT = torch.cat([mask_BT, torch.ones_like(token_BT)], 1)
    return torch.cat(tokens, 1).cpu(), torch.cat(log_probs, 1).cpu()


def rollout(
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    generator: random.Random,
    rollout_id: int,
    *,
    num_prompts: int,
    sample_type: Any,
) -> list[Any]:
    """Draw the questions of one rollout, and sample responses: each a ``Sample`` of the framework."""
    tasks = [draw_task(generator) for _ in range(num_prompts)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question, _ in tasks
        for _ in range(SAMPLES_PER_PROMPT)
    ]
    token_BT, log_prob_BT = sampled(engine, prompts)
    samples = []
    for index, prompt in enumerate(prompts):
        question, label = tasks[index // SAMPLES_PER_PROMPT]
        row = token_BT[index].tolist()
        ends = tokenizer.eos_token_id in row
        length = row.index(tokenizer.eos_token_id) + 1 if ends else MAX_TOKENS
        text = tokenizer.decode(row[:length], skip_special_tokens=True)
        samples.append(
            sample_type(
                group_index=rollout_id * num_prompts + index // SAMPLES_PER_PROMPT,
                index=rollout_id * len(prompts) + index,
                prompt=question,
                tokens=prompt + row[:length],
                response=text,
                response_length=length,
                label=label,
                reward=float(is_right(text, label)),
                rollout_log_probs=log_prob_BT[index, :length].tolist(),
                loss_mask=[1] * length,
                status=sample_type.Status.COMPLETED if ends else sample_type.Status.TRUNCATED,
            )
        )
    return samples


@torch.no_grad()
def written(
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    generator: random.Random,
    *,
    num_tokens: int,
    num_prompts: int,
    sample_type: Any,
) -> list[Any]:
    """Samples of ``num_tokens`` in all that no engine sampled: sums, with the log-probs of the engine."""
    samples = []
    count = num_prompts * SAMPLES_PER_PROMPT
    for index in tqdm(range(count), desc="samples", leave=False):
        if index % SAMPLES_PER_PROMPT == 0:
            question, label = draw_task(generator)
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        tokens = list(prompt)
        while len(tokens) < num_tokens // count:
            tokens += tokenizer.encode("{} {}\n".format(*draw_task(generator)), add_special_tokens=False)
        token_T = torch.tensor(tokens[: num_tokens // count], device=engine.device)
        # The state before a token predicts it.
        hidden_TH = engine.model(token_T[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        response_T = token_T[len(prompt) :]
        log_prob_T = torch.cat(
            [
                engine.lm_head(rows).float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
                for rows, tokens in zip(hidden_TH.split(SCORED_AT_ONCE), response_T.split(SCORED_AT_ONCE), strict=True)
            ]
        )
        samples.append(
            sample_type(
                group_index=index // SAMPLES_PER_PROMPT,
                index=index,
                prompt=question,
                tokens=token_T.tolist(),
                response_length=len(response_T),
                label=label,
                reward=float(index % 2),
                rollout_log_probs=log_prob_T.tolist(),
                loss_mask=[1] * len(response_T),
                status=sample_type.Status.TRUNCATED,
            )
        )
    return samples


def first_part(sample: Any, num_tokens: int, *, rollout_id: int, count: int) -> Any:
    """The same sample, which ended earlier, in a rollout of ``count``."""
    dropped = len(sample.tokens) - num_tokens
    kept = sample.response_length - dropped
    return replace(
        sample,
        group_index=sample.group_index + rollout_id * count // SAMPLES_PER_PROMPT,
        index=sample.index + rollout_id * count,
        tokens=sample.tokens[:num_tokens],
        response_length=kept,
        rollout_log_probs=sample.rollout_log_probs[:kept],
        loss_mask=sample.loss_mask[:kept],
    )


def write(host: str, folder: Path, samples: list[Any], rollout_id: int) -> None:
    """Write one rollout with the framework's own function."""
    path = str(folder / "{rollout_id}.pt")
    if host == "slime":
        module = importlib.import_module("slime.observability.rollout_data_utils")
        module.save_debug_rollout_data(path, samples, rollout_id=rollout_id, evaluation=False)
    else:
        module = importlib.import_module("miles.ray.rollout.debug_data")
        flags = Namespace(save_debug_rollout_data=path, save_debug_trajectory_data=None)
        module.save_debug_rollout_data(flags, samples, rollout_id, evaluation=False)


def main() -> None:
    """Write the files that ``--load-debug-rollout-data FOLDER/{rollout_id}.pt`` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=("slime", "miles"))
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=4, help="of rollouts")
    parser.add_argument("--prompts", type=int, default=16, help="of a rollout; as slime's --rollout-batch-size")
    parser.add_argument("--tokens", type=int, nargs="+", help="of each rollout, in all: nothing is sampled")
    args = parser.parse_args()
    sample_type = importlib.import_module(f"{args.host}.utils.types").Sample
    torch.manual_seed(0)
    generator = random.Random(1)
    engine, tokenizer = engine_of(args.model), AutoTokenizer.from_pretrained(args.model)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.tokens is not None:
        torch.set_float32_matmul_precision("high")
        given = {"num_tokens": max(args.tokens), "num_prompts": args.prompts, "sample_type": sample_type}
        longest = written(engine, tokenizer, generator, **given)
        count = len(longest)
        for rollout_id, num_tokens in enumerate(args.tokens):
            parts = [first_part(one, num_tokens // count, rollout_id=rollout_id, count=count) for one in longest]
            write(args.host, args.folder, parts, rollout_id)
        (args.folder / "tokens.json").write_text(json.dumps([n // count * count for n in args.tokens]))
        return
    for rollout_id in tqdm(range(args.number), desc="rollouts"):
        samples = rollout(engine, tokenizer, generator, rollout_id, num_prompts=args.prompts, sample_type=sample_type)
        write(args.host, args.folder, samples, rollout_id)
        rewards = [sample.reward for sample in samples]
        print(f"rollout {rollout_id}: reward {sum(rewards) / len(rewards):.3f}")


if __name__ == "__main__":
    main()
