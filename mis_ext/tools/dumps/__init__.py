# SPDX-License-Identifier: Apache-2.0
"""Read samples from debug dumps of slime, vime, and Miles, and from JSON lines.

Formats of ``.pt`` files. Each has the keys of the table below, with one entry per sample; other keys are allowed:

- ``--save-debug-train-data`` of vime, and of slime since August 2026, ``format_version`` 2: one file for all ranks,
  whose ``samples`` are whole responses in the order of the rollout. If the framework skips its scoring pass,
  ``log_probs`` are those of the training pass: with several optimizer steps per rollout, the weights change within it.
- The same flag of earlier slime, and Miles' ``--dump-details`` (its folder ``train_data``): a file per rank and
  rollout, whose ``rollout_data`` has lists. Give the files of all ranks. Tensor-parallel ranks repeat the same samples;
  each counts once. Ranks of earlier pipeline stages have no ``log_probs``; ranks that have them count. Context-parallel
  ranks have parts of responses; Miles' files name the rank since August 2026 (``cp_rank``, ``cp_size``) and are joined.
- A bare ``rollout_data``.
- ``--save-debug-rollout-data`` of slime and Miles: samples from the engine side, without the trainer's log-probs.

``.jsonl``: one sample per line, optionally with ``rollout_id`` or ``step``.

| key (in JSON lines also in the singular) | |
|---|---|
| ``log_probs``, ``rollout_log_probs`` | nats, one per response token |
| ``loss_masks``, ``response_lengths`` | optional |
| ``tokens`` | optional: ids of prompt and response, as scored by the trainer |
| ``rollout_token_ids`` | optional: ids of the response, as sampled by the engine |
| ``weight_versions`` | optional: versions with which the engine sampled, one or more per sample |
| ``train_weight_version`` | optional: version with which the trainer scored |
| ``sample_indices`` | optional: the framework's number of the sample, used to join files |
| ``advantages``, ``rewards`` | optional: advantages per response token or per sample; rewards per sample |
| ``group_indices`` (``group_index``) | optional: shared by the samples of a prompt; default: from prompt ids |
| ``metadata`` | optional: of a sample; ``on_policy_tokens_canary`` has the canary's result for the engine |
"""

from mis_ext.tools.dumps.formats import DumpedSample, Skipped
from mis_ext.tools.dumps.stream import Dumps, num_usable_tokens

__all__ = ["DumpedSample", "Dumps", "Skipped", "num_usable_tokens"]
