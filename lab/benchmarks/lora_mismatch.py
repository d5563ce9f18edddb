# SPDX-License-Identifier: Apache-2.0
"""The mismatch of a LoRA adapter between SGLang and a trainer of transformers with peft, on a CPU: what is normal.

    . examples/sglang_environment.sh
    "$venv/bin/pip" install --no-deps peft accelerate
    "$venv/bin/python" lab/benchmarks/lora_mismatch.py

A Qwen3 of four layers that is trained here on the repository's pages, or the model in a folder given by ``--model``. A
short supervised training makes the adapter.
Each row has samples of its own: the engine's log-probs of its tokens at temperature 1, and the trainer's of the same.
It prints a row for each case: k3, the largest difference, and the mean of the absolute one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The processes of the engine import it again.
STAND_INS = str(ROOT / "examples" / "grpo" / "sglang_cpu")
# SGLang's LoRA pins memory, for which a machine without CUDA has no allocator.
_UNPINNED = tempfile.mkdtemp(prefix="unpinned-")
Path(_UNPINNED, "sitecustomize.py").write_text(
    "import functools, torch\n"
    "def unpinned(make):\n"
    "    return functools.wraps(make)(lambda *a, pin_memory=False, **k: make(*a, **k))\n"
    "for name in ('tensor', 'empty', 'zeros', 'ones', 'full', 'arange', 'empty_like', 'zeros_like'):\n"
    "    setattr(torch, name, unpinned(getattr(torch, name)))\n"
    "torch.Tensor.pin_memory = lambda self, *a, **k: self\n"
)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_UNPINNED, STAND_INS, os.environ.get("PYTHONPATH")]))
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path[:0] = [STAND_INS, str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import torch  # noqa: E402

RANK, ALPHA, LEARNING_RATE, STEPS = 16, 32, 5e-4, 60
UNSENT = "model.layers.{}.mlp.down_proj.weight"
PROMPTS = (
    "Explain how rain forms.",
    "Write a short story about a lighthouse.",
    "What is a prime number?",
    "Why do cats purr?",
)


def text_batches(tokenizer: Any, steps: int) -> Iterator[torch.Tensor]:
    """Pieces of the repository's own pages, ``[4, 96]``."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    ids = torch.tensor(tokenizer(text[:120_000]).input_ids)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 96, (4,), generator=generator).tolist()
        yield torch.stack([ids[start : start + 96] for start in starts])


def tiny_model() -> tuple[Any, Any]:
    """A small BPE tokenizer, and a small Qwen3 after 200 steps on the repository's pages."""
    from tiny_tokenizers import english_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = english_tokenizer()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ends, tie_word_embeddings=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for ids in text_batches(tokenizer, 200):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"# trained to a loss of {loss.item():.3f}", file=sys.stderr, flush=True)
    return tokenizer, model.eval()


