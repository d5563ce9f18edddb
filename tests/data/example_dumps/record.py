# SPDX-License-Identifier: Apache-2.0
"""Records the files in ``dumps.tar.xz`` anew: what examples/train_grpo.py dumps of three small runs, on a CPU.

With what requirements/test.txt names, from the repository's root:

    python tests/data/example_dumps/record.py

A folder per run, named by the rollouts between its weight syncs, each with the file of every step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ARCHIVE = HERE / "dumps.tar.xz"
LEARNING_RATES = {1: "1e-4", 2: "3e-4", 4: "1e-4"}
"""By the rollouts between weight syncs."""
NUM_STEPS = 9
SMALL = (
    *("--num-layers", "2", "--hidden-size", "32", "--rollout-max-response-len", "12"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--micro-batch-size", "4"),
)


def record(interval: int, folder: Path) -> None:
    """One run on one rank; its files come into ``folder``."""
    with tempfile.TemporaryDirectory() as output:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
                *(str(ROOT / "examples" / "train_grpo.py"), "--output-dir", output, *SMALL),
                *("--num-rollout", str(NUM_STEPS), "--update-weights-interval", str(interval)),
                *("--lr", LEARNING_RATES[interval], "--rollout-data-postprocess-path", "dump_rollout.save"),
                *("--use-tis", "--custom-tis-function-path", "mis_ext.compute_mis_weights_with_cp"),
                *("--custom-config-path", str(ROOT / "yaml" / "mis.yaml")),
            ],
            env=os.environ | {"ROLLOUT_DUMP_DIR": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            check=True,
        )


def main() -> None:
    """All runs into the archive."""
    with tempfile.TemporaryDirectory() as folder:
        for interval in LEARNING_RATES:
            record(interval, Path(folder) / f"sync_every_{interval}")
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(Path(folder).glob("*/*.pt")):
                archive.add(path, path.relative_to(folder))


if __name__ == "__main__":
    main()
