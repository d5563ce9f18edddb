"""The runs of slime: Megatron-LM's trainer, our three flags, the whole loss, and slime's two other hooks."""

from pathlib import Path

from .cases import CHECK, CORE, HOOK, SAMPLES_PER_ROLLOUT, TRAINING, Case, Host, flat, input_files
from .megatron_cases import CALLED, MODEL_FLAGS, OURS, REFUSED, own_corrections

_TWO_STEPS = ("--global-batch-size", str(SAMPLES_PER_ROLLOUT // 2))


def _common(inputs: Path) -> list[str]:
    files = input_files(inputs)
    return [*MODEL_FLAGS, *TRAINING, *flat(files | {"--load": files["--hf-checkpoint"]})]


_HOOKS = (
    Case(
        name="log_mismatch",
        title="three flags, `log_mismatch`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *_TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.log_mismatch"),
        steps_per_rollout=2,
        config="mis.yaml",
        metrics=CORE,
        says=(CALLED, "mismatch of rollout 0"),
        is_optional=True,
    ),
    Case(
        name="prepare_rollout",
        title="three flags, `prepare_rollout`, two steps a rollout",
        flags=("--use-tis", *HOOK, *CHECK, *_TWO_STEPS, "--rollout-data-postprocess-path", "mis_ext.prepare_rollout"),
        steps_per_rollout=2,
        config={
            "tis_upper_bound": 2.0,
            "tis_batch_normalize": True,
            "tis_normalize_scope": "rollout",
        },
        metrics=CORE,
        says=(CALLED,),
        is_optional=True,
    ),
)

SLIME = Host(
    name="slime",
    package="slime",
    title="slime",
    script="examples/slime/run_cpu.sh",
    common=_common,
    cases=(*own_corrections("slime", whose="slime's"), *OURS, *_HOOKS, *REFUSED),
    checkouts={"slime": "SLIME_DIR", "Megatron-LM": "MEGATRON_DIR"},
    patches={"Megatron-LM": "slime's docker/patch/latest/megatron.patch"},
    packages=("torch", "ray", "transformers", "sglang", "sglang-router", "numpy"),
    stand_ins={
        "CUDA": "its calls go to the CPU (device.py), NCCL's to gloo, by slime's own registry of accelerators",
        "torch.compile": "leaves functions as they are (device.py)",
        "Transformer Engine": "a layer spec with packed attention and its parameter names (layers.py)",
        "the engine": "recorded rollouts in slime's own file format: random tokens, drawn mismatch (inputs.py). "
        "SGLang is imported, and samples nothing",
        "torchvision": "names that SGLang and transformers import (examples/grpo/sglang_cpu)",
    },
)