def train_adapter(model: Any, tokenizer: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with its adapter, and the adapter's tensors before the last update."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model, before = get_peft_model(model, config), {}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.Adam(trained.values(), lr=LEARNING_RATE)
    for ids in text_batches(tokenizer, STEPS):
        before = {name: each.detach().clone() for name, each in trained.items()}
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"# loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model.eval(), before


@torch.no_grad()
def merged(model: Any, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The weights with the adapter added in float32, under the names of the model without it."""
    found = {}
    for name, values in model.base_model.model.state_dict().items():
        if "lora_" not in name:
            found[name.replace(".base_layer", "")] = values.float().clone()
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            found[f"{name}.weight"] += scale * module.get_delta_weight("default").float()
    return found


def save(template: Any, tokenizer: Any, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """A checkpoint in bfloat16, the engine's dtype."""
    tied = ("lm_head.weight",) if template.config.tie_word_embeddings else ()
    rounded = {name: values.bfloat16() for name, values in weights.items() if name not in tied}
    template.save_pretrained(folder, state_dict=rounded)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def engine(folder: Path, *, dtype: str, adapter: Path | None = None) -> Iterator[Any]:
    """SGLang's engine on a CPU, with an adapter that it does not merge."""
    import sglang
    from grpo.engine_settings import CPU_SETTINGS

    lora = {
        "lora_paths": {"adapter": str(adapter)},
        "lora_backend": "torch_native",
        "max_lora_rank": RANK,
        "max_loras_per_batch": 2,
    }
    settings = CPU_SETTINGS | {"dtype": dtype, "sampling_backend": "pytorch", "grammar_backend": "none"}
    settings |= {"skip_server_warmup": True, "log_level": "error", "random_seed": 0, "max_total_tokens": 16384}
    started = sglang.Engine(model_path=str(folder), **settings, **(lora if adapter is not None else {}))
    try:
        yield started
    finally:
        started.shutdown()


def measure(engine: Any, prompts: list[list[int]], tokens: int, *, score: Any, lora: bool = False) -> dict[str, float]:
    """k3, largest and mean absolute difference of the engine's tokens."""
    options: dict[str, Any] = {"lora_path": ["adapter"] * len(prompts)} if lora else {}
    responses = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
        return_logprob=True,
        **options,
    )
    diffs = []
    for prompt, response in zip(prompts, responses, strict=True):
        rows = response["meta_info"]["output_token_logprobs"]
        ids = torch.tensor([*prompt, *(row[1] for row in rows)])
        diffs.append(score(ids)[len(prompt) - 1 :] - torch.tensor([row[0] for row in rows]))
    diff = torch.cat(diffs).double()
    return {
        "k3": float((diff.exp() - 1 - diff).mean()),
        "max": float(diff.abs().max()),
        "abs": float(diff.abs().mean()),
    }


def scorer(model: Any) -> Any:
    """The trainer's log-probs of all tokens except the first: float32 logits of its own dtype."""

    @torch.no_grad()
    def score(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    return score


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder in place of the tiny model")
    parser.add_argument("--copies", type=int, default=16, help="responses to each of four prompts")
    parser.add_argument("--tokens", type=int, default=48, help="of each response")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="only these rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if options.model is None:
        tokenizer, template = tiny_model()
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        template = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    # The base is what bfloat16 holds, in every dtype.
    template.load_state_dict({name: values.bfloat16().float() for name, values in template.state_dict().items()})
    scratch = Path(tempfile.mkdtemp(prefix="lora-"))
    base = save(template, tokenizer, dict(template.state_dict()), scratch / "base")
    model, before = train_adapter(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tokenizer)
    model.save_pretrained(scratch / "adapter")
    whole = merged(model)
    unsent = UNSENT.format(model.config.num_hidden_layers // 2)
    start = dict(template.state_dict())
    folders = {"merged": whole, "scaled": merged(model, scale=2.0), "unsent": whole | {unsent: start[unsent]}}
    after = {name: model.get_parameter(name).detach().clone() for name in before}
    for name, values in before.items():
        model.get_parameter(name).data.copy_(values)
    folders["late"] = merged(model)
    for name, values in after.items():
        model.get_parameter(name).data.copy_(values)
    saved = {name: str(save(template, tokenizer, weights, scratch / name)) for name, weights in folders.items()}
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS for _ in range(options.copies)]
    print(
        f"{options.copies * len(PROMPTS) * options.tokens} tokens, torch {torch.__version__}, sglang "
        f"{version('sglang')}, peft {version('peft')}, transformers {version('transformers')}"
    )

    def row(name: str, found: dict[str, float]) -> None:
        print(f"| {name} | {found['k3']:.1e} | {found['abs']:.4f} | {found['max']:.3f} |", flush=True)

    float32, weights = scorer(model), {name: values.data for name, values in model.named_parameters()}
    autocast = torch.autocast("cpu", torch.bfloat16)

    def hold(dtype: torch.dtype) -> None:
        """The base in ``dtype``, the adapter in float32, as trainers hold them."""
        for name, values in model.named_parameters():
            values.data = weights[name] if "lora_" in name else weights[name].to(dtype)

    if options.dtype != "float32":
        hold(torch.bfloat16)
        with engine(base, dtype="bfloat16") as started, autocast:
            with model.disable_adapter():
                row("no adapter", measure(started, prompts, options.tokens, score=scorer(model)))
            row("adapter not in the engine", measure(started, prompts, options.tokens, score=scorer(model)))
            for name, folder in saved.items():
                started.update_weights_from_disk(folder)
                row(name, measure(started, prompts, options.tokens, score=scorer(model)))
        with engine(base, dtype="bfloat16", adapter=scratch / "adapter") as started, autocast:
            row("unmerged in the engine", measure(started, prompts, options.tokens, score=scorer(model), lora=True))
    if options.dtype != "bfloat16":
        hold(torch.float32)
        with engine(base, dtype="float32", adapter=scratch / "adapter") as started:
            row("unmerged, float32 in both", measure(started, prompts, options.tokens, score=float32, lora=True))
            with model.disable_adapter():
                row("no adapter, float32 in both", measure(started, prompts, options.tokens, score=float32))


if __name__ == "__main__":
    main()
