# SPDX-License-Identifier: Apache-2.0
"""A model that a CPU trains in a second a step, for rehearsals: ``python -m slime_gpu.tiny FOLDER [mixture]``.

A Llama of two layers with random weights, whose tokens are bytes. It answers nothing right, so `reward` is of another
kind: a run whose rewards are equal has no gradient. The mixture is a Qwen3 of four layers with eight experts each,
large enough for the kernels of SGLang on a GPU.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, *, is_mixture: bool = False) -> None:
    """Save model and tokenizer in Hugging Face format."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate([*SPECIAL, *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = SPECIAL[1]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, additional_special_tokens=list(SPECIAL)
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    common = {
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        # SGLang has no tied embeddings in mixtures of Qwen3: a head that no file names stays zero.
        "tie_word_embeddings": not is_mixture,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": torch.bfloat16,
    }
    # Weights are larger than usual, so that some tokens are likely, and other experts make another token.
    model: LlamaForCausalLM | Qwen3MoeForCausalLM
    if is_mixture:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 128}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **sizes, **experts, initializer_range=0.1))
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
        model = LlamaForCausalLM(LlamaConfig(**common, **sizes, initializer_range=0.3))
    model.to(torch.bfloat16).save_pretrained(folder)


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """Return the share of even tokens in the response."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), is_mixture=sys.argv[2:] == ["mixture"])
