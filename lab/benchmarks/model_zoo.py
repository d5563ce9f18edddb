# SPDX-License-Identifier: Apache-2.0
"""Which architectures of transformers keep a token's bits in the batch-invariant mode on a CPU, built tiny.

``python lab/benchmarks/model_zoo.py --write`` runs all and writes ``lab/MODELS.md``; with names it runs those.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import platform
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.bits import same_bits

PAGE = Path(__file__).parents[1] / "MODELS.md"
ARCHITECTURES = tuple(
    name
    for family in (
        "llama llama4_text mistral ministral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next",
        "gemma gemma2 gemma3_text phi phi3 phimoe cohere cohere2 olmo olmo2 olmo3 olmoe",
        "deepseek_v2 deepseek_v3 glm glm4 glm4_moe gpt_oss granite granitemoe smollm3 stablelm starcoder2",
        "gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt persimmon nemotron helium seed_oss ernie4_5 hunyuan_v1_dense",
        "exaone4 apertus gpt_bigcode minimax dots1",
        "mamba mamba2 jamba bamba falcon_h1 lfm2 rwkv",
    )
    for name in family.split()
)
VOCABULARY, WINDOW, NUM_GENERATED = 97, 40, 6

# What makes any config small, where it has such a key.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_layers": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "state_size": 16,
    "attention_hidden_size": 64,
    "attn_layer_indices": [1, 3],
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "deepseek_v3": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    "deepseek_v2": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1},
}


class Sequences(NamedTuple):
    """What is fed, and the logits of each sequence alone."""

    ids: list[Tensor]
    expected: list[Tensor]


Probe = Callable[[Any, Sequences, random.Random], str]

# They take their masks of a pack from outside.
_MASKED = ("llama4_text", "gpt_oss")
# Their widths depend on one another.
_OF_ONE_SIZE = ("mamba2", "bamba", "rwkv")
# Heads, heads of keys, width of a head: their products are no multiples of 32.
_HEADS = ((7, 1, 24), (6, 2, 24), (3, 1, 24), (5, 1, 24), (2, 2, 24))


def draw_sizes(rng: random.Random) -> dict[str, Any]:
    """Widths off multiples of 32, and five or more experts, by the keys of configs."""
    num_heads, num_key_value_heads, head_dim = rng.choice(_HEADS)
    drawn = {
        ("num_attention_heads", "n_head", "num_heads", "n_heads"): num_heads,
        ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"): num_heads * head_dim,
        ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "n_inner"): rng.choice([90, 100, 130]),
        ("moe_intermediate_size", "shared_expert_intermediate_size"): rng.choice([36, 50, 70]),
        ("num_experts", "num_local_experts", "n_routed_experts"): rng.randint(5, 16),
        ("num_key_value_heads",): num_key_value_heads,
        ("head_dim",): head_dim,
    }
    return {key: size for keys, size in drawn.items() for key in keys}


def build(name: str, sizes: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the architecture with random weights, in evaluation."""
    default = transformers.AutoConfig.for_model(name)
    known = {**default.to_dict(), **default.attribute_map}
    wanted = _SMALL | (sizes or {})
    small = {key: value for key, value in wanted.items() if key in known} | _OWN.get(name, {})
    config = transformers.AutoConfig.for_model(name, **small)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def _agreement(pairs: list[tuple[Tensor, Tensor]]) -> str:
    different = sum(int((~same_bits(ours, theirs)).any(-1).sum()) for ours, theirs in pairs)
    total = sum(len(ours) for ours, _ in pairs)
    furthest = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    return "exact" if not different else f"{different} of {total} rows differ, by {furthest:.0e} at most"


def _batch(model: Any, sequences: Sequences, rng: random.Random) -> str:
    length = min(map(len, sequences.ids))
    logits = model(torch.stack([ids[:length] for ids in sequences.ids]), use_cache=False).logits
    return _agreement([(ours, theirs[:length]) for ours, theirs in zip(logits, sequences.expected, strict=True)])


