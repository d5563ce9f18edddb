# SPDX-License-Identifier: Apache-2.0
"""Trains by ms-swift's own ``swift rlhf --rlhf_type grpo`` on a CPU: with its correction, with ours, and with none.

With a checkout of ms-swift, in an environment that has what its trainer imports:

    python lab/peers/ms_swift/train.py --ms_swift ~/ms-swift

Its own engine, transformers, samples from a tiny random Llama. It reports no log-probs, so that they are drawn here, as
if vLLM had reported them: a tenth is off by a factor of 3.3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
STEPS, HIGH = 3, 1.2
KEYS = {"mis": {"weight": {"level": "token", "mode": "truncate", "high": HIGH}}}
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {"mode": "token_truncate"},
    "ours": {"mode": "token_truncate", "keys": KEYS},
}
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

import peer_training  # noqa: E402


def train(folder: Path, case: dict[str, Any]) -> None:
    """One run, in this process."""
    from swift.pipelines import rlhf_main
    from swift.rewards import ORM, orms
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    from mis_ext.hosts.ms_swift import register

    class Even(ORM):
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [sum(int(word) % 2 == 0 for word in text.split() if word.isdecimal()) / 12 for text in completions]

    orms["even"] = Even
    own, draw = GRPOTrainer._rollout_samples, torch.Generator().manual_seed(0)

    def sampled(self: Any, inputs: Any) -> Any:
        samples = own(self, inputs)
        # It asks for a version of vLLM.
        self.disable_rollout_importance_sampling = False
        for sample in samples:
            # As peer_training.rollouts draws them.
            count = len(sample.response_token_ids)
            kinds = torch.rand(count, generator=draw)
            off = (
                1.2 * (kinds < 0.05).float() - 1.2 * (kinds > 0.95).float() + 0.05 * torch.randn(count, generator=draw)
            )
            behavior = (off - torch.tensor(float(len(peer_training.WORDS))).log()).clamp(max=-1e-3)
            sample.rollout_logprobs = [behavior.tolist()]
        return samples

    GRPOTrainer._rollout_samples = sampled
    if "keys" in case:
        register(case["keys"])
    options = {
        "rlhf_type": "grpo",
        "model": folder,
        "model_type": "llama",
        "template": "dummy",
        "use_hf": "true",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "dataset": folder / "prompts.jsonl",
        "reward_funcs": "even",
        "use_vllm": "false",
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 12,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "report_to": "none",
        "gradient_checkpointing": "false",
        "split_dataset_ratio": 0,
        "save_strategy": "no",
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "output_dir": folder / "out",
        "add_version": "false",
        "rollout_importance_sampling_threshold": HIGH,
    } | ({"rollout_importance_sampling_mode": case["mode"]} if "mode" in case else {})
    rlhf_main([part for name, value in options.items() for part in (f"--{name}", str(value))])


def main() -> int:
    """Run all, each in a process of its own; 1 where ours are not ms-swift's own gradient norms."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ms_swift", type=Path, required=True, help="a checkout")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    sys.path.insert(0, str(parsed.ms_swift.resolve()))
    if parsed.run:
        train(parsed.folder, RUNS[parsed.run])
        return 0
    norms: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer_training.write_model(folder)
        rows = [{"messages": [{"role": "user", "content": f"{number} 5"}]} for number in range(12)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for run in RUNS:
            command = [sys.executable, __file__, "--ms_swift", parsed.ms_swift, "--run", run, "--folder", folder]
            subprocess.run([*map(str, command)], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
            lines = [json.loads(line) for line in (folder / "out/logging.jsonl").read_text().splitlines()]
            (folder / "out/logging.jsonl").unlink()
            steps = [line for line in lines if "grad_norm" in line]
            norms[run] = [step["grad_norm"] for step in steps]
            print(run, norms[run], {each: steps[0][each] for each in steps[0] if "mis_k3" in each}, flush=True)
    off = max(abs(one - other) / other for one, other in zip(norms["ours"], norms["own"], strict=True))
    print(f"ours from ms-swift's own: {off:.1e}")
    return int(not off < peer_training.TOLERANCE or norms["none"] == norms["own"])


if __name__ == "__main__":
    raise SystemExit(main())
