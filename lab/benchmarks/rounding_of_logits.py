# SPDX-License-Identifier: Apache-2.0
"""Where the mismatch of a pretrained model in bfloat16 comes from: its logits, or the layers before them?

    python lab/benchmarks/rounding_of_logits.py MODEL DUMP [--samples 512]

MODEL is a folder in Hugging Face's format, DUMP a file of slime's or Miles' ``--dump-details`` whose tokens SGLang
sampled from these weights. transformers scores the same tokens on a CPU: in float32; with the logits alone rounded to
bfloat16; with all layers in bfloat16 and the last product in float32; and with that in bfloat16 too. Prints Markdown:
the k3 of each against float32, against what the engine reported, and against what the trainer scored.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

BATCH = 16


def logits_of(model: Any, ids_BT: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """``[R, V]`` in float32 of some places, with the last product in float32 whatever the layers have."""
    hidden_RH = model.model(input_ids=ids_BT).last_hidden_state[rows]
    logits_RV: Tensor = hidden_RH.float() @ model.lm_head.weight.float().T
    return logits_RV


def log_probs_of(logits_RV: Tensor, target_R: Tensor) -> Tensor:
    """``[R]`` in float64."""
    return logits_RV.double().log_softmax(-1).gather(-1, target_R[:, None]).squeeze(-1)


@torch.no_grad()
def scored(folder: Path, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Log-probs of all response tokens, sample after sample, by how they were computed."""
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found: dict[str, list[Tensor]] = {}
    for start in tqdm(range(0, len(samples), BATCH)):
        batch = samples[start : start + BATCH]
        tokens = [torch.as_tensor(sample["tokens"]) for sample in batch]
        # Behind their ends rows have anything: attention is causal.
        ids_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        places = [
            (row, place - 1)
            for row, (ids, sample) in enumerate(zip(tokens, batch, strict=True))
            for place in range(len(ids) - int(sample["response_lengths"]), len(ids))
        ]
        row_R, place_R = torch.tensor(places).T
        target_R = ids_BT[row_R, place_R + 1]
        in_float32 = logits_of(exact, ids_BT, (row_R, place_R))
        in_bfloat16 = logits_of(rounded, ids_BT, (row_R, place_R))
        for name, logits_RV in (
            ("float32", in_float32),
            ("float32, logits rounded to bfloat16", in_float32.bfloat16()),
            ("bfloat16, logits in float32", in_bfloat16),
            ("bfloat16", in_bfloat16.bfloat16()),
        ):
            found.setdefault(name, []).append(log_probs_of(logits_RV, target_R))
    return {name: torch.cat(pieces) for name, pieces in found.items()}


def k3(proximal_T: Tensor, behavior_T: Tensor) -> float:
    """Mean of ``r - 1 - log r``, r the ratio of the first to the second."""
    d_T = proximal_T - behavior_T
    return float((d_T.expm1() - d_T).mean())


def main() -> None:
    """Score and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--samples", type=int, default=512, help="the first so many")
    args = parser.parse_args()
    samples = torch.load(args.dump, map_location="cpu")["samples"][: args.samples]
    streams = scored(args.model, samples)
    for name, key in (("the engine", "rollout_log_probs"), ("the trainer", "log_probs")):
        streams[name] = torch.cat([torch.as_tensor(sample[key]).double() for sample in samples])
    reference = streams["float32"]
    print(f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{len(samples)} samples, {len(reference):,} tokens; the engine against the trainer: k3 ", end="")
    print(f"{k3(streams['the trainer'], streams['the engine']):.2e}\n")
    print(
        "| computed in | k3 against float32 | mean difference | largest | k3 against the engine | against the trainer |"
    )
    print("|---|---|---|---|---|---|")
    for name, stream in streams.items():
        distance = (stream - reference).abs()
        cells = [
            *(f"{value:.2e}" for value in (k3(stream, reference), distance.mean(), distance.max())),
            *(f"{k3(stream, streams[other]):.2e}" for other in ("the engine", "the trainer")),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
