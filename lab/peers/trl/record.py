# SPDX-License-Identifier: Apache-2.0
"""Records ``numbers.json.xz`` again: corrections and losses of TRL's own ``GRPOTrainer`` on a CPU, and ours in it.

TRL is not part of this repository. In the environment that ``examples/trl/run.sh`` makes, from the repository's root:

    .venv-trl/bin/python lab/peers/trl/record.py [--check]

The trainer is TRL's, with a tiny random model. Three things stand in: ``use_vllm`` is set once the trainer is built, a
``rollout_func`` returns the batch, and log-probs of the trainer are given instead of scored. Last it trains a few steps
with nothing given but an engine in bfloat16 (``examples/trl/train.py``). ``--check`` writes nothing, and compares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import math
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import trl

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "data" / "trl" / "numbers.json.xz"
VERSION = "1.16.0"
TOLERANCE = 2e-6

sys.path += [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "examples" / "trl")]

import train  # noqa: E402
import trl_cases as cases  # noqa: E402
import verl_cases  # noqa: E402

from mis_ext.hosts.trl import MisTrainer  # noqa: E402

Batch = Mapping[str, torch.Tensor]


class Given:
    """Log-probs of a batch in the place of a model's: ``scores`` by who asks."""

    scores: dict[str, torch.Tensor]

    def _get_per_token_logps_and_entropies(self: Any, model: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        who = "reference" if model is self.ref_model else "current" if torch.is_grad_enabled() else "proximal"
        return self.scores[who], torch.zeros_like(self.scores[who]), None


class Own(Given, trl.GRPOTrainer):
    """TRL's correction and loss."""


class Ours(MisTrainer, Given, trl.GRPOTrainer):
    """TRL's, with mis_ext."""


class Runs:
    """Trainers, and what they make of a batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        train.tiny_model().save_pretrained(f"{folder}/model")
        train.tiny_tokenizer().save_pretrained(f"{folder}/model")

    def trainer(self, settings: Mapping[str, Any], keys: Any = None) -> Any:
        """One with ``use_vllm`` set, as if there were a server."""
        options = cases.STEPS | {"per_device_train_batch_size": 6, "num_generations": 3} | dict(settings)
        trainer = train.build(
            keys, self.folder, cls=Own if keys is None else Ours, model=f"{self.folder}/model", **options
        )
        trainer.current_gradient_accumulation_steps = cases.STEPS["gradient_accumulation_steps"]
        return trainer

    def inputs(self, trainer: Any, batch: Batch) -> dict[str, Any]:
        """TRL's batch of the rollout, with the advantages."""
        trainer.scores = {
            "proximal": batch["old_log_prob"],
            "reference": batch["old_log_prob"] - 0.1,
            "current": batch["log_prob"].clone().requires_grad_(),
        }
        trainer.rollout_func = lambda prompts, _: rollout(batch)
        found = trainer._generate_and_score_completions([{"prompt": "1 2"}] * len(batch["log_prob"]))
        return found | {"advantages": batch["advantages"][:, 0]}

    def numbers(self, trainer: Any, batch: Batch, *, is_training: bool = True) -> dict[str, Any]:
        """Loss, gradient by the current log-probs, and the ratio where there is one."""
        trainer.model.train(is_training)
        inputs = self.inputs(trainer, batch)
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        found = {"loss": loss.tolist(), "gradient": trainer.scores["current"].grad.tolist()}
        if "importance_sampling_ratio" not in inputs:
            return found
        mask = batch["response_mask"]
        ratio = inputs["importance_sampling_ratio"].expand_as(mask)
        return found | {"ratio": torch.where(mask, ratio, 1.0).tolist()}


def rollout(batch: Batch) -> dict[str, Any]:
    """In the format of a ``rollout_func``: every row up to its last token of the policy, with holes in ``env_mask``."""
    mask = batch["response_mask"]
    width = mask.shape[1]
    # The first row has all columns, so that TRL pads the other rows to them.
    lengths = [max([width if row == 0 else 1, *(mask[row].nonzero()[:, 0] + 1).tolist()]) for row in range(len(mask))]
    return {
        "prompt_ids": [[2, 3]] * len(mask),
        "completion_ids": [[5] * length for length in lengths],
        "logprobs": [batch["rollout_log_prob"][row, :length].tolist() for row, length in enumerate(lengths)],
        "env_mask": [mask[row, :length].int().tolist() for row, length in enumerate(lengths)],
    }


def ratios(runs: Runs, batches: Mapping[str, Batch]) -> dict[str, Any]:
    """TRL's correction in each of its losses, and ours in its place."""
    found: dict[str, Any] = {}
    for name, (settings, keys) in cases.RATIOS.items():
        for loss_type in cases.LOSS_TYPES:
            if loss_type == "vespo" and not name.startswith("token"):
                continue
            for level in ("token", "sequence")[: 2 if loss_type in ("grpo", "luspo") else 1]:
                options = settings | {"loss_type": loss_type, "importance_sampling_level": level}
                pair = runs.trainer(options), runs.trainer(options, keys)
                found[f"{name}: {loss_type}, {level}"] = {
                    each: [runs.numbers(one, batch) for one in pair] for each, batch in batches.items()
                }
    return found


def whole(runs: Runs, batches: Mapping[str, Batch]) -> dict[str, Any]:
    """TRL's losses, and ours."""
    found: dict[str, Any] = {}
    for name, (settings, keys, ours) in cases.WHOLE.items():
        pair = runs.trainer(settings), runs.trainer(ours, keys)
        found[name] = {
            f"{each}, {mode}": [
                {
                    key: number
                    for key, number in runs.numbers(one, batch, is_training=mode == "train").items()
                    if key != "ratio"
                }
                for one in pair
            ]
            for each, batch in batches.items()
            for mode in ("train", "eval")
        }
    return found


def unscored(runs: Runs, batch: Batch) -> dict[str, Any]:
    """TRL's ratio where a token of the first row has no behavior log-prob: not as ours."""
    engine = batch["rollout_log_prob"].clone()
    engine[0, cases.UNSCORED] = torch.nan
    given = {**batch, "rollout_log_prob": engine}
    return {name: runs.numbers(runs.trainer(settings), given)["ratio"] for name, (settings, _) in cases.RATIOS.items()}


def largest(wanted: Any, found: Any) -> float:
    """Largest difference of two trees of numbers."""
    if isinstance(wanted, dict):
        return max(largest(wanted[key], found[key]) for key in wanted)
    difference = float((torch.tensor(wanted).double() - torch.tensor(found).double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def steps(folder: str) -> dict[str, dict[str, list[float]]]:
    """Real runs of four steps, two to a rollout, with KL: TRL's own token TIS, ours as its ratio, our whole loss."""
    high, found = 1.02, {}
    own = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": high}
    runs = {
        "no correction": (trl.GRPOTrainer, None, cases.NO_CORRECTION),
        "TRL's own": (trl.GRPOTrainer, None, own),
        "our ratio": (train.Trainer, {"use_tis": True, "tis_mode": "truncate", "tis_upper_bound": high}, {}),
        "our whole loss": (train.Trainer, {"mis_loss_method": {"name": "decoupled_token_tis", "high": high}}, {}),
    }
    for name, (cls, keys, options) in runs.items():
        more = {"model": f"{folder}/model", "num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.05}
        trainer = train.build(keys, folder, cls=cls, **more, **options)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        rows = trainer.state.log_history[:-1]
        found[name] = {
            key: [row[key] for row in rows if key in row]
            for key in rows[0]
            if key in ("loss", "grad_norm") or key.startswith("mis_")
        }
    return found


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parsed = parser.parse_args(arguments)
    if trl.__version__ != VERSION:
        parser.error(f"trl {trl.__version__}: install trl=={VERSION}")
    # Warnings of rollout_func, and of loss types that are not meant for these levels.
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    batches = verl_cases.batches()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        both = {"ratios": ratios(runs, batches), "whole": whole(runs, batches)}
        plain = runs.trainer(dict(cases.RATIOS["token_truncate"][0]))
        names = "old_per_token_logps", "sampling_per_token_logps", "completion_mask", "tool_mask", "num_items_in_batch"
        inputs = {
            each: {name: runs.inputs(plain, batch)[name].tolist() for name in names} for each, batch in batches.items()
        }
        nan = unscored(runs, batches["close"])
        trained = steps(folder)
    worst = {
        f"{kind} {name}": max(largest(own, ours) for own, ours in found.values())
        for kind, losses in both.items()
        for name, found in losses.items()
    }
    for name, difference in worst.items():
        print(f"{difference:9.1e}  {name}")
    for name, logged in trained.items():
        print(name, {key: [float(f"{value:.6g}") for value in values] for key, values in logged.items()})
    differ = [name for name, difference in worst.items() if not difference <= TOLERANCE]
    print(f"{len(worst)} cases, {len(differ)} differ by more than {TOLERANCE:g}: {differ}")
    differ += cases.faults_of_steps(trained)
    print(f"four steps of TRL, faults: {cases.faults_of_steps(trained)}")
    ratio = {
        name: {each: own["ratio"] for each, (own, _) in both["ratios"][f"{name}: dapo, token"].items()}
        for name in cases.RATIOS
    }
    losses = {name: {each: own for each, (own, _) in found.items()} for name, found in both["whole"].items()}
    numbers = {"ratios": ratio, "whole": losses, "unscored": nan}
    if parsed.check:
        with lzma.open(FILE, "rt") as file:
            off = largest(json.load(file)["numbers"], numbers)
        print(f"TRL's own numbers differ from the file by at most {off:.1e}")
        return int(bool(differ) or off > TOLERANCE)
    streams = {
        each: {name: batch[name].tolist() for name in ("log_prob", "advantages", "response_mask")} | inputs[each]
        for each, batch in batches.items()
    }
    content = {
        "trl": VERSION,
        "torch": torch.__version__,
        "worst": worst,
        "batches": streams,
        "numbers": numbers,
        "steps": trained,
    }
    FILE.write_bytes(lzma.compress(json.dumps(content).encode()))
    return int(bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
