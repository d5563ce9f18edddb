# SPDX-License-Identifier: Apache-2.0
"""Records ``training.json.xz`` anew: real updates by other frameworks' own workers on a CPU, with ours and without.

Their code is not part of this repository. With a clone of one or more at its revision, and what their trainers import,
from the repository's root:

    python lab/peers/peer_training/train.py --skyrl ~/SkyRL --openrlhf ~/OpenRLHF [--check]

Likewise ``--nemo-rl``, ``--roll`` and ``--prime-rl``. Each trains a tiny random Llama: it scores the rollout itself,
then takes its optimizer steps. Rollouts are made up, and the same in every run. ``lab/hosts/host_cpu/device.py``
stands for CUDA; packages of engines are absent. ``--check`` writes nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace as space
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DATA = ROOT / "tests" / "data"
FILE = DATA / "peer_training" / "training.json.xz"

sys.path += [str(ROOT / "tests" / "support"), str(HERE.parent / "peer_corrections"), str(ROOT), str(ROOT / "lab/hosts")]

import peer_correction_cases  # noqa: E402
import peer_training  # noqa: E402
import peer_training_cases as cases  # noqa: E402
from host_cpu import device  # noqa: E402
from record import ABSENT, REVISIONS, Absent, without_init  # noqa: E402

with lzma.open(DATA / "peer_losses" / "numbers.json.xz", "rt") as file:
    REVISIONS |= json.load(file)["revisions"]
LOGGERS = ("mlflow", "swanlab")
OF_PRIME_RL = (
    "deep_ep",
    "dion",
    "fla",
    "flash_attn",
    "mooncake",
    "modelexpress",
    "nixl",
    "openai",
    "prime",
    "prime_cli",
    "prime_kernels",
    "prometheus_client",
    "renderers",
    "ring_flash_attn",
    "setproctitle",
    "tilelang",
    "torchao",
    "torchtitan",
    "triton",
    "uvloop",
    "verifiers",
    "vllm",
    "wandb",
    "wandb_gql",
    "wandb_workspaces",
)
NOTHING = (
    "ref_logprobs",
    "lora_num_tokens",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)
"""What a micro-batch of prime-rl may have, and has not."""


def skyrl(clone: Path, model: Path) -> dict[str, Any]:
    """Updates by SkyRL's FSDP worker of a policy, in this process."""
    sys.path[:0] = [str(clone), str(clone / "skyrl-gym")]
    # It imports the server of its API.
    without_init(clone, "skyrl.backends")
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.train.config import MixedPrecisionConfig, TrainerConfig

    from mis_ext.hosts.skyrl import register

    def run(case: dict[str, Any]) -> dict[str, Any]:
        config = TrainerConfig()
        config.policy.model.path = str(model)
        config.policy.optimizer_config.lr = 1e-3
        config.policy.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32")
        config.flash_attn = config.use_expandable_segments = config.remove_microbatch_padding = False
        config.micro_train_batch_size_per_gpu = config.micro_forward_batch_size_per_gpu = 4
        config.algorithm.use_kl_loss, config.algorithm.temperature = False, 1.0
        for name, value in case.get("options", {}).items():
            setattr(config.algorithm.off_policy_correction, name, value)
        if "keys" in case:
            register(case["keys"])
            config.algorithm.policy_loss_type = "mis_ext"
        worker = FSDPPolicyWorkerBase(
            cfg=config, world_size=1, rank=0, local_rank=0, master_addr="", master_port=0, sequence_parallel_size=1
        )
        worker.init_worker_process_group()
        worker.init_model(str(model), num_training_steps=100)
        steps: list[dict[str, float]] = []
        for rollout in peer_training.rollouts():
            width = rollout["mask"].shape[1]
            mask = rollout["mask"].float()
            data = TrainingInputBatch(
                {
                    "sequences": rollout["sequences"],
                    "attention_mask": rollout["attention_mask"],
                    "response_mask": rollout["mask"].long(),
                    "loss_mask": mask,
                    "rollout_logprobs": rollout["behavior"],
                }
            )
            data.metadata = {"response_length": width}
            rows = worker.forward(data).loss_fn_outputs
            data["action_log_probs"] = torch.tensor([row["logprobs"] for row in rows])
            data["advantages"] = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
                rollout["advantages"][:, None] * mask, mask, "token_mean", 4, width
            )
            for _ in range(peer_training.EPOCHS):
                metrics = worker.forward_backward(data).metrics
                steps.append(metrics | {"grad_norm": worker.optim_step()})
        weights = worker.model.model.state_dict()
        return recorded(steps, {name: tensor.full_tensor() for name, tensor in weights.items()})

    return {name: run(case) for name, case in cases.SKYRL.items()}


