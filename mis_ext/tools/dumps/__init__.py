# SPDX-License-Identifier: Apache-2.0
"""Samples from files: what slime, vime, and Miles dump for debugging, and JSON lines.

``.pt``, each with the keys of the table below, one entry per sample, among others:

- ``--save-debug-train-data`` of vime, and of slime since August 2026, ``format_version`` 2: one file of all ranks,
  whose ``samples`` are whole responses, in the order of the rollout. Where the framework skips its scoring pass,
  ``log_probs`` are those of the training pass: with several optimizer steps per rollout, of weights that change.
- The same flag before, and Miles' ``--dump-details`` (its folder ``train_data``): a file per rank and rollout, whose
  ``rollout_data`` holds lists. Give the files of all ranks. Tensor-parallel ranks repeat each other's samples: one of
  them counts. Ranks of an earlier pipeline stage have no ``log_probs``: those that have count. Context-parallel ranks
  have parts of responses: Miles' files say whose since August 2026 (``cp_rank``, ``cp_size``), and are joined.
- A bare ``rollout_data``.
- Both hosts' ``--save-debug-rollout-data``: samples as the engine's side left them, without the trainer's log-probs.

``.jsonl``: one sample a line, which may have a ``rollout_id``, or a ``step``.

| key (in a line of JSON also without the plural) | |
|---|---|
| ``log_probs``, ``rollout_log_probs`` | nats, one per response token |
| ``loss_masks``, ``response_lengths`` | optional |
| ``tokens`` | optional: ids of prompt and response as the trainer scored them |
| ``rollout_token_ids`` | optional: ids of the response as the engine sampled them |
| ``weight_versions`` | optional: with which the engine sampled, one or several per sample |
| ``train_weight_version`` | optional: with which the trainer scored |
| ``sample_indices`` | optional: the host's number of the sample, by which files are joined |
| ``advantages``, ``rewards`` | optional: a number per response token or one per sample; one per sample |
| ``group_indices`` (``group_index``) | optional: one for the samples of a prompt; else prompt ids tell |
| ``metadata`` | optional: of a sample; under ``on_policy_tokens_canary`` what the canary said of the engine |
"""

from mis_ext.tools.dumps.formats import DumpedSample, Skipped
from mis_ext.tools.dumps.stream import Dumps, num_usable_tokens

__all__ = ["DumpedSample", "Dumps", "Skipped", "num_usable_tokens"]
