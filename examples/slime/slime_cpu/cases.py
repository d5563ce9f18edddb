"""The command lines of slime: one tiny model for all runs, and what each run adds."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NUM_ROLLOUTS = 2
NUM_PROMPTS = 2
SAMPLES_PER_PROMPT = 4
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
QWEN3 = shlex.split("""
    --swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
    --qk-layernorm --attention-dropout 0 --hidden-dropout 0
""")
# Without Transformer Engine and CUDA kernels.
ON_CPU = shlex.split("""
    --transformer-impl local --spec slime_cpu.layers layer_spec --attention-backend auto
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm
""")
TRAINING = shlex.split(f"""
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --input-key text --label-key label --rm-type math
    --num-rollout {NUM_ROLLOUTS} --rollout-batch-size {NUM_PROMPTS} --n-samples-per-prompt {SAMPLES_PER_PROMPT}
    --global-batch-size {SAMPLES_PER_ROLLOUT} --rollout-max-response-len 64 --rollout-temperature 1
    --advantage-estimator grpo --entropy-coef 0 --kl-coef 0
    --use-dynamic-batch-size --max-tokens-per-gpu 128 --debug-train-only
""")


def base_flags(inputs: Path) -> list[str]:
    """What every run gives slime, with the files of `slime_cpu.inputs`."""
    model = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    files = {
        "--hf-checkpoint": inputs / "model",
        "--load": inputs / "model",
        "--prompt-data": inputs / "prompts.jsonl",
        "--load-debug-rollout-data": inputs / "rollouts" / "{rollout_id}.pt",
    }
    return [*model, *QWEN3, *ON_CPU, *TRAINING, *(str(word) for pair in files.items() for word in pair)]


CHECK = ("--custom-megatron-init-path", "mis_ext.check_setup")
HOOK = ("--custom-tis-function-path", "mis_ext.compute_mis_weights_with_cp")
LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path", "mis_ext.policy_loss")
TWO_STEPS = ("--global-batch-size", str(SAMPLES_PER_ROLLOUT // 2))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of slime.

    Attributes:
        name: How the command line of the runs calls it.
        title: For the table.
        flags: After the common ones, so that they win.
        config: A file of ``yaml/``, or keys for a file of the run's own; None for no ``--custom-config-path``.
        metrics: Metrics of ours that every step must have logged; empty for a run that shall have none.
        says: Texts that the log must have.
        refusal: Text of the error that must end the run before the model is built; None for a run that trains.
        steps_per_rollout: Optimizer steps.
        group: ``compared`` runs always, ``refused`` too; ``more`` with ``--all``.
    """

    name: str
    title: str
    flags: tuple[str, ...] = ()
    config: str | dict[str, Any] | None = None
    metrics: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    refusal: str | None = None
    steps_per_rollout: int = 1
    group: Literal["compared", "refused", "more"] = "more"

    def command(self, inputs: Path, *, root: Path, folder: Path) -> list[str]:
        """Every word for slime's parser. Keys of the run's own are written into ``folder``."""
        words = [*base_flags(inputs), *self.flags]
        if isinstance(self.config, str):
            words += ["--custom-config-path", str(root / "yaml" / self.config)]
        elif self.config is not None:
            path = folder / f"{self.name}.yaml"
            # JSON is YAML.
            path.write_text(json.dumps(self.config), encoding="utf-8")
            words += ["--custom-config-path", str(path)]
        return words


_CORE = ("train/mis_k3_kl", "train/mis_ratio_max", "train/mis_kept_token_fraction")
_CALLED = "mis_ext: the host's own loss calls compute_mis_weights_with_cp"
_REPLACED = "mis_ext: policy_loss in place of the host's loss"

CASES = (
    Case(name="nothing", title="no correction", group="compared"),
    Case(
        name="slime_tis",
        title="slime's own TIS, cap 2",
        flags=("--use-tis", "--tis-clip", "2", "--tis-clip-low", "0"),
        group="compared",
    ),
    Case(
        name="hook",
        title="three flags",
        flags=("--use-tis", *HOOK, *CHECK),
        config="mis.yaml",
        metrics=_CORE,
        says=(_CALLED,),
        group="compared",
    ),
    Case(
        name="policy_loss",
        title="`policy_loss`",
        flags=("--use-tis", *LOSS, *CHECK),
        config="mis.yaml",
        metrics=_CORE,
        says=(_REPLACED,),
        group="compared",
    ),
    Case(
        name="current",
        title="`policy_loss`, `mis_loss_proximal: current`",
        flags=("--use-rollout-logprobs", *LOSS, *CHECK),
        config={"mis_loss_proximal": "current", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=_CORE,
        says=(_REPLACED,),
    ),
    Case(
        name="bypass",
        title="`policy_loss`, `mis_loss_mode: bypass`",
        flags=("--use-rollout-logprobs", *LOSS, *CHECK),
        config={"mis_loss_mode": "bypass", "use_tis": True, "tis_upper_bound": 2.0},
        metrics=_CORE,
        says=(_REPLACED, "mis_loss_mode: bypass"),
    ),
    Case(
        name="method",
        title="`policy_loss`, `mis_loss_method: icepop`",
        flags=(*LOSS, *CHECK),
        config={"mis_loss_method": "icepop"},
        says=(_REPLACED, "mis_loss_method: icepop"),
    ),
    Case(
        name="metrics_only",
        title="metrics only",
        flags=("--get-mismatch-metrics", *HOOK, *CHECK),
        config="metrics_only.yaml",
        metrics=_CORE,
        says=(_CALLED, "measures only"),
    ),
    Case(
        name="log_mismatch",
        title="three flags, `log_mismatch`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.log_mismatch"),
        steps_per_rollout=2,
        config="mis.yaml",
        metrics=_CORE,
        says=(_CALLED, "mismatch of rollout 0"),
    ),
    Case(
        name="prepare_rollout",
        title="three flags, `prepare_rollout`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.prepare_rollout"),
        steps_per_rollout=2,
        config={
            "tis_upper_bound": 2.0,
            "tis_batch_normalize": True,
            "tis_normalize_scope": "rollout",
        },
        metrics=_CORE,
        says=(_CALLED,),
    ),
    Case(
        name="misspelt_key",
        title="a misspelt key",
        flags=("--use-tis", *HOOK, *CHECK),
        config={"tis_uper_bound": 2.0},
        refusal="tis_uper_bound",
        group="refused",
    ),
    Case(
        name="misspelt_value",
        title="a misspelt value of a flag",
        flags=("--use-tis", HOOK[0], "mis_ext.compute_mis_weight_with_cp", *CHECK),
        config="mis.yaml",
        refusal="compute_mis_weight_with_cp",
        group="refused",
    ),
    Case(
        name="misspelt_flag",
        title="a misspelt flag",
        flags=("--use-tis", "--custom-tis-function-pth", HOOK[1], *CHECK),
        config="mis.yaml",
        refusal="mis_ext would not be called: --custom-tis-function-path is not set",
        group="refused",
    ),
)


def case_of(name: str) -> Case:
    """Find a case.

    Raises:
        ValueError: There is none of this name.
    """
    found = {case.name: case for case in CASES}
    if name not in found:
        raise ValueError(f"run {name!r}: must be one of {', '.join(found)}")
    return found[name]
