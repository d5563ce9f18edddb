# SPDX-License-Identifier: Apache-2.0
"""Record what a framework passes to its correction function, and check the record with mis_ext.

Run the framework for one step with these flags. They do not change the loss:

    export MIS_EXT_RECORD=$HOME/loss_calls PYTHONPATH=~/mis_ext/examples:$PYTHONPATH
    --get-mismatch-metrics --custom-tis-function-path record_loss_call.record

Then, on any machine with mis_ext:

    python3 examples/record_loss_call.py $HOME/loss_calls

It prints the arguments of each call, and the result of the mis_ext hook for it. Attach this to a bug report about
slime, vime, or Miles. A record has log-probs, masks, and lengths, but no tokens and no text. Calls of a
context-parallel run are listed but not replayed, because a rank has only parts of the responses.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch

import mis_ext
from mis_ext.frameworks import find_framework

MOST_CALLS = 4
ARGUMENTS = ("qkv_format", "use_rollout_logprobs", "calculate_per_token_loss", "advantage_estimator", "rollout_top_p")
_numbers = count()


def record(args: Any, **given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Write the first calls of this process to ``$MIS_EXT_RECORD``, and return loss and masks unchanged."""
    number = next(_numbers)
    if number < MOST_CALLS:
        framework = find_framework()
        content = {
            "framework": None if framework is None else framework.name,
            "args": {name: getattr(args, name, None) for name in ARGUMENTS},
            "given": {name: _on_cpu(value) for name, value in given.items() if name != "parallel_state"},
        }
        folder = Path(os.environ["MIS_EXT_RECORD"])
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / f"rank{os.environ.get('RANK', '0')}_{os.getpid()}_{number}.pt")
    return given["pg_loss"], given["loss_masks"], {}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return [_on_cpu(each) for each in value] if isinstance(value, (list, tuple)) else value


def check(content: dict[str, Any]) -> list[str]:
    """Describe the arguments of a recorded call and the result of the hook, one line each."""
    given = content["given"]
    said = [f"called by {content['framework']} with {', '.join(given)}; args {content['args']}"]
    local = [len(values) for values in given["rollout_log_probs"] or ()]
    said.append(f"{len(local)} responses, {sum(local)} tokens here, dtype {given['pg_loss'].dtype}")
    if local != list(given["response_lengths"]):
        return [*said, "not replayed: parts of responses (context parallelism)"]
    args = argparse.Namespace(**content["args"], use_tis=True, mis_metrics="all")
    try:
        _, masks, metrics = mis_ext.compute_mis_weights_with_cp(args, **given)
    except (TypeError, ValueError) as error:
        return [*said, f"refused: {error}"]
    kept = torch.cat(given["loss_masks"]) != 0
    shown = {name: float(metrics[name][kept].mean()) for name in ("mis_k3_kl", "mis_logprob_abs_diff")}
    return [*said, f"read: {shown}, masks {[tuple(mask.shape) for mask in masks]}"]


def main() -> None:
    """Check every record of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    paths = sorted(parser.parse_args().folder.glob("*.pt"))
    if not paths:
        sys.exit("no record: was --custom-tis-function-path record_loss_call.record given?")
    for path in paths:
        print(path.name, *check(torch.load(path, weights_only=True)), sep="\n  ")


if __name__ == "__main__":
    main()
