# SPDX-License-Identifier: Apache-2.0
"""The decoder. Trainer and engines each have their own copy."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from grpo.model import ModelShape, hf_config
from grpo.pretrained import Pretrained
from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """The model to build, and its weights.

    Attributes:
        shape: Shape for Megatron-Core.
        config: Configuration for engines. Its ``eos_token_id``, if any, ends a response.
        weights: Weights by transformers name; None: random weights.
    """

    shape: ModelShape
    config: PretrainedConfig
    weights: Mapping[str, Tensor] | None = None

    @classmethod
    def random(cls, shape: ModelShape) -> Policy:
        """An untrained model, whose responses never end early."""
        return cls(shape=shape, config=hf_config(shape))

    @classmethod
    def pretrained(cls, found: Pretrained, *, max_length: int) -> Policy:
        """A checkpoint, for sequences of at most ``max_length`` tokens; caches and tables have this length.

        Raises:
            ValueError: If the model supports fewer.
        """
        longest = found.config.max_position_embeddings
        if max_length > longest:
            raise ValueError(f"{max_length} tokens of prompt and response, but the model supports {longest}")
        config = deepcopy(found.config)
        config.max_position_embeddings = max_length
        return cls(shape=ModelShape.of(config), config=config, weights=found.weights)
