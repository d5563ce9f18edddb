# SPDX-License-Identifier: Apache-2.0
"""What goes into runs of other frameworks' own trainers (the lab of 16a265ec), and how their numbers must lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<end>", *map(str, range(30))]
EPOCHS, ROLLOUTS = 2, 3
TOLERANCE = 1e-5
"""Of gradient norms and of weights, relative: float32, six optimizer steps in which differences of 1e-7 grow."""
APART = 1e-2
"""How far the gradient norms of another correction must be in some step, at least."""

OPENRLHF_PLACES = (
    r"        self\.actor_loss_fn = PolicyLoss\(.*?\n        \)\n",
    r"        experience\.info\[\"ppo_kl\"\] = .*?\n",
)
"""Below which the lines for OpenRLHF stand in its ``ppo_actor.py``."""


def with_openrlhf_lines(text: str, *, page: str, keys: Path) -> str:
    """OpenRLHF's ``ppo_actor.py`` with the lines of its page in it."""
    (block,) = re.findall(r"^# OpenRLHF\n[^#]*?```text\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    lines = re.sub(r"^\+", "", block, flags=re.MULTILINE).replace("/path/on/every/node/mis.yaml", str(keys))
    first, last = lines.split("\n\n")
    for below, added in zip(OPENRLHF_PLACES, (first + "\n", last), strict=True):
        text, count = re.subn(below, lambda found, added=added: found[0] + added, text, flags=re.DOTALL)
        assert count == 1, below
    return text


def digest(weights: dict[str, Any]) -> dict[str, float]:
    """Of each tensor its sum and its norm, in float64."""
    found = {}
    for name, tensor in weights.items():
        tensor = tensor.detach().double()
        found[f"{name}: sum"], found[f"{name}: norm"] = float(tensor.sum()), float(tensor.norm())
    return found


def faults(runs: dict[str, Any], cases: dict[str, Any]) -> list[str]:
    """Where a run is not like the one that it must be like, or is like one that it must not be like."""
    found = []
    for name, case in cases.items():
        run, wanted = runs[name], case.get("like") or case.get("unlike")
        if "refused" in case:
            found += [] if case["refused"] in run.get("error", "") else [f"{name}: not refused"]
        elif "error" in run:
            found.append(f"{name}: {run['error']}")
        if "error" in run or "refused" in case:
            continue
        found += [f"{name}: no {key} in the log" for key in case.get("logs", ()) if key not in run["steps"]]
        if wanted is None:
            continue
        norms, weights = apart(run, runs[wanted])
        if "like" in case and not (norms < TOLERANCE and weights < case.get("weights", TOLERANCE)):
            found.append(f"{name}: gradient norms {norms:.1e}, weights {weights:.1e} from those of {wanted}")
        if "unlike" in case and not norms > APART:
            found.append(f"{name}: gradient norms only {norms:.1e} from those of {wanted}")
    return found


def apart(run: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Largest relative difference of the gradient norms, and of the norms of the weights' tensors."""
    norms = [(norms_of(run), norms_of(other))]
    weights = [([value], [other["weights"][name]]) for name, value in run["weights"].items()]
    return _relative(norms), _relative(weights)


def norms_of(run: dict[str, Any]) -> list[float]:
    """Its gradient norms, step after step."""
    (name,) = [name for name in run["steps"] if name.rpartition("/")[2] in ("grad_norm", "actor_grad_norm")]
    return run["steps"][name]


def _relative(pairs: list[tuple[list[float], list[float]]]) -> float:
    each = [abs(a - b) / max(1.0, abs(b)) for found, wanted in pairs for a, b in zip(found, wanted, strict=True)]
    # A NaN is no agreement.
    return max(each) if all(value == value for value in each) else float("inf")


def write_model(folder: Path, **other: Any) -> None:
    """A Llama of two layers with random weights, and a tokenizer with one token a word; ``other`` than by default."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(WORDS)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = LlamaConfig(**{**sizes, **heads, **ends, "initializer_range": 0.05, **other})
    LlamaForCausalLM(config).save_pretrained(folder)


def rollouts() -> list[dict[str, torch.Tensor]]:
    """Prompts of two tokens and responses of up to twelve, ``[8, 14]``; ``mask`` and ``behavior`` are ``[8, 12]``.

    The log-probs are near those of a model with nearly equal logits; a tenth is off by a factor of 3.3, up or down.
    """
    found = []
    for seed in range(ROLLOUTS):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 13, (8,), generator=draw)
        mask = torch.arange(12) < lengths[:, None]
        responses = torch.randint(2, len(WORDS), (8, 12), generator=draw).where(mask, 0)
        prompts = torch.randint(2, len(WORDS), (8, 2), generator=draw)
        kinds = torch.rand(8, 12, generator=draw)
        off = 1.2 * (kinds < 0.05).float() - 1.2 * (kinds > 0.95).float() + 0.05 * torch.randn(8, 12, generator=draw)
        behavior = (off - torch.tensor(float(len(WORDS))).log()).clamp(max=-1e-3)
        found.append(
            {
                "sequences": torch.cat([prompts, responses], 1),
                "attention_mask": torch.cat([torch.ones_like(prompts), mask.long()], 1),
                "mask": mask,
                "behavior": behavior.where(mask, 0.0),
                "advantages": torch.randn(8, generator=draw),
            }
        )
    return found