def openrlhf(clone: Path, model: Path) -> dict[str, Any]:
    """Updates by OpenRLHF's trainer of the actor, with DeepSpeed, in this process."""
    sys.path.insert(0, str(clone))
    without_init(clone, "openrlhf.trainer", "openrlhf.trainer.ray")
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    def run(case: dict[str, Any]) -> dict[str, Any]:
        adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        args = space(
            local_rank=-1,
            vllm=space(sync_backend="gloo"),
            ds=space(param_dtype="fp32", packing_samples=False, tensor_parallel_size=1, ring_attn_size=1, zpg=1),
            train=space(
                max_epochs=peer_training.EPOCHS, dynamic_batch_enable=False, colocate_all=False, async_enable=False
            ),
            actor=space(
                eps_clip_low_high=(0.2, 0.2),
                dual_clip=None,
                policy_loss_type="ppo",
                aux_loss_coef=0.0,
                entropy_coef=None,
            ),
            algo=space(
                kl=space(use_loss=False),
                advantage=space(
                    is_correction_enable="own" in case,
                    is_correction_threshold=[0.5, 1.2],
                    is_correction_type=case.get("own", "tis"),
                ),
            ),
        )
        strategy = DeepspeedStrategy(
            max_norm=1.0, micro_train_batch_size=4, train_batch_size=8, zero_stage=2, args=args
        )
        strategy.setup_distributed()
        torch.manual_seed(0)
        config = {"optim": "adam", "adam": adam, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0}
        config |= {"min_lr_ratio": 1.0, "max_norm": 1.0, "scheduler_steps": 100}
        actor = Actor(str(model), attn_implementation="eager").float()
        actor, optimizer, scheduler = strategy.prepare((actor, config))
        keys = model / "mis.yaml"
        keys.write_text(json.dumps(case.get("keys")))
        trainer = (with_lines(clone, keys) if "keys" in case else ActorPPOTrainer)(
            strategy, actor, None, optimizer, scheduler, micro_train_batch_size=4, dataloader_pin_memory=False
        )
        steps: list[dict[str, float]] = []
        for rollout in peer_training.rollouts():
            with torch.no_grad():
                old = actor(rollout["sequences"], rollout["mask"], attention_mask=rollout["attention_mask"])
            experience = Experience(
                sequences=rollout["sequences"],
                attention_mask=rollout["attention_mask"],
                action_mask=rollout["mask"],
                action_log_probs=old.detach(),
                rollout_log_probs=rollout["behavior"],
                advantages=rollout["advantages"][:, None] * rollout["mask"],
                info={},
            )
            trainer.replay_buffer.append(experience)
            steps.append(trainer.ppo_train(kl_ctl=0.0))
            trainer.replay_buffer.clear()
        return recorded(steps, actor.model.module.state_dict())

    return {name: run(case) for name, case in cases.OPENRLHF.items()}


