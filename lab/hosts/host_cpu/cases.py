# SPDX-License-Identifier: Apache-2.0
"""A run of a host on a CPU, and a host: what slime's and Miles' runs have in common."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .by_hand import ByHand
from .nodes import SecondNode

NUM_ROLLOUTS = 2
NUM_PROMPTS = 2
SAMPLES_PER_PROMPT = 4
FAN_OUT = "fan_out"
"""Folder of rollouts in which a trajectory has several samples."""
MAX_TOKENS = 128
# float32 sums over 8 samples, in another order.
SAME = 1e-5
# Numbers of bfloat16 have 8 bits, and another order of sums rounds other partial sums.
CLOSE_IN_BFLOAT16 = 5e-4
# Version of the trainer's weights; those that sampled the first half of each response are one older.
VERSION = 3.0
SAMPLES_PER_ROLLOUT = NUM_PROMPTS * SAMPLES_PER_PROMPT

MODEL: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "vocab-size": 512,
    "norm-epsilon": 1e-6,
    "rotary-base": 1000000,
}
# In the place of each dense feed-forward layer.
EXPERTS: dict[str, Any] = {"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 64}
# The same in every host.
TRAINING = shlex.split(f"""
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1
    --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --input-key text --label-key label --rm-type math
    --num-rollout {NUM_ROLLOUTS} --rollout-batch-size {NUM_PROMPTS} --n-samples-per-prompt {SAMPLES_PER_PROMPT}
    --global-batch-size {SAMPLES_PER_ROLLOUT} --rollout-max-response-len 64 --rollout-temperature 1
    --advantage-estimator grpo --entropy-coef 0 --kl-coef 0
    --use-dynamic-batch-size --max-tokens-per-gpu {MAX_TOKENS} --debug-train-only
""")

CHECK = ("--custom-megatron-init-path", "mis_ext.check_setup")
HOOK = ("--custom-tis-function-path", "mis_ext.compute_mis_weights_with_cp")
LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path", "mis_ext.policy_loss")
PROVIDER = ("--custom-model-provider-path", "mis_ext.model_provider")
MEASURED = ("train/mis_k3_kl", "train/mis_ratio_max")
CORE = (*MEASURED, "train/mis_kept_token_fraction")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a host.

    Attributes:
        name: How the command line of the runs calls it.
        title: For the table.
        flags: After the common ones, so that they win.
        config: A file of ``yaml/``, or keys for a file of the run's own; None for no ``--custom-config-path``.
        metrics: Metrics of ours that every step must have logged; empty for a run that shall have none.
        says: Texts that the log must have, that of a refusal too.
        refusal: Text of the error that must end the run before the model is built; None for a run that trains. Without
            `CHECK` among the flags it may come in the first step.
        steps_per_rollout: Optimizer steps.
        is_alike: Token weights with a cap of 2: the first gradient norm equals that of the other runs with this flag.
        close: How far that norm may be from the first of them, relatively.
        is_optional: Runs with ``--all`` only.
        layout: How the ranks share the work, as in ``"CP 2"``; empty for the runs on one rank in bfloat16.
        partner: Name of the run on one rank whose first gradient norm and metrics this must have; empty for none.
        is_float32: Whether the model has float32 in the place of bfloat16.
        by_hand: What its first gradient norm must be that of; None for no such computation.
        second_node: What is otherwise on the second of two Ray nodes; None for one node.
    """

    name: str
    title: str
    flags: tuple[str, ...] = ()
    config: str | dict[str, Any] | None = None
    metrics: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    refusal: str | None = None
    steps_per_rollout: int = 1
    is_alike: bool = False
    close: float = SAME
    is_optional: bool = False
    layout: str = ""
    partner: str = ""
    is_float32: bool = False
    by_hand: ByHand | None = None
    second_node: SecondNode | None = None

    def command(self, common: list[str], *, root: Path, folder: Path) -> list[str]:
        """All words for the framework's parser. The run's own keys are written into ``folder``."""
        words = [*common, *self.flags]
        if isinstance(self.config, str):
            words += ["--custom-config-path", str(root / "yaml" / self.config)]
        elif self.config is not None:
            path = folder / f"{self.name}.yaml"
            # JSON is YAML.
            path.write_text(json.dumps(self.config), encoding="utf-8")
            words += ["--custom-config-path", str(path)]
        return words


@dataclass(frozen=True, kw_only=True)
class Host:
    """A framework that this repository runs from an unmodified checkout, with one of its trainers.

    Attributes:
        name: How the command line, the records and the folder of its runs call it.
        package: Its Python package.
        title: For people.
        script: Starts the runs.
        common: The flags of every run, given the folder of the inputs.
        conversions: Words for `host_cpu.convert`, given that folder, if the framework needs checkpoints of Megatron-LM.
        cases: Its runs, in the order of the table.
        checkouts: Repository to the variable of the environment with its folder.
        patches: Repository to the patch that its checkout has.
        packages: Whose versions a record names.
        stand_ins: Parts that do not run on a CPU, and their replacements.
    """

    name: str
    package: str
    title: str
    script: str
    common: Callable[[Path], list[str]]
    cases: tuple[Case, ...]
    checkouts: dict[str, str]
    patches: dict[str, str]
    packages: tuple[str, ...]
    stand_ins: dict[str, str]
    conversions: Callable[[Path], list[list[str]]] | None = None

    def chosen(self, names: Sequence[str], *, everything: bool) -> list[Case]:
        """Return the runs that a command line asks for, and those that they must be equal to.

        Raises:
            ValueError: There is none of a name.
        """
        known = [case.name for case in self.cases]
        for name in names:
            if name not in known:
                raise ValueError(f"run {name!r}: must be one of {', '.join(known)}")
        if names:
            wanted = {*names, *(case.partner for case in self.cases if case.name in names)}
            return [case for case in self.cases if case.name in wanted]
        return [case for case in self.cases if everything or not case.is_optional]


def input_files(inputs: Path) -> dict[str, str]:
    """Flags that name what `host_cpu.inputs` wrote."""
    return {
        "--hf-checkpoint": str(inputs / "model"),
        "--prompt-data": str(inputs / "prompts.jsonl"),
        "--load-debug-rollout-data": str(inputs / "rollouts" / "{rollout_id}.pt"),
    }


def flat(pairs: dict[str, Any]) -> list[str]:
    """Words of a command line."""
    return [str(word) for pair in pairs.items() for word in pair]