def _right_padding(model: Any, sequences: Sequences, rng: random.Random) -> str:
    longest = max(map(len, sequences.ids)) + rng.randint(1, 9)
    ids = torch.stack([torch.nn.functional.pad(x, (0, longest - len(x)), value=3) for x in sequences.ids])
    mask = torch.stack([(torch.arange(longest) < len(x)).long() for x in sequences.ids])
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    return _agreement([(ours[: len(x)], x) for ours, x in zip(logits, sequences.expected, strict=True)])


def _left_padded(sequences: Sequences, longest: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.nn.functional.pad(x, (longest - len(x), 0), value=3) for x in sequences.ids])
    return ids, torch.stack([(torch.arange(longest) >= longest - len(x)).long() for x in sequences.ids])


def _left_padding(model: Any, sequences: Sequences, rng: random.Random) -> str:
    ids, mask = _left_padded(sequences, max(map(len, sequences.ids)) + rng.randint(1, 9))
    takes = inspect.signature(model.forward).parameters
    named = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if "position_ids" in takes else {}
    logits = model(ids, attention_mask=mask, use_cache=False, **named).logits
    return _agreement([(ours[-len(x) :], x) for ours, x in zip(logits, sequences.expected, strict=True)])


def _generate(model: Any, sequences: Sequences, rng: random.Random) -> str:
    def logits_of(ids: Tensor, mask: Tensor) -> Tensor:
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=NUM_GENERATED,
            max_new_tokens=NUM_GENERATED,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(found.logits, 1)

    together = logits_of(*_left_padded(sequences, max(map(len, sequences.ids))))
    alone = [logits_of(x[None], torch.ones(1, len(x), dtype=torch.long))[0] for x in sequences.ids]
    return _agreement([*zip(together, alone, strict=True)])


def _in_parts(model: Any, sequences: Sequences, sizes: list[int]) -> str:
    ids, cache, outputs, start = sequences.ids[0], None, [], 0
    # The older name before transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    while start < len(ids):
        size = sizes[min(len(outputs), len(sizes) - 1)]
        named = {name: cache} if cache is not None else {}
        output = model(ids[None, start : start + size], use_cache=True, **named)
        cache = getattr(output, name)
        outputs.append(output.logits[0])
        start += size
    return _agreement([(torch.cat(outputs), sequences.expected[0])])


def _decode(model: Any, sequences: Sequences, rng: random.Random) -> str:
    return _in_parts(model, sequences, [rng.randint(1, 60), 1])


def _chunks(model: Any, sequences: Sequences, rng: random.Random) -> str:
    return _in_parts(model, sequences, [rng.randint(7, 33)])


