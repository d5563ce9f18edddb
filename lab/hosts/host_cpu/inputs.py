# SPDX-License-Identifier: Apache-2.0
"""Writes what a host's command line names: a tiny Qwen3 with random weights, its tokenizer, prompts and rollouts.

    python -m host_cpu.inputs HOST FOLDER

HOST is its package.

The rollouts stand for an engine: random tokens, with log-probs of the same model plus a drawn mismatch. They are the
host's own samples, in the files of its ``--save-debug-rollout-data``. Below ``mixture`` is a mixture of experts, whose
rollouts are sampled: see `host_cpu.mixture`.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from . import mixture
from .cases import EXPERTS, FAN_OUT, MODEL, NUM_PROMPTS, NUM_ROLLOUTS, SAMPLES_PER_PROMPT, VERSION

# Some tokens are far off, so that a cap of 2 cuts: exp(-1.2) and exp(1.2) = 3.3.
SMALL_MISMATCH, LARGE_MISMATCH, LARGE_SHARE = 0.05, 1.2, 0.1
MASKED_FROM_END = 2


def write_model(folder: Path, *, is_mixture: bool = False) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Save model and tokenizer in Hugging Face format."""
    torch.manual_seed(0)
    more = {
        "num_experts": EXPERTS["num-experts"],
        "num_experts_per_tok": EXPERTS["moe-router-topk"],
        "moe_intermediate_size": EXPERTS["moe-ffn-hidden-size"],
        "norm_topk_prob": True,
        # Larger than usual, so that other experts make another token.
        "initializer_range": 0.1,
    }
    config = (Qwen3MoeConfig if is_mixture else Qwen3Config)(
        vocab_size=MODEL["vocab-size"],
        hidden_size=MODEL["hidden-size"],
        intermediate_size=MODEL["ffn-hidden-size"],
        num_hidden_layers=MODEL["num-layers"],
        num_attention_heads=MODEL["num-attention-heads"],
        num_key_value_heads=MODEL["num-query-groups"],
        head_dim=MODEL["kv-channels"],
        rms_norm_eps=MODEL["norm-epsilon"],
        rope_theta=float(MODEL["rotary-base"]),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **(more if is_mixture else {}),
    )
    # The file's weights are of bfloat16, as in a real checkpoint.
    model = (Qwen3MoeForCausalLM if is_mixture else Qwen3ForCausalLM)(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0", unk_token="t0").save_pretrained(
        folder
    )
    return model.float()


@torch.no_grad()
def rollout(model: Qwen3ForCausalLM, rollout_id: int, sample_type: Any) -> list[Any]:
    """Draw the samples of one rollout, each a ``Sample`` of the framework."""
    generator = torch.Generator().manual_seed(100 + rollout_id)
    # Miles counts the updates of its weights from 0, and has no flag for it.
    version = 0.0 if sample_type.__module__.startswith("miles.") else VERSION

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for index in range(NUM_PROMPTS * SAMPLES_PER_PROMPT):
        prompt, response = between(4, 9), between(5, 40)
        tokens = torch.randint(2, MODEL["vocab-size"], (1, prompt + response), generator=generator)
        log_probs = model(tokens).logits[0, prompt - 1 : -1].log_softmax(-1).gather(1, tokens[0, prompt:, None])[:, 0]
        mismatch = SMALL_MISMATCH * torch.randn(response, generator=generator)
        is_large = torch.rand(response, generator=generator) < LARGE_SHARE
        sign = torch.randn(response, generator=generator).sign()
        samples.append(
            sample_type(
                group_index=index // SAMPLES_PER_PROMPT,
                index=rollout_id * NUM_PROMPTS * SAMPLES_PER_PROMPT + index,
                prompt="x",
                tokens=tokens[0].tolist(),
                response="y",
                response_length=response,
                # Every group has both rewards: an advantage of 0 everywhere would compare nothing.
                reward=float(index % 2),
                rollout_log_probs=(log_probs + mismatch + is_large * LARGE_MISMATCH * sign).tolist(),
                # One token before the last is masked, as an observation is.
                loss_mask=[1] * (response - MASKED_FROM_END) + [0, 1],
                # As mis_ext.rollout.generate stores them for a response that was aborted and continued after an update.
                teacher_log_probs=[version - 1.0] * (response // 2) + [version] * (response - response // 2),
                status=sample_type.Status.COMPLETED,
            )
        )
    return samples


def fanned_out(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, the second of them as a trajectory of two samples, and one more removed for a failed environment."""
    first = samples[1] | {"rollout_id": samples[1]["index"]}
    dropped = first["response_length"] // 2
    turn = {key: first[key][:-dropped] for key in ("tokens", "rollout_log_probs", "loss_mask", "teacher_log_probs")}
    second = first | turn | {"response_length": first["response_length"] - dropped}
    others = [sample | {"rollout_id": sample["index"]} for sample in samples]
    others[6] |= {"remove_sample": True, "reward": -1.0}
    return [others[0], first, second, *others[2:]]


def main() -> None:
    """Write everything below one folder."""
    host, folder = sys.argv[1], Path(sys.argv[2])
    sample_type = importlib.import_module(f"{host}.utils.types").Sample
    model = write_model(folder / "model")
    for name in ("rollouts", FAN_OUT):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for rollout_id in range(NUM_ROLLOUTS):
        samples = [sample.to_dict() for sample in rollout(model, rollout_id, sample_type)]
        for name, saved in (("rollouts", samples), (FAN_OUT, fanned_out(samples))):
            torch.save({"rollout_id": rollout_id, "samples": saved}, folder / name / f"{rollout_id}.pt")
    prompts = [json.dumps({"text": f"t{i + 2} t{i + 3}", "label": "1"}) for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    write_model(folder / "mixture" / "model", is_mixture=True)
    mixture.write(host, folder / "mixture", sample_type, NUM_ROLLOUTS)


if __name__ == "__main__":
    main()
