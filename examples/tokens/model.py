# SPDX-License-Identifier: Apache-2.0
"""A chat model small enough for a CPU: one policy as a trainer's ``GPTModel`` and as a checkpoint for SGLang."""

from __future__ import annotations

from pathlib import Path

import torch
from grpo.cpu import megatron_device
from grpo.model import ModelShape, hf_config
from onpolicy.pieces import NONE
from onpolicy.trainer import Trainer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import AutoModelForCausalLM

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TRAINING_TEXT = Path(__file__).resolve().parents[2] / "LICENSE"

SEED = 5
# A random model almost never ends its turn. This raises the probability of the end token.
END_SCALE = 3.0


class Policy:
    """The trainer's model, in float32, and its tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = train_tokenizer()
        self.end_id: int = self.tokenizer.convert_tokens_to_ids(TURN_END)
        self._shape = ModelShape(
            num_layers=2,
            hidden_size=256,
            ffn_hidden_size=768,
            num_heads=8,
            num_kv_heads=4,
            vocab_size=len(self.tokenizer),
            max_length=1024,
        )
        device = torch.device("cpu")
        self._trainer = Trainer(self._shape, NONE, dtype=torch.float32, device=device, seed=SEED, lr=0.0)
        with torch.no_grad():
            self._trainer.model.output_layer.weight[self.end_id] *= END_SCALE

    def save(self, directory: Path) -> None:
        """Write configuration, weights and tokenizer for SGLang."""
        config = hf_config(self._shape)
        config.eos_token_id = self.end_id
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(self._trainer.export_weights())
        model.save_pretrained(directory)
        # Its sampling defaults apply if a user sets none.
        (directory / "generation_config.json").unlink(missing_ok=True)
        self.tokenizer.save_pretrained(directory)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        """The logits of Megatron-Core at each of ``T`` tokens, ``[T, vocabulary]``."""
        tokens = torch.tensor([token_ids])
        with megatron_device(tokens.device):
            logits: Tensor = self._trainer.model(tokens, torch.arange(len(token_ids))[None], None)
        return logits[0]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on this project's license in a fraction of a second."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT.read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
