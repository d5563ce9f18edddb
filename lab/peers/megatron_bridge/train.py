# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Bridge's own ``pretrain`` on a CPU with ``make_loss_func``, beside a plain loop with a loss by hand.

With checkouts of Megatron-Bridge and of the Megatron-LM that it pins, in an environment with torch, triton,
transformers and what Bridge imports:

    python lab/peers/megatron_bridge/train.py --bridge ~/Megatron-Bridge --megatron ~/Megatron-LM

Its model comes from a tiny Llama of Hugging Face's files through ``AutoBridge``. Rollouts are made up, an optimizer
step each. ``lab/hosts/host_cpu/device.py`` stands for CUDA; Transformer Engine and ModelOpt are absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch.nn.functional import log_softmax

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ABSENT = (
    "comet_ml",
    "diffusers",
    "fla",
    "mlflow",
    "modelopt",
    "nvidia_resiliency_ext",
    "open_clip",
    "timm",
    "transformer_engine",
    "transformer_engine_torch",
)
HIGH, LR, PER_STEP, PER_CALL = 1.2, 1e-3, 8, 4
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "token TIS": {"use_tis": True, "mis_loss_proximal": "current", "mis": {"weight": {"high": HIGH}}},
}
sys.path += [str(ROOT), str(ROOT / "tests/support"), str(ROOT / "lab/hosts"), str(HERE.parent / "peer_corrections")]

import peer_training  # noqa: E402
from host_cpu import device  # noqa: E402
from record import Absent  # noqa: E402


def micro_batches() -> Iterator[dict[str, Any]]:
    """The batches of ``make_loss_func``, padded; and what the model reads of them."""
    for rollout in peer_training.rollouts():
        for rows in torch.arange(PER_STEP).split(PER_CALL):
            part = {name: each[rows] for name, each in rollout.items()}
            lengths = part["mask"].sum(1).tolist()
            ids = part["sequences"]
            yield {
                "input_ids": ids,
                "unconcat_tokens": [row[: length + 2] for row, length in zip(ids, lengths, strict=True)],
                "total_lengths": [length + 2 for length in lengths],
                "response_lengths": lengths,
                "loss_masks": [torch.ones(length) for length in lengths],
                "advantages": [each.expand(length) for each, length in zip(part["advantages"], lengths, strict=True)],
                "rollout_log_probs": [row[:length] for row, length in zip(part["behavior"], lengths, strict=True)],
            }


def by_hand(model: Path, *, high: float) -> list[float]:
    """Gradient norms of a plain loop over transformers' Llama: ``-min(w, high) A log pi``, ``w`` to the engine."""
    from transformers import LlamaForCausalLM

    policy = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for rollout in peer_training.rollouts():
        ids, mask = rollout["sequences"], rollout["mask"]
        logits = policy(input_ids=ids, attention_mask=rollout["attention_mask"]).logits[:, 1:-1]
        scores = log_softmax(logits.float(), -1).gather(-1, ids[:, 2:, None])[..., 0]
        weight = (scores.detach() - rollout["behavior"]).exp().clamp(max=high) if high else 1.0
        loss = (-weight * rollout["advantages"][:, None] * scores * mask).sum(1) / mask.sum(1)
        optimizer.zero_grad()
        loss.mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9)))
        optimizer.step()
    return norms


