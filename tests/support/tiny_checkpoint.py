# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama or Qwen2 with a tokenizer of letters and a chat template, as a folder of Hugging Face."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

START, END = "<|start|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'][0] }}}} {{{{ message['content'] }}}}{END}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}a {{% endif %}}"
)


def write_tiny_checkpoint(
    folder: Path, *, seed: int = 0, is_tied: bool = True, ffn_size: int = 96, family: type = LlamaConfig
) -> None:
    """Write it: two layers, bfloat16, a token for each letter, and digits likelier than the rest.

    A Qwen2 (``family=Qwen2Config``) has large biases on keys, as pretrained ones do.
    """
    letters = [*string.digits, *string.ascii_letters, *" ,.:?+"]
    names = [START, END, "<|unknown|>", *letters]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    config = family(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=ffn_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=768,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if family is Qwen2Config:
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=8.0 if "k_proj" in name else 0.1)
        # All hidden states have a part in one direction, and digits most of it: they are sampled most.
        model.model.embed_tokens.weight += 0.05
        model.model.embed_tokens.weight[3:13] += 0.06
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
