# SPDX-License-Identifier: Apache-2.0
"""A pretrained model from disk: a folder in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from .model import ModelShape


@dataclass(frozen=True)
class Pretrained:
    """What a checkpoint holds.

    Attributes:
        config: Its ``eos_token_id`` is the token with which the chat template ends an answer.
        weights: By transformers name, on the CPU, in the dtype of the file.
        tokenizer: With a chat template.
    """

    config: PretrainedConfig
    weights: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase

    @property
    def shape(self) -> ModelShape:
        """Of the decoder."""
        return ModelShape.of(self.config)


def load_pretrained(path: Path) -> Pretrained:
    """Read a checkpoint without any network.

    Args:
        path: A folder with ``config.json``, weights and tokenizer; a GGUF file, or a folder with one. That needs the
            packages ``gguf`` and ``accelerate``; the weights come out of it in float32.

    Raises:
        FileNotFoundError: There is no such file or folder, or it has neither.
        ValueError: There are several GGUF files, no chat template, a weight too few or too many, or the trainer cannot
            hold such a model.
    """
    folder, file = _place(path)
    options = {"gguf_file": file} if file else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if not tokenizer.chat_template:
        raise ValueError(f"{path}: its tokenizer has no chat template; take a model that was trained on chats")
    dtype = torch.float32 if file else "auto"
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    _check_weights(path, found)
    config = model.config
    # The file's own storage is of no concern to engines.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        config.__dict__.pop(key, None)
    if ModelShape.of(config).num_experts:
        raise ValueError(f"{path}: a mixture of experts; only a dense model can be the start here")
    config.eos_token_id = end_of_answer(tokenizer)
    config.bos_token_id = config.pad_token_id = None
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return Pretrained(config, weights, tokenizer)


def end_of_answer(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template ends an answer: often another one than the tokenizer's end of text."""
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    ends = [token_id for token_id in ids[-3:] if token_id in special]
    if not ends:
        raise ValueError("the chat template ends an answer with no special token, so no answer would ever end")
    return ends[-1]


def _check_weights(path: Path, found: dict[str, Collection[str]]) -> None:
    """Transformers draws a weight that is not there at random, drops one that it does not know, and goes on."""
    for kind, what in (("missing_keys", "is not in the checkpoint"), ("unexpected_keys", "has no place in the model")):
        if names := sorted(found[kind]):
            raise ValueError(f"{path}: {names[0]} {what} ({len(names)} such weights)")


def _place(path: Path) -> tuple[Path, str | None]:
    """Return the folder, and the name of the GGUF file in it if that is what there is."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: expected a folder in Hugging Face's format, or a GGUF file")
    if (path / "config.json").exists():
        return path, None
    files = sorted(file.name for file in path.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{path}: neither config.json nor a GGUF file is in it")
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} GGUF files, name one: {', '.join(files)}")
    return path, files[0]
