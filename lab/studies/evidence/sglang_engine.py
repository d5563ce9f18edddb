# SPDX-License-Identifier: Apache-2.0
"""SGLang as the engine of a group: the weights of one run after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3MoeConfig

from .engines import EngineSpec, Sampled
from .policy import Shape, Weights
from .sglang_runner import SGLangRunner


class SGLangEngine:
    """See :class:`~evidence.engines.Engine`.

    Random numbers are SGLang's own, and it tells its experts.
    """

    def __init__(self, spec: EngineSpec, shape: Shape, *, batch: int, length: int, device: torch.device) -> None:
        settings = {"dtype": spec.dtype, "kv_cache_dtype": spec.cache, **spec.settings}
        self._spec, self._quantizer = spec, spec.quantizer(shape)
        self._runner = SGLangRunner(
            hf_config(shape),
            device=device,
            batch_size=batch,
            max_length=length,
            settings=settings,
            quantizer=self._quantizer,
        )

    @torch.no_grad()
    def sample(
        self,
        weights: Weights,
        prompts_RBP: Tensor,
        num_tokens: int,
        *,
        temperature: float,
        draw_seeds: list[int],
        top_p: float = 1.0,
    ) -> Sampled:
        """See :class:`~evidence.engines.Engine`."""
        results, rounded = [], self._spec.rounded(weights)
        if self._quantizer is not None:
            rounded = self._quantizer.quantize(rounded)
        for run, prompts_BP in enumerate(prompts_RBP):
            self._runner.load({name: weight[run] for name, weight in rounded.items()})
            found = self._runner.generate(prompts_BP, num_tokens=num_tokens, temperature=temperature, top_p=top_p)
            results.append(found._replace(experts=None if found.experts is None else torch.stack(found.experts)))
        return Sampled(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True)))

    def close(self) -> None:
        """See :class:`~evidence.engines.Engine`."""
        self._runner.close()


def hf_config(shape: Shape) -> Qwen3Config | Qwen3MoeConfig:
    """The decoder for SGLang. Without an end token, sampling stops at the given length."""
    common = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if not shape.num_experts:
        return Qwen3Config(architectures=["Qwen3ForCausalLM"], **common)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.expert_ffn_size,
        norm_topk_prob=True,
        **common,
    )
