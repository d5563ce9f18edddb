# SPDX-License-Identifier: Apache-2.0
"""Records ``numbers.json.xz`` anew: corrections of five frameworks' own code on a CPU, and ours in it.

Their code is not part of this repository. With a clone of each at its revision, torch, ray, omegaconf and what else
their modules of losses import, from the repository's root:

    python lab/peers/peer_corrections/record.py --skyrl ~/SkyRL --openrlhf ~/OpenRLHF --roll ~/ROLL --areal ~/AReaL

and with ``--ms_swift ~/ms-swift``.

``--check`` writes nothing, and compares with the file. OpenRLHF 0.11.2 is a second host, ``--openrlhf_0_11_2``: a
folder with the package. A host that is not given is not recorded anew.
Modules of theirs that import engines and loggers run without those (``ABSENT``): no loss calls them. The largest
difference of both is printed.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import lzma
import math
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "data" / "peer_corrections" / "numbers.json.xz"
REVISIONS = {
    "skyrl": "a9564572eb8e91076be43c1bd5e4615e3de17265",
    "openrlhf": "3c3be6234e0cb353e76bb8019947db9dfe99fca7",
    "openrlhf_0_11_2": "0.11.2",
    "roll": "8eb27cc2dc34c4d1310b169d9b86d339004d811a",
    "areal": "4aef98d8d818af55b43621aaadba047ae10f4e77",
    "ms_swift": "3602360a562313afbf2ef6065fdf61f271a2c5b9",
}
TOLERANCE = 2e-6
ABSENT = (
    "accelerate",
    "aiohttp",
    "cloudpathlib",
    "codetiming",
    "cv2",
    "dacite",
    "datasets",
    "deepspeed",
    "fastapi",
    "flash_attn",
    "httpx",
    "hydra",
    "imageio",
    "lark",
    "numba",
    "orjson",
    "peft",
    "ray",
    "skyrl_gym",
    "tenacity",
    "tensordict",
    "tinker",
    "torchdata",
    "transfer_queue",
    "trl",
    "uvloop",
    "vllm",
)
"""Packages that are imported and not called."""

sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

import peer_correction_cases as cases  # noqa: E402
import verl_cases  # noqa: E402


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not there."""

    def __init__(self, names: Sequence[str] = ABSENT) -> None:
        self.names = names

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        is_absent = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        """It is complete."""


def without_init(clone: Path, *names: str) -> None:
    """Packages whose ``__init__`` imports whole trainers."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(clone / name.replace(".", "/"))]
        sys.modules[name] = module


def gradient(loss_fn: Any, current: torch.Tensor) -> dict[str, Any]:
    """A loss of the current log-probs, and its gradient."""
    current = current.clone().requires_grad_()
    loss = loss_fn(current)
    loss.backward()
    return {"loss": loss.tolist(), "gradient": current.grad.tolist()}


def skyrl(clone: Path, batches: Mapping[str, Any]) -> dict[str, Any]:
    """Losses of SkyRL's registry: its regular one with a correction, and ours."""
    parts = ("backends", "backends.skyrl_train", "backends.skyrl_train.utils", "train")
    without_init(clone, "skyrl", *(f"skyrl.{part}" for part in parts))
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config import AlgorithmConfig

    from mis_ext.hosts.skyrl import register

    def numbers(name: str, config: Any, batch: Any) -> dict[str, Any]:
        loss_fn, rest = PolicyLossRegistry.get(name), (batch["old_log_prob"], batch["advantages"], config)
        more = batch["response_mask"].float(), batch["rollout_log_prob"]
        return gradient(lambda current: loss_fn(current, *rest, *more)[0], batch["log_prob"])

    found = {}
    for name, (settings, keys) in cases.SKYRL.items():
        config = AlgorithmConfig()
        for key, value in settings.items():
            setattr(config.off_policy_correction, key, value)
        register(keys)
        found[name] = {
            each: [numbers(one, config, batch) for one in ("regular", "mis_ext")] for each, batch in batches.items()
        }
    return found


