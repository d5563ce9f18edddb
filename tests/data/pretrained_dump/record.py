# SPDX-License-Identifier: Apache-2.0
"""Keeps 64 samples of a dump in ``dump.pt.xz``: SmolLM2-135M-Instruct, with nothing wrong.

    python tests/data/pretrained_dump/record.py train_data/0_0.pt

The dump is that of the first rollout of ``lab/hosts/slime_gpu.sh``: bfloat16 in SGLang's server and in slime's
Megatron trainer, fresh weights, 64 prompts with 8 answers each. One answer of each prompt is kept.
"""

from __future__ import annotations

import argparse
import io
import lzma
from pathlib import Path

import torch

ARCHIVE = Path(__file__).resolve().parent / "dump.pt.xz"
ANSWERS = 8
KEPT = ("sample_index", "tokens", "response_lengths", "loss_masks", "rewards", "log_probs", "rollout_log_probs")


def main() -> None:
    """The excerpt into the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path)
    dump = torch.load(parser.parse_args().dump, weights_only=False)
    samples = [{name: sample[name] for name in KEPT} for sample in dump["samples"][::ANSWERS]]
    excerpt = {name: dump[name] for name in ("format_version", "rollout_id", "rank")} | {"samples": samples}
    buffer = io.BytesIO()
    torch.save(excerpt, buffer)
    ARCHIVE.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
