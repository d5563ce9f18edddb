# SPDX-License-Identifier: Apache-2.0
"""Settings of the engines: those of the example, those for the machine, and those of the user, which override them.

Its import needs no package.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

Scalar = str | int | float | bool | None

# With these, SGLang 0.5 runs on a CPU without its compiled kernels; ``sglang_cpu`` replaces modules that it still
# imports.
CPU_SETTINGS: dict[str, Scalar] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    # Otherwise it keeps a core busy during training.
    "sleep_on_idle": True,
    "max_total_tokens": 65536,
    "max_running_requests": 256,
}
# The trainer's first rank shares its GPU with the engine.
GPU_SETTINGS: dict[str, Scalar] = {"device": "cuda", "mem_fraction_static": 0.3}
# Prefill graphs take most of the startup time, and save little with short prompts. Not every version has them.
GPU_SAVINGS: dict[str, Scalar] = {"disable_prefill_cuda_graph": True}

# The same for vLLM. Its share is of the whole memory, and it does not start if less is free.
VLLM_GPU_SETTINGS: dict[str, Scalar] = {"gpu_memory_utilization": 0.3}

# They follow from the run, or the comparison of weights after an update relies on them. Speculation is fixed because
# without Triton vLLM 0.32.0 samples draft tokens at a temperature that it never set.
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
# vLLM uses this temperature instead of any lower one.
VLLM_COLDEST = 0.01

# Head dimensions with FlashInfer kernels.
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``, the value as a YAML scalar.

    Raises:
        ImportError: If it has this form, but PyYAML is not installed.
        ValueError: If it does not have this form.
    """
    key, equals, value_text = text.partition("=")
    if not key.isidentifier() or not equals:
        raise ValueError(f"{text!r}: expected key=value")
    # Imported late, because the rest needs no package.
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
    """Raise an error for a key that the example sets.

    Raises:
        ValueError: With all keys that the example sets.
    """
    for key in keys:
        if key in fixed:
            raise ValueError(f"engine settings: {key} is set by the example; it also sets {', '.join(fixed)}")


def check_settings(
    settings: Mapping[str, Scalar], *, known: Collection[str], fixed: Collection[str], engine: str
) -> None:
    """Check names of settings.

    Args:
        settings: Settings of the user.
        known: Names of the engine's settings.
        fixed: Names that the example sets.
        engine: Its name and version, for the message.

    Raises:
        ValueError: If the engine has no such setting, or the example sets it.
    """
    check_not_fixed(settings, fixed)
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=5) or sorted(name for name in known if key in name)[:5]
            raise ValueError(f"engine settings: {engine} has no {key!r}; close to it: {', '.join(close) or 'none'}")


def machine_settings(*, on_gpu: bool, head_dim: int, known: Collection[str]) -> dict[str, Scalar]:
    """Return settings for this machine and the installed packages.

    Args:
        on_gpu: Whether there is a GPU.
        head_dim: Head dimension of the model's attention.
        known: Names of SGLang's settings.
    """
    if not on_gpu:
        return CPU_SETTINGS
    settings = GPU_SETTINGS | {key: value for key, value in GPU_SAVINGS.items() if key in known}
    if (backend := attention_backend(head_dim=head_dim)) is not None:
        settings["attention_backend"] = backend
    return settings


def attention_backend(*, head_dim: int) -> str | None:
    """Return an installed attention backend, or None if SGLang's default is installed.

    On Hopper the default is FA3, even if its kernels are not installed.
    """
    if _has_file("sgl_kernel", "flash_ops*.so"):
        return None
    if head_dim in FLASHINFER_HEAD_DIMS and _flashinfer_runs():
        return "flashinfer"
    return "triton"


def _flashinfer_runs() -> bool:
    """Return True if FlashInfer has compiled kernels, or can compile them."""
    if importlib.util.find_spec("flashinfer") is None:
        return False
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    return _has_file("flashinfer", "data/cutlass") and None not in (shutil.which("nvcc"), shutil.which("ninja"))


def _has_file(package: str, pattern: str) -> bool:
    """Check the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return any(True for folder in folders or () for _ in Path(folder).glob(pattern))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.lower().lstrip("+-") not in ("nan", "inf", "infinity")