def openrlhf(clone: Path, batches: Mapping[str, Any], named: Mapping[str, Any] = cases.OPENRLHF) -> dict[str, Any]:
    """Losses of OpenRLHF's class, and of ours around it."""
    for module in [each for each in sys.modules if each.startswith("openrlhf.")]:
        del sys.modules[module]
    without_init(clone, "openrlhf", "openrlhf.models")
    from openrlhf.models.loss import PolicyLoss

    from mis_ext.hosts.openrlhf import MisLoss

    def numbers(loss_fn: Any, batch: Any, sizes: Any) -> dict[str, Any]:
        rest = batch["old_log_prob"], batch["advantages"], batch["response_mask"].float(), batch["rollout_log_prob"]
        return gradient(lambda current: loss_fn(current, *rest, **sizes)[0], batch["log_prob"])

    return {
        name: {
            f"{each}, {said}": [
                numbers(one, batch, sizes) for one in (PolicyLoss(**settings), MisLoss(PolicyLoss(**settings), keys))
            ]
            for each, batch in batches.items()
            for said, sizes in cases.SIZES.items()
        }
        for name, (settings, keys) in named.items()
    }


def openrlhf_0_11_2(folder: Path, batches: Mapping[str, Any]) -> dict[str, Any]:
    """The same of that version."""
    return openrlhf(folder, batches, cases.OPENRLHF_0_11_2)


def roll(clone: Path, batches: Mapping[str, Any]) -> dict[str, Any]:
    """Weights and masks of ROLL's function, and of ours in its place."""
    without_init(clone, "roll", "roll.utils", "roll.pipeline", "roll.pipeline.agentic")
    from roll.utils import train_infer_corrections as module

    from mis_ext.hosts.roll import register

    own = module.compute_train_infer_correction

    def numbers(function: Any, settings: Any, batch: Any) -> dict[str, Any]:
        mask = batch["response_mask"]
        weights, kept, _ = function(cases.roll_config(settings), mask, batch["old_log_prob"], batch["rollout_log_prob"])
        return {"weights": (weights * kept * mask).tolist(), "kept": (kept * mask).float().tolist()}

    found = {}
    for name, (settings, keys) in cases.ROLL.items():
        register(keys)
        both = own, module.compute_train_infer_correction
        found[name] = {each: [numbers(one, settings, batch) for one in both] for each, batch in batches.items()}
    return found


def areal(clone: Path, batches: Mapping[str, Any]) -> dict[str, Any]:
    """Losses of AReaL's actor on packed tokens: with its own function, and with ours around it."""
    parts = ("api", "engine", "engine.fsdp_utils", "infra", "trainer", "trainer.ppo")
    without_init(clone, "areal", *(f"areal.{part}" for part in parts))
    # What its controllers, of which no loss is computed, derive from.
    sys.modules["areal.api"].TrainEngine = sys.modules["areal.infra"].TrainController = object
    controllers = types.SimpleNamespace(GatewayTrainController=object)
    sys.modules["areal.experimental.training_service.controller.controller"] = controllers
    sys.modules["areal.infra.rpc.serialization"] = MagicMock()
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.trainer.ppo import actor
    from areal.utils import stats_tracker

    from mis_ext.hosts.areal import MisLoss

    own = actor.ppo_actor_loss_fn

    def numbers(loss_fn: Any, settings: dict[str, Any], batch: Any) -> dict[str, Any]:
        actor.ppo_actor_loss_fn = loss_fn
        bounds = settings.get("rejection_sampling")
        said = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None} | settings
        said["rejection_sampling"] = None if bounds is None else RejectionSamplingConfig(**bounds)
        names = {"logprobs": "rollout_log_prob", "prox_logp": "old_log_prob", "advantages": "advantages"}
        data = {theirs: batch[name].flatten() for theirs, name in names.items()}
        data |= {"loss_mask": batch["response_mask"].flatten(), "cu_seqlens": cases.cu_seqlens(batch)}
        found = gradient(
            lambda current: actor.grpo_loss_fn(current, torch.zeros_like(current), data, **said),
            batch["log_prob"].flatten(),
        )
        logged = stats_tracker.export()
        assert (loss_fn is own) != any(name.startswith("pg_") for name in logged), logged
        return found

    return {
        name: {
            each: [numbers(one, settings, batch) for one in (own, MisLoss(own, keys))]
            for each, batch in batches.items()
        }
        for name, (settings, keys) in cases.AREAL.items()
    }


