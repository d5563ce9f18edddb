# SPDX-License-Identifier: Apache-2.0
"""Records ``numbers.json.xz`` again: what verl's own code computes, with its own correction and with ours.

verl's code is not part of this repository. With a clone of it, in an environment with torch, tensordict, omegaconf,
ray, transformers and orjson, from the repository's root:

    python lab/peers/verl/record.py --verl ~/verl [--check]

It runs at one revision (``REVISION``). Every preset, every criterion and every loss runs on the batches of
``tests/support/verl_cases.py``: first as verl is, then after ``mis_ext.hosts.verl.register`` with the converted
options. The largest difference of both is printed, and must be below ``TOLERANCE``. ``--check`` writes nothing, and
compares verl's numbers with the file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import lzma
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "data" / "verl" / "numbers.json.xz"
REVISION = "1dda039b9c6311889a9c9a26040677e1254814f9"
TOLERANCE = 2e-6

sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

import verl_cases  # noqa: E402


def actor_config(info: dict[str, Any], **settings: Any) -> Any:
    """verl's own configuration of an actor."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    policy_loss = PolicyLossConfig(**settings.pop("policy_loss", {}))
    settings |= {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(**settings, policy_loss=policy_loss, global_batch_info=info)


def value_and_gradient(function: Any, batch: dict, **arguments: Any) -> dict[str, Any]:
    """A policy loss, and its gradient with respect to the current log-probs."""
    current = batch["log_prob"].clone().requires_grad_()
    tensors = {name: batch[name] for name in ("old_log_prob", "advantages", "response_mask")}
    loss, _ = function(log_prob=current, **tensors | arguments)
    loss.backward()
    return {"loss": loss.detach().tolist(), "gradient": current.grad.tolist()}


def corrected(options: dict[str, Any], batch: dict) -> dict[str, Any]:
    """The result of verl's trainer, or of its bypass mode, for these options with the registered correction."""
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper as helper
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = RolloutCorrectionConfig(**options)
    if config.bypass_mode:
        # As in verl's trainer, the old log-probs are those of the rollout.
        batch = batch | {"old_log_prob": batch["rollout_log_prob"]}
        actor = actor_config(
            dict(verl_cases.GLOBAL), policy_loss={"loss_mode": "bypass_mode", "rollout_correction": config}
        )
        return value_and_gradient(
            get_policy_loss_fn("bypass_mode"), batch, config=actor, loss_agg_mode="token-mean", rollout_is_weights=None
        )
    tensors = {f"{name}s": batch[name] for name in ("old_log_prob", "rollout_log_prob")}
    data = DataProto.from_dict(tensors | {"response_mask": batch["response_mask"]})
    data, _ = helper.compute_rollout_correction_and_add_to_batch(data, config)
    mask, weights = data.batch["response_mask"], data.batch.get("rollout_is_weights", None)
    found = value_and_gradient(
        get_policy_loss_fn("vanilla"),
        batch | {"response_mask": mask},
        config=actor_config(dict(verl_cases.GLOBAL)),
        loss_agg_mode="token-mean",
        rollout_is_weights=weights,
    )
    weights = torch.ones_like(batch["log_prob"]) if weights is None else weights
    return found | {"mask": mask.int().tolist(), "weights": torch.where(mask, weights, 0.0).tolist()}


def presets() -> dict[str, dict[str, Any]]:
    """verl's own presets, all of them."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    found = {}
    for name, method in inspect.getmembers(RolloutCorrectionConfig, inspect.ismethod):
        if method.__self__ is RolloutCorrectionConfig and not name.startswith("_"):
            config = method()
            found[f"preset {name}"] = {field: getattr(config, field) for field in config.__dataclass_fields__}
    return found


def mask_of(options: dict[str, Any], batch: dict) -> list[list[int]]:
    """The mask that verl keeps."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    tensors = [batch[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
    return helper.compute_rollout_correction_and_rejection_mask(*tensors, **options)[1].int().tolist()


def all_numbers() -> dict[str, Any]:
    """With unmodified verl, and with our functions registered."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    from mis_ext.hosts.verl import register
    from mis_ext.hosts.verl_options import convert_verl

    batches, own = verl_cases.batches(), dict(vars(rollout_corr_helper))
    options = presets() | verl_cases.OPTIONS
    options = {name: {"rollout_is": None} | of for name, of in options.items()}
    corrections, worst = {}, {}
    for name, of in options.items():
        rows = {each: corrected(of, batch) for each, batch in batches.items()}
        register(convert_verl(of).keys)
        ours = {each: corrected(of, batch) for each, batch in batches.items()}
        vars(rollout_corr_helper).update(own)
        worst[name] = largest(rows, ours)
        corrections[name] = {"options": of, "batches": rows}
    losses, registry = {}, dict(core_algos.POLICY_LOSS_REGISTRY)
    for name, (settings, keys, mode) in verl_cases.LOSSES.items():
        loss_mode = name.partition(",")[0]
        found = {"plain": {}, "global": {}}, {"plain": {}, "global": {}}
        for side, loss in enumerate((loss_mode, "bypass_mode" if loss_mode in verl_cases.OF_BYPASS else "mis_ext")):
            if side == 1:
                register(keys)
            for kind, info in (("plain", {}), ("global", verl_cases.GLOBAL)):
                for each, batch in batches.items():
                    torch.manual_seed(0)
                    given = {"config": actor_config(dict(info), **dict(settings)), "loss_agg_mode": mode}
                    found[side][kind][each] = value_and_gradient(core_algos.get_policy_loss_fn(loss), batch, **given)
        core_algos.POLICY_LOSS_REGISTRY.clear()
        core_algos.POLICY_LOSS_REGISTRY.update(registry)
        vars(rollout_corr_helper).update(own)
        losses[name], worst[f"loss {name}"] = found[0], largest(*(comparable(name, each) for each in found))
    inputs = {each: {name: tensor.tolist() for name, tensor in batch.items()} for each, batch in batches.items()}
    found = {"revision": REVISION, "worst": worst, "batches": inputs, "corrections": corrections, "losses": losses}
    batch = verl_cases.beyond()
    rejecting = {name: of for name, of in verl_cases.OPTIONS.items() if "rollout_rs" in of and "rollout_is" not in of}
    return found | {"beyond": {name: mask_of(of, batch) for name, of in rejecting.items()}}


def comparable(name: str, found: dict) -> dict:
    """Losses with an equal denominator: no row is empty, and the micro-batch is the whole batch."""
    if name.partition(",")[0] not in verl_cases.DIVIDES_BY_ROWS:
        return found
    return {each: numbers for each, numbers in found["plain"].items() if each != "far"}


def largest(wanted: Any, found: Any) -> float:
    """Largest difference of two trees of numbers."""
    if isinstance(wanted, dict):
        return max(largest(wanted[key], found[key]) for key in wanted)
    difference = float((torch.tensor(wanted).double() - torch.tensor(found).double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verl", type=Path, required=True, help=f"a clone at {REVISION}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parsed = parser.parse_args(arguments)
    git = subprocess.run(["git", "-C", parsed.verl, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    if git.stdout.strip() != REVISION:
        parser.error(f"{parsed.verl} is at {git.stdout.strip()}, the numbers are of {REVISION}")
    sys.path.insert(0, str(parsed.verl))
    warnings.simplefilter("ignore")
    numbers = all_numbers()
    for name, difference in numbers["worst"].items():
        print(f"{difference:9.1e}  {name}")
    differ = [name for name, difference in numbers["worst"].items() if not difference <= TOLERANCE]
    print(f"{len(numbers['worst'])} of verl with ours in it, {len(differ)} differ by more than {TOLERANCE:g}: {differ}")
    if parsed.check:
        with lzma.open(FILE, "rt") as file:
            recorded = json.load(file)
        off = max(largest(recorded[part], numbers[part]) for part in ("batches", "losses"))
        for name, of in recorded["corrections"].items():
            off = max(off, largest(of["batches"], numbers["corrections"][name]["batches"]))
        off = max(off, float(recorded["beyond"] != numbers["beyond"]))
        print(f"verl's own numbers differ from the file by at most {off:.1e}")
        return int(bool(differ) or off > TOLERANCE)
    FILE.write_bytes(lzma.compress(json.dumps(numbers).encode()))
    return int(bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