def nemo_rl(clone: Path, model: Path) -> dict[str, Any]:
    """Updates by NeMo-RL's DTensor worker, in this process."""
    sys.path.insert(0, str(clone))
    import ray

    # It asks Ray for its GPU, starts NCCL, and marks ranges for a profiler.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = device.always(None)
    ray.get_gpu_ids = device.always([0])
    torch.distributed.init_process_group = device.always(None)
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorkerImpl
    from transformers import AutoTokenizer

    from mis_ext.hosts.nemo_rl import MisLoss

    off = {"enabled": False}
    config = {
        "model_name": str(model),
        "generation": {"colocated": off, "top_k": None, "top_p": 1.0, "temperature": 1.0},
        "dtensor_cfg": {
            "cpu_offload": False,
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "activation_checkpointing": False,
            "custom_parallel_plan": None,
        },
        "offload_optimizer_for_logprob": False,
        "max_grad_norm": 1.0,
        "precision": "float32",
        "sequence_packing": off,
        "dynamic_batching": off,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "weight_decay": 0.0}},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 4,
    }

    def run(case: dict[str, Any]) -> dict[str, Any]:
        worker = DTensorPolicyWorkerImpl(config, AutoTokenizer.from_pretrained(model), init_reference_model=False)
        loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **case.get("options", {})))
        loss_fn = MisLoss(loss_fn, case["keys"]) if "keys" in case else loss_fn
        steps: list[dict[str, float]] = []
        for rollout in peer_training.rollouts():
            mask = torch.nn.functional.pad(rollout["mask"], (2, 0))
            data = BatchedDataDict(
                input_ids=rollout["sequences"],
                input_lengths=rollout["attention_mask"].sum(1),
                token_mask=mask.float(),
                sample_mask=torch.ones(len(mask)),
                advantages=rollout["advantages"][:, None] * mask,
                generation_logprobs=torch.nn.functional.pad(rollout["behavior"], (2, 0)),
            )
            data["prev_logprobs"] = worker.get_logprobs(data)["logprobs"]
            for _ in range(peer_training.EPOCHS):
                found = worker.train(data, loss_fn)
                # As its grpo_train does with what is in all micro-batches.
                sums = {name: float(sum(values)) for name, values in found["all_mb_metrics"].items()}
                steps.append(sums | {"grad_norm": float(found["grad_norm"])})
        weights = worker.model.state_dict()
        return recorded(steps, {name: tensor.full_tensor() for name, tensor in weights.items()})

    return {name: run(case) for name, case in cases.NEMO_RL.items()}


def roll(clone: Path, model: Path) -> dict[str, Any]:
    """Updates with the correction of ROLL's driver and the loss of its worker; the optimizer's loop stands in."""
    sys.path.insert(0, str(clone))
    # It writes its log below the current folder.
    os.chdir(model)
    without_init(clone, "roll.pipeline", "roll.pipeline.rlvr")
    from roll.distributed.scheduler.protocol import DataProto
    from roll.distributed.strategy.strategy import TrainStrategy
    from roll.pipeline.rlvr.actor_worker import ActorWorker
    from roll.utils import train_infer_corrections as corrections
    from transformers import LlamaForCausalLM

    from mis_ext.hosts.roll import register

    own = corrections.compute_train_infer_correction

    def run(case: dict[str, Any]) -> dict[str, Any]:
        corrections.compute_train_infer_correction = own
        if "keys" in case:
            register(case["keys"])
        config = space(
            train_infer_correction=peer_correction_cases.roll_config(case.get("options", {})),
            enable_old_logprobs_recompute=True,
            loss_agg_mode="token-mean",
            importance_sampling="token",
            use_pg_clip_range=False,
            pg_clip=0.2,
            dual_clip_loss=True,
            use_kl_loss=False,
            kl_loss_coef=0.0,
            rl_loss_coef=1.0,
            entropy_loss_coef=0.0,
            difficulty_loss_weight=False,
            length_loss_weight=False,
        )
        log_probs = functools.partial(TrainStrategy.op_compute_log_probs, None)
        worker = space(pipeline_config=config, strategy=space(op_compute_log_probs=log_probs), logger=None)
        for name in ("get_old_log_probs_with_cache", "compute_sample_weights"):
            setattr(worker, name, functools.partial(getattr(ActorWorker, name), worker))
        policy = LlamaForCausalLM.from_pretrained(model)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        steps: list[dict[str, float]] = []
        for rollout in peer_training.rollouts():
            mask = torch.nn.functional.pad(rollout["mask"].long(), (2, 0))
            ids = rollout["sequences"]

            def logits(ids: torch.Tensor = ids, seen: torch.Tensor = rollout["attention_mask"]) -> torch.Tensor:
                return policy(ids, attention_mask=seen).logits

            old = log_probs(logits=logits(), input_ids=ids, attention_mask=mask).detach()
            engine = torch.nn.functional.pad(rollout["behavior"], (1, 0))
            data = DataProto.from_dict(
                {
                    "input_ids": ids,
                    "response_mask": mask,
                    "advantages": rollout["advantages"][:, None] * mask[:, 1:],
                    "ref_log_probs": old,
                    "old_log_probs": old,
                    "infer_logprobs": engine,
                }
            )
            data, logged = corrections.apply_train_infer_correction_to_batch(config, data)
            data.meta_info["batch_num_tokens"] = {"response_mask": data.batch["response_mask"][:, 1:].sum()}
            data.meta_info["global_valid_samples"] = {"response_mask": torch.tensor(len(ids))}
            for _ in range(peer_training.EPOCHS):
                loss, metrics = ActorWorker.loss_func(worker, data, logits())
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                steps.append(logged | metrics | {"grad_norm": float(norm)})
        return recorded(steps, policy.state_dict())

    return {name: run(case) for name, case in cases.ROLL.items()}


