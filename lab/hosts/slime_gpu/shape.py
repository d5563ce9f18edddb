# SPDX-License-Identifier: Apache-2.0
"""The shape of a Hugging Face model as flags of Megatron-LM: ``python slime_gpu/shape.py FOLDER``.

For dense models like Llama and Qwen2, and mixtures of experts like Qwen3's. Of a folder that is not there yet, it is
that of SmolLM2-135M-Instruct.
"""

import json
import sys
from pathlib import Path
from typing import Any

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def flags(folder: Path) -> list[str]:
    """Words of the command line."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.exists() else SMOLLM2
    heads = config["num_attention_heads"]
    # Since transformers 5 the base of the positions has a dictionary around it.
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    pairs = {
        "num-layers": config["num_hidden_layers"],
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"],
        "num-attention-heads": heads,
        "num-query-groups": config["num_key_value_heads"],
        "kv-channels": config.get("head_dim") or config["hidden_size"] // heads,
        "max-position-embeddings": config["max_position_embeddings"],
        "rotary-base": int(base),
        "norm-epsilon": config["rms_norm_eps"],
        "vocab-size": config["vocab_size"],
    }
    if config["model_type"] == "qwen3_moe":
        if (
            not config.get("norm_topk_prob")
            or config.get("mlp_only_layers")
            or config.get("decoder_sparse_step", 1) > 1
        ):
            raise ValueError("a mixture must have experts in every layer, and norm_topk_prob: true")
        pairs |= {
            # transformers 5 writes it under the other name.
            "num-experts": config.get("num_experts") or config["num_local_experts"],
            "moe-router-topk": config["num_experts_per_tok"],
            "moe-ffn-hidden-size": config["moe_intermediate_size"],
            "moe-router-score-function": "softmax",
            "moe-router-load-balancing-type": "none",
            "moe-aux-loss-coeff": 0,
            "moe-router-dtype": "fp32",
            "moe-token-dispatcher-type": "alltoall",
        }
    words = [word for name, value in pairs.items() for word in (f"--{name}", str(value))]
    if config["model_type"] == "qwen2":
        words.append("--add-qkv-bias")
    if config["model_type"] == "qwen3_moe":
        words.append("--qk-layernorm")
    if not config.get("tie_word_embeddings"):
        words.append("--untie-embeddings-and-output-weights")
    return words


if __name__ == "__main__":
    print(*flags(Path(sys.argv[1])))
