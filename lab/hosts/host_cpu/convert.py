# SPDX-License-Identifier: Apache-2.0
"""Miles' own ``tools/convert_hf_to_torch_dist.py`` on a CPU: ``python -m host_cpu.convert`` and its command line.

Miles' Megatron trainer reads Hugging Face files only through Megatron-Bridge. Without it, it wants a checkpoint of
Megatron-LM, which this tool writes with mbridge. `MILES_DIR` is the checkout.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from . import device


def main() -> None:
    """Run the tool as a program."""
    device.install()
    original = distributed.init_process_group

    def over_gloo(*, backend: str, device_id: Any, **kwargs: Any) -> None:
        # The tool has no flag for it.
        original(backend="gloo" if backend == "nccl" else backend, **kwargs)

    distributed.init_process_group = over_gloo
    tool = Path(os.environ["MILES_DIR"]) / "tools" / "convert_hf_to_torch_dist.py"
    sys.argv[0] = str(tool)
    # It moves its result into a folder that is there, instead of over it.
    shutil.rmtree(sys.argv[sys.argv.index("--save") + 1], ignore_errors=True)
    runpy.run_path(str(tool), run_name="__main__")


if __name__ == "__main__":
    main()
