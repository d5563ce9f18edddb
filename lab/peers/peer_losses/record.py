# SPDX-License-Identifier: Apache-2.0
"""Records ``numbers.json.xz`` anew: losses and gradients of the own code of three trainers on a CPU, and ours in it.

Their code is not part of this repository. With a clone of each at its revision, and what their modules of losses
import (no GPU), from the repository's root:

    python lab/peers/peer_losses/record.py --prime-rl ~/prime-rl --nemo-rl ~/RL [--check]
    python lab/peers/peer_losses/record.py --rlinf [--check]   # where the packages rlinf, ray and omegaconf are

prime-rl builds our loss itself, from a configuration with its import path. NeMo-RL's loss is wrapped as a script of a
user wraps it. RLinf calls ours by its name in its registry. What is not asked for stays in the file as it is. The
largest difference is printed. ``--check`` writes nothing, and compares with the file.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import math
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "data" / "peer_losses" / "numbers.json.xz"
REVISIONS = {
    "prime_rl": "559b44772e471d1538537b8805cc77f3824a5e64",
    "nemo_rl": "7ea279abfbeb698b092856d0dab61e7cf39bc909",
}
RLINF = "0.3.0"
TOLERANCE = 2e-6

sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

import peer_cases  # noqa: E402
import verl_cases  # noqa: E402


def prime_rl(config: dict[str, Any], batch: dict, *, is_weighted: bool) -> dict[str, Any]:
    """The loss that prime-rl builds from a configuration, on a packed batch."""
    from prime_rl.configs.trainer import LossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
    from pydantic import TypeAdapter

    current = batch["log_prob"].clone().requires_grad_()
    loss, _ = compute_loss(
        trainer_logprobs=[*current],
        inference_logprobs=[*batch["rollout_log_prob"]],
        ref_logprobs=None,
        advantages=[*batch["advantages"]],
        loss_mask=[*batch["response_mask"]],
        rl_weights=[*peer_cases.weights_of(batch)] if is_weighted else None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=setup_rl_loss_fn(TypeAdapter(LossConfig).validate_python(config)),
        rl_scale=peer_cases.RL_SCALE,
        ce_scale=1,
        ref_kl_scale=1,
    )
    loss.backward()
    return {"loss": loss.tolist(), "gradient": current.grad.tolist()}


def nemo_rl(settings: dict[str, Any], batch: dict, keys: dict[str, Any] | None) -> dict[str, Any]:
    """NeMo-RL's loss, or ours around it, sent through pickle as to its workers."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from mis_ext.hosts.nemo_rl import MisLoss

    loss_fn: Any = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **settings))
    if keys is not None:
        loss_fn = pickle.loads(pickle.dumps(MisLoss(loss_fn, keys)))
    current = batch["log_prob"].clone().requires_grad_()
    loss, metrics = loss_fn(next_token_logprobs=current, data=peer_cases.nemo_data(batch), **peer_cases.SIZES)
    loss.backward()
    assert {"token_mult_prob_error", "gen_kl_error", "num_valid_samples"} <= set(metrics)
    return {"loss": loss.tolist(), "gradient": current.grad.tolist()}


def rlinf(loss_type: str, settings: dict[str, Any], batch: dict) -> dict[str, Any]:
    """What RLinf's registry has under a name: its own loss, or ours."""
    from rlinf.algorithms.registry import policy_loss

    current, zeros = batch["log_prob"].clone().requires_grad_(), torch.zeros_like(batch["log_prob"])
    loss, _ = policy_loss(
        task_type="reasoning",
        loss_type=loss_type,
        logprobs=current,
        old_logprobs=batch["rollout_log_prob"],
        proximal_logprobs=batch["old_log_prob"],
        advantages=batch["advantages"],
        loss_mask=batch["response_mask"].bool(),
        **dict.fromkeys(("values", "returns", "prev_values"), zeros),
        **{"value_clip": 1.0, "huber_delta": 1.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **settings},
    )
    loss.backward()
    return {"loss": loss.tolist(), "gradient": current.grad.tolist()}


