# SPDX-License-Identifier: Apache-2.0
"""Vocabulary sizes of tokenizer, model, and trainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyReport:
    """Result of ``check_vocabulary``.

    Attributes:
        num_nameless: Rows of the model without a token in the tokenizer: they can be sampled, and have no text.
        num_padding: Rows that only the trainer has: its softmax gives them mass that the server's does not.
        messages: What to do about either; empty where there is neither.
    """

    num_nameless: int
    num_padding: int
    messages: tuple[str, ...]


def check_vocabulary(*, tokenizer_size: int, model_size: int, trainer_size: int) -> VocabularyReport:
    """Find rows of the trainer's logits that the server's softmax lacks, and rows without a token.

    Args:
        tokenizer_size: Ids of the tokenizer, added tokens included: ``len(tokenizer)``.
        model_size: ``vocab_size`` of the model's configuration; the servers cut their logits to it.
        trainer_size: Columns of the trainer's logits, over all tensor-parallel ranks; see ``padded_vocab_size``.

    Raises:
        ValueError: Tokens without a row: the sizes belong to different models.
    """
    if tokenizer_size > model_size:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} ids and the model {model_size} rows: ids from {model_size} on have no "
            "logit; this is another model's tokenizer, or the embedding was not resized"
        )
    if model_size > trainer_size:
        raise ValueError(
            f"the model has {model_size} rows and the trainer {trainer_size}: ids from {trainer_size} on cannot be "
            "scored; give the trainer the model's vocab_size"
        )
    num_nameless, num_padding = model_size - tokenizer_size, trainer_size - model_size
    messages = []
    if num_nameless:
        messages.append(
            f"{num_nameless} rows from {tokenizer_size} on have no token: one that is sampled vanishes from the text; "
            "keep token ids, never re-tokenize"
        )
    if num_padding:
        messages.append(
            f"{num_padding} rows of padding from {model_size} on take part in the trainer's softmax: its log-probs are "
            f"too low; score with vocab_size={model_size}, or set these columns to -inf"
        )
    return VocabularyReport(num_nameless=num_nameless, num_padding=num_padding, messages=tuple(messages))


def padded_vocab_size(model_size: int, *, divisible_by: int = 128, tensor_parallel_size: int = 1) -> int:
    """Columns of Megatron's logits: ``model_size`` rounded up to ``--make-vocab-size-divisible-by`` times ranks."""
    multiple = divisible_by * tensor_parallel_size
    return -(-model_size // multiple) * multiple
