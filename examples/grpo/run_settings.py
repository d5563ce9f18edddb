# SPDX-License-Identifier: Apache-2.0
"""Write the settings of a run to a file next to its metrics."""

from __future__ import annotations

import json
import platform
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from .engine_settings import Scalar

PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "mis_ext")


def write_settings(path: Path, args: Namespace, *, engine_settings: dict[str, Scalar], device: torch.device) -> None:
    """Write arguments, engine settings, versions and the device as JSON.

    Args:
        path: The file; a resumed run replaces it.
        args: All arguments, including those of the custom configuration.
        engine_settings: Settings in use by the engine.
        device: Device of this rank.
    """
    on_gpu = device.type == "cuda"
    settings = {
        "arguments": vars(args),
        "engine_settings": engine_settings,
        "versions": {
            "python": platform.python_version(),
            **{package: package_version(package) for package in PACKAGES},
        },
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {platform.machine()}",
        "ranks": dist.get_world_size(),
    }
    path.write_text(json.dumps(settings, indent=2, default=str) + "\n", encoding="utf-8")


def package_version(package: str) -> str | None:
    """Return None if not installed; a checkout on the path may have no version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
