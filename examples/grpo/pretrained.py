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
    """The content of a checkpoint.

    Attributes:
        config: Its ``eos_token_id`` is the token with which the chat template ends a response.
        weights: By transformers name, on the CPU, in the dtype of the file.
        tokenizer: With a chat template.
    """

    config: PretrainedConfig
    weights: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase

    @property
    def shape(self) -> ModelShape:
        """The shape of the decoder."""
        return ModelShape.of(self.config)


def load_pretrained(path: Path) -> Pretrained:
    """Read a checkpoint without any network.

    Args:
        path: A folder with ``config.json``, weights and tokenizer; or a GGUF file, or a folder with one. GGUF needs the
            packages ``gguf`` and ``accelerate``, and gives float32 weights.

    Raises:
        FileNotFoundError: If there is no such file or folder, or the folder has neither format.
        ValueError: If there are several GGUF files, no chat template, a missing or unknown weight, or a model that the
            trainer does not support.
    """
    folder, file = _place(path)
    options = {"gguf_file": file} if file else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if not tokenizer.chat_template:
        raise ValueError(f"{path}: its tokenizer has no chat template; use a model that was trained on chats")
    dtype = torch.float32 if file else "auto"
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    _check_weights(path, found)
    config = model.config
    # Engines do not need the quantization of the file.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        config.__dict__.pop(key, None)
    if ModelShape.of(config).num_experts:
        raise ValueError(f"{path}: a mixture of experts; this example supports only dense models")
    config.eos_token_id = end_of_answer(tokenizer)
    config.bos_token_id = config.pad_token_id = None
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return Pretrained(config, weights, tokenizer)


def end_of_answer(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template ends a response. It often differs from the tokenizer's end of text."""
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    ends = [token_id for token_id in ids[-3:] if token_id in special]
    if not ends:
        raise ValueError("the chat template ends a response without a special token, so no response would ever end")
    return ends[-1]


def _check_weights(path: Path, found: dict[str, Collection[str]]) -> None:
    """Reject missing and unknown weights. Transformers would initialize missing ones randomly and drop unknown ones."""
    for kind, what in (("missing_keys", "is not in the checkpoint"), ("unexpected_keys", "has no place in the model")):
        if names := sorted(found[kind]):
            raise ValueError(f"{path}: {names[0]} {what} ({len(names)} such weights)")


def _place(path: Path) -> tuple[Path, str | None]:
    """Return the folder, and the name of its GGUF file, if any."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: expected a folder in Hugging Face's format, or a GGUF file")
    if (path / "config.json").exists():
        return path, None
    files = sorted(file.name for file in path.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{path}: has neither config.json nor a GGUF file")
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} GGUF files, name one: {', '.join(files)}")
    return path, files[0]