def bridge(model: Path, keys: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    """Gradient norms of Megatron-Bridge's own ``pretrain``, and the metrics of its first step."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.training import config, initialize, train
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mis_ext import make_loss_func

    # It asks for CUDA here, and compiles for it, and what reads its own data.
    torch._dynamo.config.disable = True
    torch.cuda.is_available = device.always(True)
    initialize.compile_helpers = device.always(None)
    # It asks ModelOpt about every module, and how to distil.
    importlib.import_module("modelopt.torch.opt.dynamic").DynamicModule = type("DynamicModule", (), {})
    train.get_tensor_shapes_adjust_fn_for_distillation = device.always(None)
    args = argparse.Namespace(qkv_format="bshd", **keys)
    found: list[tuple[float, dict[str, float]]] = []
    own = train.train_step

    def noted(*given: Any, **named: Any) -> Any:
        result = own(*given, **named)
        found.append((float(result[5]), {name: float(value) for name, value in result[0].items()}))
        return result

    def forward_step(data_iterator: Iterator[dict[str, Any]], policy: Any) -> tuple[torch.Tensor, Any]:
        batch = next(data_iterator)
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return policy(ids, positions, mask), make_loss_func(args, batch)

    class Rollouts(DatasetProvider):
        def build_datasets(self, context: Any) -> Any:
            return micro_batches(), None, None

    provider = AutoBridge.from_hf_pretrained(model).to_megatron_provider(load_weights=True)
    for name, value in LOCAL.items():
        setattr(provider, name, value)
    provider.transformer_layer_spec = lambda _: get_gpt_layer_local_spec(normalization="RMSNorm")
    train.train_step = noted
    try:
        pretrain(
            config.ConfigContainer(
                model=provider,
                train=config.TrainingConfig(
                    micro_batch_size=PER_CALL, global_batch_size=PER_STEP, train_iters=peer_training.ROLLOUTS
                ),
                validation=config.ValidationConfig(eval_interval=None, eval_iters=0),
                optimizer=config.OptimizerConfig(
                    optimizer="adam",
                    lr=LR,
                    min_lr=LR,
                    weight_decay=0.0,
                    adam_beta1=0.9,
                    adam_beta2=0.95,
                    clip_grad=1e9,
                    use_distributed_optimizer=False,
                ),
                scheduler=config.SchedulerConfig(
                    lr_decay_style="constant",
                    lr_warmup_iters=0,
                    lr_decay_iters=100,
                    start_weight_decay=0.0,
                    end_weight_decay=0.0,
                ),
                ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=False),
                dist=config.DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
                tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=len(peer_training.WORDS)),
                checkpoint=config.CheckpointConfig(save=None, load=None, async_save=False),
                logger=config.LoggerConfig(log_interval=1),
                dataset=Rollouts(dataloader_type="external"),
            ),
            forward_step,
        )
    finally:
        train.train_step = own
    return [norm for norm, _ in found], found[0][1]


LOCAL = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "params_dtype": torch.float32,
    "bf16": False,
    "seq_length": 14,
}
"""Of its provider: what runs without Transformer Engine."""


def main() -> int:
    """Run all; 1 where Bridge's gradient norms are not those by hand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bridge", type=Path, required=True, help="a checkout of Megatron-Bridge")
    parser.add_argument("--megatron", type=Path, required=True, help="one of the Megatron-LM in its 3rdparty")
    parsed = parser.parse_args()
    # They ask for Python 3.12.
    typing.override = typing_extensions.override
    sys.path[:0] = [str(parsed.megatron), str(parsed.bridge / "src")]
    # Megatron-LM must find out that Transformer Engine is absent; Bridge imports it all the same.
    for name in ("core.models.hybrid.hybrid_layer_specs", "core.optimizer", "training.models"):
        importlib.import_module(f"megatron.{name}")
    sys.meta_path.append(Absent([name for name in ABSENT if importlib.util.find_spec(name) is None]))
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29521",
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    device.install()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        peer_training.write_model(Path(folder))
        for name, keys in RUNS.items():
            norms, metrics = bridge(Path(folder), keys)
            wanted = by_hand(Path(folder), high=HIGH if keys else 0.0)
            off = max(abs(one - other) / other for one, other in zip(norms, wanted, strict=True))
            failed |= not off < peer_training.TOLERANCE
            print(name, "Megatron-Bridge", norms, "by hand", wanted, f"apart {off:.1e}", metrics, sep="; ", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