def rlinf_numbers() -> tuple[dict[str, Any], dict[str, float]]:
    """Of RLinf, and how far ours in its registry is off."""
    from rlinf.algorithms.registry import register_policy_loss

    batches, own, worst = verl_cases.batches(), {}, {}
    for name, (loss_type, settings, keys) in peer_cases.RLINF.items():
        register_policy_loss("mis_ext")(functools.partial(peer_cases.rlinf_loss, keys=keys))
        found = [
            {each: rlinf(kind, settings, batch) for each, batch in batches.items()} for kind in (loss_type, "mis_ext")
        ]
        own[name], worst[f"RLinf {name}"] = found[0], largest(*found)
    return own, worst


def all_numbers() -> dict[str, Any]:
    """Of prime-rl and NeMo-RL, with their own loss and with ours."""
    own: dict[str, Any] = {"prime_rl": {}, "nemo_rl": {}}
    worst = {}
    batches = verl_cases.batches()
    for name, (config, keys) in peer_cases.PRIME_RL.items():
        ours = {"type": "custom", "import_path": "mis_ext.hosts.prime_rl.loss", "kwargs": {"keys": keys}}
        found = [
            {
                f"{each}{', weights' if is_weighted else ''}": prime_rl(one, batch, is_weighted=is_weighted)
                for each, batch in batches.items()
                for is_weighted in (False, True)
            }
            for one in (config, ours)
        ]
        own["prime_rl"][name], worst[f"prime-rl {name}"] = found[0], largest(*found)
    for name, (settings, keys) in peer_cases.NEMO_RL.items():
        found = [{each: nemo_rl(settings, batch, of) for each, batch in batches.items()} for of in (None, keys)]
        own["nemo_rl"][name], worst[f"NeMo-RL {name}"] = found[0], largest(*found)
    inputs = {each: {name: tensor.tolist() for name, tensor in batch.items()} for each, batch in batches.items()}
    return {"revisions": REVISIONS, "worst": worst, "batches": inputs, "losses": own}


def largest(wanted: Any, found: Any) -> float:
    """Largest difference of two trees of numbers."""
    if isinstance(wanted, dict):
        return max(largest(wanted[key], found[key]) for key in wanted)
    difference = float((torch.tensor(wanted).double() - torch.tensor(found).double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prime-rl", type=Path, help=f"a clone at {REVISIONS['prime_rl']}")
    parser.add_argument("--nemo-rl", type=Path, help=f"a clone at {REVISIONS['nemo_rl']}")
    parser.add_argument("--rlinf", action="store_true", help=f"the installed rlinf {RLINF}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parsed = parser.parse_args(arguments)
    with lzma.open(FILE, "rt") as file:
        recorded = json.load(file)
    numbers = recorded | {"losses": dict(recorded["losses"]), "worst": dict(recorded["worst"])}
    if parsed.rlinf:
        if (installed := version("rlinf")) != RLINF:
            parser.error(f"rlinf {installed} is installed, the numbers are of {RLINF}")
        numbers["losses"]["rlinf"], worst = rlinf_numbers()
        numbers["revisions"] = numbers["revisions"] | {"rlinf": RLINF}
    else:
        if parsed.prime_rl is None or parsed.nemo_rl is None:
            parser.error("--prime-rl and --nemo-rl go together")
        for name, revision in REVISIONS.items():
            clone = getattr(parsed, name)
            git = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
            if git.stdout.strip() != revision:
                parser.error(f"{clone} is at {git.stdout.strip()}, the numbers are of {revision}")
        sys.path[:0] = [str(parsed.prime_rl / path) for path in ("src", "packages/prime-rl-configs/src")]
        sys.path.insert(0, str(parsed.nemo_rl))
        found = all_numbers()
        worst = found["worst"]
        numbers["losses"] |= found["losses"]
        numbers |= {"batches": found["batches"], "revisions": numbers["revisions"] | found["revisions"]}
    numbers["worst"] |= worst
    for name, difference in worst.items():
        print(f"{difference:9.1e}  {name}")
    differ = [name for name, difference in worst.items() if not difference <= TOLERANCE]
    print(f"{len(worst)} losses, {len(differ)} differ by more than {TOLERANCE:g}: {differ}")
    if parsed.check:
        off = max(largest(recorded[part], numbers[part]) for part in ("batches", "losses"))
        print(f"their own numbers differ from the file by at most {off:.1e}")
        return int(bool(differ) or off > TOLERANCE)
    FILE.write_bytes(lzma.compress(json.dumps(numbers).encode()))
    return int(bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
