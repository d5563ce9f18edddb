# SPDX-License-Identifier: Apache-2.0
"""The shape of a random Qwen2 or Qwen3 of transformers that engines serve on a CPU."""

TINY = {
    # Not a multiple of 64, to which SGLang pads.
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Five times the usual value, so that the distributions are far from uniform.
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
