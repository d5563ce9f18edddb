"""Samples from files: what slime and Miles dump for debugging, and JSON lines.

``.pt``, each with the keys of the table below, one entry per sample, among others:

- slime's ``--save-debug-train-data`` since August 2026, ``format_version`` 2: one file of all ranks, whose ``samples``
  are whole responses, in the order of the rollout.
- The same flag before, and Miles' ``--dump-details`` (its folder ``train_data``): a file per rank and rollout, whose
  ``rollout_data`` holds lists. Only ranks of the last pipeline stage have ``log_probs``, and only where the host scored
  in a pass of its own. Tensor-parallel ranks repeat each other's samples. Under context parallelism a file holds parts
  of responses but whole masks.
- A bare ``rollout_data``.

``.jsonl``: one sample a line.

| key (in a line of JSON also without the plural) | |
|---|---|
| ``log_probs``, ``rollout_log_probs`` | nats, one per response token |
| ``loss_masks``, ``response_lengths`` | optional |
| ``tokens`` | optional: ids of prompt and response as the trainer scored them |
| ``rollout_token_ids`` | optional: ids of the response as the engine sampled them |
| ``weight_versions`` | optional: with which the engine sampled, one or several per sample |
| ``train_weight_version`` | optional: with which the trainer scored |
"""

from mis_ext.dumps.reading import read_dumps
from mis_ext.dumps.sample import DumpedSample

__all__ = ["DumpedSample", "read_dumps"]
