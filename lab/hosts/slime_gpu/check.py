# SPDX-License-Identifier: Apache-2.0
"""Check the requirements of a framework's run on one GPU: ``python -m slime_gpu.check HOST`` prints what is missing.

Prints the versions, with those with which the run was tested.
"""

import importlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

# Distribution, module, tested with.
PACKAGES = (
    ("torch", "torch", "2.11.0"),
    ("ray", "ray", "2.60.0"),
    ("sglang", "sglang", "0.5.17"),
    ("sglang-router", "sglang_router", "0.3.2"),
    ("transformers", "transformers", "5.12.1"),
    ("torch_memory_saver", "torch_memory_saver", "0.0.10"),
    ("wandb", "wandb", "0.31.0"),
    ("omegaconf", "omegaconf", "2.4.0"),
    ("pylatexenc", "pylatexenc", "2.11"),
    ("tensorboard", "tensorboard", "2.21.0"),
    ("numpy", "numpy", "1.26.4"),
)
MORE = {
    "slime": (),
    "miles": (
        ("mbridge", "mbridge", "0.15.1"),
        ("polars", "polars", "1.42.1"),
        ("prometheus_client", "prometheus_client", "0.26.0"),
    ),
}
# Variable and a file of each checkout.
CHECKOUTS = {
    "slime": (("SLIME_DIR", "train.py"), ("MEGATRON_DIR", "megatron/core/__init__.py")),
    "miles": (("MILES_DIR", "train.py"), ("MILES_MEGATRON_DIR", "megatron/core/__init__.py")),
}
# Without it layers of PyTorch stand for it.
OPTIONAL = (("transformer_engine", "transformer_engine", "2.12.0"),)


def problems(host: str) -> list[str]:
    """The obstacles to training with a framework here."""
    found = []
    for name, module, tested in (*PACKAGES, *MORE[host]):
        try:
            importlib.import_module(module)
        except ImportError as error:
            found.append(f"{module}: {error}: pip install {name}=={tested}")
    if found:
        return found
    import numpy
    import torch

    if host == "slime" and not numpy.__version__.startswith("1."):
        found.append(f"numpy {numpy.__version__}: slime refuses it: pip install numpy==1.26.4")
    if not torch.cuda.is_available() and not os.environ.get("ON_CPU"):
        found.append("torch.cuda: no GPU; ON_CPU=1 rehearses without one")
    return found + checkout_problems(host)


def checkout_problems(host: str) -> list[str]:
    """Whether both checkouts are what their variables say."""
    found = []
    for variable, file in CHECKOUTS[host]:
        folder = Path(os.environ[variable])
        if not (folder / file).exists():
            found.append(f"{variable}={folder}: no {file} in it")
    if host != "slime":
        return found
    patch = Path(os.environ["SLIME_DIR"]) / "docker/patch/latest/megatron.patch"
    if not found and patch.exists() and not is_patched(Path(os.environ["MEGATRON_DIR"]), patch):
        folder = os.environ["MEGATRON_DIR"]
        found.append(f"MEGATRON_DIR={folder} lacks slime's patch: git -C {folder} apply {patch}")
    return found


def is_patched(folder: Path, patch: Path) -> bool:
    """Whether the first line that the patch adds is in its file."""
    file = None
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):
            file = folder / line.removeprefix("+++ b/")
        elif line.startswith("+") and line[1:].strip() and file is not None:
            return file.exists() and line[1:] in file.read_text().splitlines()
    return True


def version(name: str) -> str:
    """Version of an installed package, or ``none``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    """Print versions; end with every problem."""
    host = sys.argv[1]
    found = problems(host)
    print(f"python {platform.python_version()}")
    for name, _, tested in (*PACKAGES, *MORE[host], *OPTIONAL):
        print(f"{name} {version(name)}" + ("" if version(name) == tested else f" (tested with {tested})"))
    if found:
        sys.exit("missing:\n  " + "\n  ".join(found))


if __name__ == "__main__":
    main()
