# SPDX-License-Identifier: Apache-2.0
"""What routing replay (R3) is worth: mismatch of a mixture-of-experts trainer and its engine without and with it.

    python lab/benchmarks/routing_replay.py [--seeds 5]

The trainer is Megatron-Core in float32, the engine transformers' Qwen3-MoE in bfloat16 with the same weights, which are
random (``toy_moe.py``). The engine samples, and the trainer scores the same tokens: with its own experts, with the
engine's, and with the engine's shifted by one position, which is what an off-by-one mistake would do. k3 is the mean of
``exp(d) - 1 - d`` over sampled tokens, ``d`` the trainer's log-prob minus the engine's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from toy_moe import MoEShape, Rollout, build_engine, build_trainer, padded_layout, sample, score, single_process

from mis_ext.onpolicy.routing.experts import RoutedExperts, RoutingDisagreement, routing_disagreement
from mis_ext.onpolicy.routing.replay import record_routing, replay_routing

SETTINGS = {
    "32 experts, top 4": MoEShape(),
    "16 experts, top 2": MoEShape(num_experts=16, topk=2),
    "32 experts, top 4, router weights x 4": MoEShape(router_std=0.5),
    "32 experts, top 4, router weights x 8": MoEShape(router_std=1.0),
}
NUM_SEQUENCES, PROMPT_LENGTH, NEW_TOKENS = 16, 8, 24


class Measured(NamedTuple):
    """One scoring of a rollout: what differs in the experts that the trainer used, and the mismatch it leaves."""

    disagreement: RoutingDisagreement
    k3: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print(f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()} CPU")
    print(
        f"{NUM_SEQUENCES} sequences of {PROMPT_LENGTH} + {NEW_TOKENS} tokens; medians (ranges) of {len(seeds)} seeds\n"
    )
    print("| model | differing choices | with replay | k3 | with replay | k3 without / with | k3, shifted by one |")
    print("|---|---|---|---|---|---|---|")
    with single_process():
        for name, shape in SETTINGS.items():
            runs = [measure(shape, seed=seed) for seed in seeds]
            cells = [
                _cell([off.disagreement.differing_choices for off, _, _ in runs], ".2%"),
                _cell([on.disagreement.differing_choices for _, on, _ in runs], ".2%"),
                _cell([off.k3 for off, _, _ in runs], ".1e"),
                _cell([on.k3 for _, on, _ in runs], ".1e"),
                _cell([off.k3 / on.k3 for off, on, _ in runs], ".1f"),
                _cell([shifted.k3 for _, _, shifted in runs], ".1e"),
            ]
            print("|", " | ".join([name, *cells]), "|", flush=True)


def measure(shape: MoEShape, *, seed: int) -> tuple[Measured, Measured, Measured]:
    """Sample a rollout from a bfloat16 engine and score it without replay, with it, and with rows one token late."""
    model = build_trainer(shape, seed=seed)
    engine = build_engine(model, shape, dtype=torch.bfloat16)
    prompts_BT = torch.randint(shape.vocab_size, (NUM_SEQUENCES, PROMPT_LENGTH))
    rollout = sample(engine, prompts_BT, new_tokens=NEW_TOKENS)
    shifted = [
        RoutedExperts(experts_TLK=routed.experts_TLK.roll(1, dims=0), num_experts=shape.num_experts)
        for routed in rollout.routed
    ]
    return (
        _score(model, rollout, replayed=None),
        _score(model, rollout, replayed=rollout.routed),
        _score(model, rollout, replayed=shifted),
    )


@torch.no_grad()
def _score(model: torch.nn.Module, rollout: Rollout, *, replayed: list[RoutedExperts] | None) -> Measured:
    layout = padded_layout(rollout)
    replay = nullcontext() if replayed is None else replay_routing(model, [layout.local(replayed, missing="own")])
    with replay, record_routing(model) as record:
        log_probs_BT = score(model, rollout.tokens_BT)
    difference = (log_probs_BT[:, -NEW_TOKENS:] - rollout.log_probs_BR).double()
    return Measured(
        disagreement=routing_disagreement(record.micro_batches(), [layout.local(rollout.routed).experts_TLK]),
        k3=(difference.expm1() - difference).mean().item(),
    )


def _cell(values: list[float], form: str) -> str:
    low, median, high = (format(f(values), form) for f in (min, statistics.median, max))
    return median if low == high else f"{median} ({low} to {high})"


if __name__ == "__main__":
    main()
