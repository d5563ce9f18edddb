# SPDX-License-Identifier: Apache-2.0
"""A few steps of TRL's ``GRPOTrainer`` with mis_ext on a CPU, with a tiny random model and a bfloat16 engine.

    bash examples/trl/run.sh [yaml/mis.yaml]

``Engine`` replaces vLLM, and needs no GPU. With vLLM, set ``use_vllm=True`` and remove ``Engine``, ``rollout`` and the
last line of ``build``.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from mis_ext.hosts.trl import MisTrainer

WORDS = ["<pad>", "<end>", *map(str, range(30))]


class Trainer(MisTrainer, GRPOTrainer):
    """TRL's trainer with our correction, or with our loss."""


class Engine:
    """A bfloat16 copy of the model, with the weights of the last :meth:`sync_weights`."""

    def __init__(self, model: Any) -> None:
        self.trained, self.model = model, Qwen3ForCausalLM(model.config).to(torch.bfloat16).eval()

    def sync_weights(self) -> None:
        """TRL calls this on its vLLM client before a rollout."""
        self.model.load_state_dict(self.trained.state_dict())


@torch.no_grad()
def rollout(prompts: list[str], trainer: Any) -> dict[str, list]:
    """A ``rollout_func`` for TRL: samples of the engine, with its log-probs."""
    found: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    choice = {"do_sample": True, "max_new_tokens": trainer.args.max_completion_length}
    for ids in trainer.processing_class(prompts)["input_ids"]:
        out = trainer.vllm_generation.model.generate(
            torch.tensor([ids]), **choice, output_logits=True, return_dict_in_generate=True
        )
        sampled = out.sequences[0, len(ids) :]
        log_probs = torch.stack(out.logits)[:, 0].float().log_softmax(-1)
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(sampled.tolist())
        found["logprobs"].append(log_probs.gather(1, sampled[:, None])[:, 0].tolist())
    return found


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word."""
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", padding_side="left")


def tiny_model(head_dim: int = 16) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(WORDS)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ends, initializer_range=0.3))


def counts_sevens(completions: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [float(completion.split().count("7")) for completion in completions]


def build(keys: Any, folder: str, *, cls: type = Trainer, model: Any = None, **options: Any) -> Any:
    """Build the trainer, with the engine instead of vLLM. Without keys, ``cls`` is a class of TRL."""
    prompts = [{"prompt": f"{first} {second}"} for first in range(8) for second in range(8)]
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 4}
    local = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    shown = {"logging_steps": 1, "disable_tqdm": True}
    trainer = cls(
        model=model or tiny_model(),
        reward_funcs=counts_sevens,
        args=GRPOConfig(folder, **{"learning_rate": 1e-3} | sizes | local | shown | options),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
        **({} if keys is None else {"mis_keys": keys}),
    )
    # The configuration's `use_vllm=True` would start vLLM.
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(trainer.model), -1
    return trainer


def main() -> None:
    """Train; TRL prints what it logs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("keys", nargs="?", default=Path(__file__).parents[2] / "yaml" / "mis.yaml")
    keys = parser.parse_args().keys
    with tempfile.TemporaryDirectory() as folder:
        build(keys, folder).train()


if __name__ == "__main__":
    main()
