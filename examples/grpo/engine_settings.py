# SPDX-License-Identifier: Apache-2.0
"""Settings of the engines: what the example needs, what suits the machine, and over both what the user says.

Importing it needs no package.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

Scalar = str | int | float | bool | None

# With these SGLang 0.5 runs on a CPU without its compiled kernels; ``sglang_cpu`` stands in for what it still imports.
CPU_SETTINGS: dict[str, Scalar] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    # Otherwise it keeps a core busy while the trainer works.
    "sleep_on_idle": True,
    "max_total_tokens": 65536,
    "max_running_requests": 256,
}
# The trainer's first rank shares its GPU with the engine.
GPU_SETTINGS: dict[str, Scalar] = {"device": "cuda", "mem_fraction_static": 0.3}
# Graphs of prefills take most of the start, and save little with prompts of a few tokens. Not every version has them.
GPU_SAVINGS: dict[str, Scalar] = {"disable_prefill_cuda_graph": True}

# The same of vLLM. It counts from the whole memory, and does not start where less than that is free.
VLLM_GPU_SETTINGS: dict[str, Scalar] = {"gpu_memory_utilization": 0.3}

# They follow from the run, or the comparison of weights after an update relies on them. Speculation is none of the
# user's: without Triton vLLM 0.32.0 draws drafted tokens at a temperature that it never set.
FIXED = {
    "sglang": (
        *("model_path", "load_format", "skip_tokenizer_init", "dtype", "device", "context_length", "random_seed"),
        *("tp_size", "pp_size", "dp_size"),
    ),
    "vllm": (
        *("model", "load_format", "skip_tokenizer_init", "dtype", "max_model_len", "seed", "logprobs_mode"),
        *("generation_config", "distributed_executor_backend", "tensor_parallel_size", "pipeline_parallel_size"),
        *("data_parallel_size", "speculative_config"),
    ),
}
# Below it vLLM samples at it.
VLLM_COLDEST = 0.01

# FlashInfer has kernels for these.
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``, the value as a YAML scalar.

    Raises:
        ImportError: It is of that form, and there is no PyYAML to read the value.
        ValueError: It is not of that form.
    """
    key, equals, value_text = text.partition("=")
    if not key.isidentifier() or not equals:
        raise ValueError(f"{text!r}: expected key=value")
    # Later than what needs no package.
    from yaml import YAMLError, safe_load

    try:
        value = safe_load(value_text)
    except YAMLError as error:
        raise ValueError(f"{text!r}: the value is not YAML: {error}") from None
    if not isinstance(value, Scalar):
        raise ValueError(f"{text!r}: the value is a {type(value).__name__}, expected a number, a word, true or false")
    if isinstance(value, str) and _is_number(value):
        raise ValueError(f"{text!r}: YAML takes {value} for a word; write a number with a point, such as 1.0e-4")
    return key, value


def check_not_fixed(keys: Iterable[str], fixed: Collection[str]) -> None:
    """Refuse a key that the example sets.

    Raises:
        ValueError: With all that it sets.
    """
    for key in keys:
        if key in fixed:
            raise ValueError(f"engine settings: {key} is set by the example; it also sets {', '.join(fixed)}")


def check_settings(
    settings: Mapping[str, Scalar], *, known: Collection[str], fixed: Collection[str], engine: str
) -> None:
    """Check names of settings.

    Args:
        settings: The user's.
        known: Names that the engine has.
        fixed: Those that the example sets.
        engine: Its name and version, for the message.

    Raises:
        ValueError: The engine has no such setting, or the example sets it.
    """
    check_not_fixed(settings, fixed)
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=5) or sorted(name for name in known if key in name)[:5]
            raise ValueError(f"engine settings: {engine} has no {key!r}; close to it: {', '.join(close) or 'none'}")


def machine_settings(*, on_gpu: bool, head_dim: int, known: Collection[str]) -> dict[str, Scalar]:
    """Return what suits this machine and the installed packages.

    Args:
        on_gpu: Whether there is a GPU.
        head_dim: Of the model's attention.
        known: Names that SGLang has.
    """
    if not on_gpu:
        return CPU_SETTINGS
    settings = GPU_SETTINGS | {key: value for key, value in GPU_SAVINGS.items() if key in known}
    if (backend := attention_backend(head_dim=head_dim)) is not None:
        settings["attention_backend"] = backend
    return settings


def attention_backend(*, head_dim: int) -> str | None:
    """Return an attention backend that is installed, or None where SGLang's default is.

    The default is FA3 on Hopper, without a look at whether its kernels are there.
    """
    if _has_file("sgl_kernel", "flash_ops*.so"):
        return None
    if head_dim in FLASHINFER_HEAD_DIMS and _flashinfer_runs():
        return "flashinfer"
    return "triton"


def _flashinfer_runs() -> bool:
    """Tell whether FlashInfer has compiled kernels, or can compile its own."""
    if importlib.util.find_spec("flashinfer") is None:
        return False
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    return _has_file("flashinfer", "data/cutlass") and None not in (shutil.which("nvcc"), shutil.which("ninja"))


def _has_file(package: str, pattern: str) -> bool:
    """Look into the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return any(True for folder in folders or () for _ in Path(folder).glob(pattern))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.lower().lstrip("+-") not in ("nan", "inf", "infinity")