def ms_swift(clone: Path, batches: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of ms-swift's trainer, and of ours in its place."""
    without_init(clone, "swift", "swift.rlhf_trainers")
    beside = ("arguments", "gkd_helpers", "rollout_mixin", "utils")
    parts = ("dataset", "rewards", "rl_core", "rl_core.advantage", "rl_core.data", "rl_core.grpo_algorithm")
    parts += ("sequence_parallel", "template", "trainers", "utils", *(f"rlhf_trainers.{name}" for name in beside))
    for part in parts:
        sys.modules[f"swift.{part}"] = MagicMock(__path__=[])
    utils = sys.modules["swift.utils"]
    utils.is_wandb_available = utils.is_swanlab_available = lambda: False
    import trl

    # What its trainer derives from, of which no weight is computed.
    bases = {trl: "GRPOTrainer", sys.modules["swift.trainers"]: "SwiftMixin"}
    bases[sys.modules["swift.rlhf_trainers.rollout_mixin"]] = "RolloutTrainerMixin"
    for module, name in bases.items():
        setattr(module, name, type(name, (), {"__init__": lambda _: None, "log": lambda _: None}))
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    from mis_ext.hosts.ms_swift import register

    own = GRPOTrainer._get_rollout_is_correction

    def numbers(function: Any, mode: str, batch: Any) -> dict[str, Any]:
        trainer = cases.swift_trainer(GRPOTrainer.__new__(GRPOTrainer), mode)
        mask = batch["response_mask"]
        _, weights = function(trainer, batch["old_log_prob"], batch["rollout_log_prob"], mask)
        return {"weights": (weights * mask).tolist()}

    found = {}
    for mode, (_, keys) in cases.MS_SWIFT.items():
        register(keys)
        both = own, GRPOTrainer._get_rollout_is_correction
        found[mode] = {each: [numbers(one, mode, batch) for one in both] for each, batch in batches.items()}
    return found


def largest(wanted: Any, found: Any) -> float:
    """Largest difference of two trees of numbers."""
    if isinstance(wanted, dict):
        return max(largest(wanted[key], found[key]) for key in wanted)
    difference = float((torch.tensor(wanted).double() - torch.tensor(found).double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skyrl", type=Path, help=f"a checkout of {REVISIONS['skyrl']}")
    parser.add_argument("--openrlhf", type=Path, help=f"a checkout of {REVISIONS['openrlhf']}")
    parser.add_argument("--openrlhf_0_11_2", type=Path, help=f"a checkout of {REVISIONS['openrlhf_0_11_2']}")
    parser.add_argument("--roll", type=Path, help=f"a checkout of {REVISIONS['roll']}")
    parser.add_argument("--areal", type=Path, help=f"a checkout of {REVISIONS['areal']}")
    parser.add_argument("--ms_swift", type=Path, help=f"a checkout of {REVISIONS['ms_swift']}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parsed = parser.parse_args(arguments)
    sys.meta_path.append(Absent())
    batches = verl_cases.batches()
    recorders = {"skyrl": skyrl, "openrlhf": openrlhf, "openrlhf_0_11_2": openrlhf_0_11_2, "roll": roll, "areal": areal}
    recorders["ms_swift"] = ms_swift
    given = {name: recorder for name, recorder in recorders.items() if getattr(parsed, name)}
    both = {name: recorder(getattr(parsed, name), batches) for name, recorder in given.items()}
    worst = {
        f"{host} {name}": max(largest(own, ours) for own, ours in found.values())
        for host, losses in both.items()
        for name, found in losses.items()
    }
    for name, difference in worst.items():
        print(f"{difference:9.1e}  {name}")
    differ = [name for name, difference in worst.items() if not difference <= TOLERANCE]
    print(f"{len(worst)} corrections, {len(differ)} differ by more than {TOLERANCE:g}: {differ}")
    numbers = {
        host: {name: {each: own for each, (own, _) in found.items()} for name, found in losses.items()}
        for host, losses in both.items()
    }
    with lzma.open(FILE, "rt") as file:
        recorded = json.load(file)
    if parsed.check:
        off = largest({host: recorded["numbers"][host] for host in numbers}, numbers)
        print(f"their own numbers differ from the file by at most {off:.1e}")
        return int(bool(differ) or off > TOLERANCE)
    inputs = {each: {name: tensor.tolist() for name, tensor in batch.items()} for each, batch in batches.items()}
    content = {"revisions": REVISIONS, "worst": recorded["worst"] | worst, "batches": inputs}
    content["numbers"] = recorded["numbers"] | numbers
    FILE.write_bytes(lzma.compress(json.dumps(content).encode()))
    return int(bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