def masks_of_a_pack(model: Any, ids: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """For ``attention_mask=`` of a model that mixes packed sequences up, by kind of its layers.

    GPT-OSS makes its masks without ``position_ids``, and Llama 4 counts chunks from the beginning of the pack
    (before transformers 5.23).

    Args:
        model: GPT-OSS or Llama 4, for text.
        ids: ``[B, T]``.
        position_ids: ``[B, T]``, from 0 on in each sequence.
    """
    size = getattr(model.config, "attention_chunk_size", None)
    # Neither a mask of padding nor a cache.
    given = (model.config, model.get_input_embeddings()(ids), None, None)
    of_kind = {
        "full_attention": lambda: create_causal_mask(*given, position_ids),
        "sliding_attention": lambda: create_sliding_window_causal_mask(*given, position_ids),
        # Positions that begin anew make each chunk a sequence of the pack.
        "chunked_attention": lambda: create_causal_mask(*given, position_ids % size),
    }
    return {kind: of_kind[kind]() for kind in {*model.config.layer_types}}


def _packing(model: Any, sequences: Sequences, rng: random.Random) -> str:
    ids = torch.cat(sequences.ids)[None]
    positions = torch.cat([torch.arange(len(x)) for x in sequences.ids])[None]
    named = {"attention_mask": masks_of_a_pack(model, ids, positions)} if model.config.model_type in _MASKED else {}
    logits = model(ids, position_ids=positions, use_cache=False, **named).logits[0]
    return _agreement([(logits, torch.cat(sequences.expected))])


PROBES: dict[str, Probe] = {
    "batch": _batch,
    "right padding": _right_padding,
    "left padding": _left_padding,
    "decode": _decode,
    "chunked prefill": _chunks,
    "packing": _packing,
    "generate": _generate,
}


def judge(name: str, seed: int = 0, *, most_threads: int = 7) -> dict[str, str]:
    """What each probe found, by its name: "exact", how many rows differ, "refused: ...", or the error."""
    rng, before = random.Random(f"{name} {seed}"), torch.get_num_threads()
    try:
        sizes = {} if name in _OF_ONE_SIZE else draw_sizes(rng)
        model = build(name, sizes, rng.choice([torch.float32, torch.bfloat16]))
    except Exception as error:
        return dict.fromkeys(PROBES, _reason(error))
    with torch.no_grad(), batch_invariant_mode():
        try:
            ids = [torch.randint(3, VOCABULARY, (rng.randint(66, 130),)) for _ in range(3)]
            torch.set_num_threads(1)
            sequences = Sequences(ids, [model(x[None], use_cache=False).logits[0] for x in ids])
        except Exception as error:
            return dict.fromkeys(PROBES, _reason(error))
        found = {}
        for probe, run in PROBES.items():
            torch.set_num_threads(rng.randint(1, most_threads))
            try:
                found[probe] = run(model, sequences, rng)
            except Exception as error:
                found[probe] = _reason(error)
            finally:
                torch.set_num_threads(before)
    return found


def _reason(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return (
        f"refused: {first}"
        if isinstance(error, NotImplementedError) and "batch-invariant" in first
        else (f"{type(error).__name__}: {first[:80]}")
    )


def table(results: dict[str, dict[str, str]]) -> str:
    """Markdown: a row per architecture, reasons below."""
    reasons: dict[str, int] = {}
    rows = [f"| architecture | {' | '.join(PROBES)} |", "|---" * (len(PROBES) + 1) + "|"]
    for name, found in results.items():
        cells = [_cell(found[probe], reasons) for probe in PROBES]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*rows, "", *notes])


def _cell(outcome: str, reasons: dict[str, int]) -> str:
    if outcome == "exact" or "rows differ" in outcome:
        return outcome
    number = reasons.setdefault(outcome, len(reasons) + 1)
    return f"{'refused' if outcome.startswith('refused') else 'error'} ({number})"


def main() -> None:
    """Run, print, and write the page where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--seed", type=int, default=0, help="of lengths, chunks and numbers of threads")
    parser.add_argument("--threads", type=int, default=7, help="each probe takes 1 to as many")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.disable(logging.WARNING)
    results = {}
    for name in options.names:
        results[name] = judge(name, options.seed, most_threads=options.threads)
        print(name, results[name], flush=True)
    exact = sum(set(found.values()) == {"exact"} for found in results.values())
    page = f"""# Architectures in the batch-invariant mode

`python lab/benchmarks/model_zoo.py --write` ({platform.machine()} CPU, torch {torch.__version__}, transformers
{transformers.__version__}, seed {options.seed}): tiny models with random weights, {WINDOW} tokens to a window,
drawn widths off multiples of 32 (not {" ".join(_OF_ONE_SIZE)}), 5 to 16 experts, float32 or bfloat16,
3 sequences of 66 to 130 tokens, 1 to {options.threads} threads, the attention and the experts that transformers takes
by default. {" and ".join(_MASKED)} are packed with the masks of `masks_of_a_pack`.
Every token's logits are compared, bit for bit, with those of its sequence alone in one thread.
{exact} of {len(results)} are exact in all.
Where rows differ by more than rounding (1e-5), the model itself attends to other tokens there. Where they differ by
rounding, mpt (in float32) counts its position biases from the last key that it is given, and minimax sums in blocks
that begin where a chunk does.

{table(results)}
"""
    print(page)
    if options.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