def prime_rl(clone: Path, model: Path) -> dict[str, Any]:
    """Steps of prime-rl's whole ``train``, in this process. Its model needs flash-attn: Transformers' stands in."""
    sys.path[:0] = [str(clone / path) for path in ("src", "packages/prime-rl-configs/src")]
    sys.meta_path.insert(0, Absent(OF_PRIME_RL))
    from prime_rl import monitors
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.trainer.models.layers.lm_head import inject_prime_lm_head
    from prime_rl.trainer.rl import train as module
    from transformers import LlamaForCausalLM

    class Data:
        """Stands for its loader: one sample a micro-batch."""

        def __init__(self, *_: object) -> None:
            self.rollouts = iter(peer_training.rollouts())

        def wait_for_batch(self) -> None:
            """It is there."""

        def get_batch(self) -> list[dict[str, Any]]:
            found = []
            for row in _rows(next(self.rollouts)):
                size = row["input_ids"].shape[1]
                ones = {"position_ids": torch.arange(size)[None], "temperatures": torch.ones(1, size)}
                lengths = {"sequence_lengths": [size], "seq_lens": torch.tensor([size]), "env_names": ["all"] * size}
                found.append(row | ones | lengths | dict.fromkeys(NOTHING))
            return found

    # Its own is for FSDP and experts, of torchtitan.
    module.clip_grad_norm_ = lambda _, policy, most, *__: torch.nn.utils.clip_grad_norm_(policy.parameters(), most)

    async def no_setup(**_: Any) -> None:
        """A process may set it up once."""

    monitors.setup = no_setup
    # It ends with its process.
    torch.distributed.destroy_process_group = device.always(None)
    nothing = device.always(0.0)
    module.get_perf_counter = device.always(space(get_step_tokens_per_second=nothing, get_step_mfu=nothing))
    module.setup_torch_distributed = device.always(None)
    module.FakeDataLoader = Data

    def run(case: dict[str, Any]) -> dict[str, Any]:
        policy = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager")
        inject_prime_lm_head(policy, chunk_size=None)
        module.setup_model = device.always(policy)
        steps: list[dict[str, float]] = [{} for _ in range(peer_training.ROLLOUTS)]

        async def log(metrics: dict[str, float], step: int) -> None:
            steps[step - 1].update(metrics)

        monitors.log = log
        sizes = {"name": str(model), "seq_len": 128, "impl": "hf", "attn": "flash_attention_2"}
        dtypes = {"optimization_dtype": "float32", "reduce_dtype": "float32", "ac": None, "ac_offloading": None}
        loss = {"type": "custom", "import_path": "mis_ext.hosts.prime_rl.loss", "kwargs": {"keys": case.get("keys")}}
        config = TrainerConfig(
            model=sizes | dtypes,
            data={"fake": {"batch_size": 8}},
            max_steps=peer_training.ROLLOUTS,
            output_dir=model / "out",
            optim={"lr": 1e-3},
            loss=case.get("options", loss),
        )
        module.train(config)
        names = {name for name in steps[0] if not name.startswith(("perf/", "time/", "step", "disk"))}
        return recorded([{name: step.get(name) for name in names} for step in steps], policy.state_dict())

    return {name: run(case) for name, case in cases.PRIME_RL.items()}


