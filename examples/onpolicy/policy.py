# SPDX-License-Identifier: Apache-2.0
"""The decoder that trainer and engines hold, each its own copy."""

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
    """What to build, and what to fill it with.

    Attributes:
        shape: For Megatron-Core.
        config: For engines; its ``eos_token_id``, if any, ends a response.
        weights: By transformers name; None: random ones.
    """

    shape: ModelShape
    config: PretrainedConfig
    weights: Mapping[str, Tensor] | None = None

    @classmethod
    def random(cls, shape: ModelShape) -> Policy:
        """An untrained one, whose responses never end early."""
        return cls(shape=shape, config=hf_config(shape))

    @classmethod
    def pretrained(cls, found: Pretrained, *, max_length: int) -> Policy:
        """A checkpoint, for sequences of at most so many tokens: caches and tables are as long.

        Raises:
            ValueError: The model takes less.
        """
        longest = found.config.max_position_embeddings
        if max_length > longest:
            raise ValueError(f"{max_length} tokens of prompt and response, the model takes {longest}")
        config = deepcopy(found.config)
        config.max_position_embeddings = max_length
        return cls(shape=ModelShape.of(config), config=config, weights=found.weights)