def _rows(rollout: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Its samples as prime-rl holds them, without padding."""
    whole = {
        "input_ids": rollout["sequences"],
        "advantages": rollout["advantages"][:, None].expand(-1, rollout["sequences"].shape[1]),
        "inference_logprobs": torch.nn.functional.pad(rollout["behavior"], (2, 0)),
        "loss_mask": torch.nn.functional.pad(rollout["mask"], (2, 0)),
    }
    sizes = rollout["attention_mask"].sum(1).tolist()
    return [{name: each[row : row + 1, :size] for name, each in whole.items()} for row, size in enumerate(sizes)]


def with_lines(clone: Path, keys: Path) -> Any:
    """OpenRLHF's trainer of the actor with the lines of docs/guide/openrlhf.md in it."""
    path = clone / "openrlhf" / "trainer" / "ray" / "ppo_actor.py"
    page = (ROOT / "docs" / "guide" / "openrlhf.md").read_text()
    text = peer_training.with_openrlhf_lines(path.read_text(), page=page, keys=keys)
    module = types.ModuleType("openrlhf.trainer.ray.ppo_actor_with_lines")
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module.ActorPPOTrainer


def recorded(steps: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Numbers of every step by name, and the weights after the last."""
    names = [name for name, value in steps[0].items() if isinstance(value, (int, float))]
    found = {
        "steps": {name: [step[name] for step in steps] for name in names},
        "weights": peer_training.digest(weights),
    }
    print(peer_training.norms_of(found), len(names), flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    recorders = {"skyrl": skyrl, "openrlhf": openrlhf, "nemo_rl": nemo_rl, "roll": roll, "prime_rl": prime_rl}
    parser.add_argument("--skyrl", type=Path, help="a checkout, as the others")
    parser.add_argument("--openrlhf", type=Path)
    parser.add_argument("--nemo-rl", type=Path)
    parser.add_argument("--roll", type=Path)
    parser.add_argument("--prime-rl", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parsed = parser.parse_args(arguments)
    # Both have another way where this one cannot be imported.
    sys.modules["flash_attn.ops.triton.cross_entropy"] = None
    sys.meta_path.append(Absent([name for name in (*ABSENT, *LOGGERS) if importlib.util.find_spec(name) is None]))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    device.install()
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    chosen = [name for name in recorders if getattr(parsed, name) is not None]
    for name in chosen:
        git = ["git", "-C", str(getattr(parsed, name)), "rev-parse", "HEAD"]
        found = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        if found != REVISIONS[name]:
            parser.error(f"{getattr(parsed, name)} is at {found}, the numbers are of {REVISIONS[name]}")
    recorded_before = json.loads(lzma.decompress(FILE.read_bytes()))["runs"] if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        peer_training.write_model(Path(folder))
        runs = {name: recorders[name](getattr(parsed, name).resolve(), Path(folder)) for name in chosen}
    faults = [fault for name in runs for fault in peer_training.faults(runs[name], cases.CASES[name])]
    print("\n".join(faults) or "all runs are as they must be")
    if not parsed.check:
        packages = ("torch", "transformers", "ray", "peft", "deepspeed")
        versions = {package: importlib.metadata.version(package) for package in packages}
        content = {"revisions": REVISIONS, "versions": versions, "runs": recorded_before | runs}
        FILE.write_bytes(lzma.compress(json.dumps(content).encode()))
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
