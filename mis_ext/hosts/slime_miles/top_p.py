"""slime's replay of top-p: the tokens among which the engine drew each response token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.token_index import runs, to_device
from mis_ext.scoring import KeptColumns

IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


def kept_columns(batch: Mapping[str, Any], layout: PackedLayout) -> KeptColumns:
    """The kept tokens of the local response tokens, from those of whole responses.

    Of sample ``i`` the response token ``r`` has ``ids[i][offsets[i][r] : offsets[i][r + 1]]``. Where there are no
    offsets any more, nothing was recorded. The index tensors are built on the host, where slime keeps these lists.

    Args:
        batch: ``rollout_top_p_token_ids`` and ``rollout_top_p_token_offsets``, per sample a list or a tensor.
        layout: The local response tokens.

    Raises:
        ValueError: One of them is missing, or has not one list per sample.
    """
    ids, offsets = _of_samples(IDS, batch, layout), _of_samples(OFFSETS, batch, layout)
    first_id = [0, *accumulate(map(len, ids))]
    num_offsets = [*map(len, offsets)]
    # Where each recorded token begins among the ids of all samples; one number more per sample, for the end.
    start_N = torch.cat([*offsets, torch.zeros(2, dtype=torch.int64)])
    start_N[:-2] += torch.tensor(first_id[:-1], dtype=torch.int64).repeat_interleave(torch.tensor(num_offsets))
    length_S = torch.tensor(layout.response_lengths, dtype=torch.int64)
    recorded_S = torch.tensor(num_offsets, dtype=torch.int64) - 1
    first_S = torch.tensor([0, *accumulate(num_offsets)][:-1], dtype=torch.int64)
    place_R = runs(first_S, length_S)
    is_recorded_R = runs(torch.zeros_like(length_S), length_S) < recorded_S.repeat_interleave(length_S)
    whole_T = runs(*torch.tensor([layout.pieces.whole_starts, layout.pieces.lengths], dtype=torch.int64))
    is_recorded_T = is_recorded_R[whole_T]
    # What was not recorded has the two zeros at the end: it keeps no id, and is told apart by its flag.
    place_T = torch.where(is_recorded_T, place_R[whole_T], len(start_N) - 2)
    begin_T = start_N[place_T]
    count_T = start_N[place_T + 1] - begin_T
    id_N = torch.cat([*ids, torch.zeros(0, dtype=torch.int64)])[runs(begin_T, count_T)]
    token_T = torch.arange(len(count_T), device=layout.device)
    id_N, count_T, recorded_T = to_device([id_N, count_T, is_recorded_T.long()], layout.device)
    return KeptColumns(
        id_N=id_N,
        token_N=token_T.repeat_interleave(count_T, output_size=len(id_N)),
        is_recorded_T=recorded_T.bool(),
    )


def _of_samples(key: str, batch: Mapping[str, Any], layout: PackedLayout) -> list[Tensor]:
    samples = batch.get(key)
    if samples is None:
        raise ValueError(
            f"{key} are missing: with a --rollout-top-p that is not 1 the rollout function must store them"
        )
    if len(samples) != layout.num_sequences:
        raise ValueError(f"{key} has {len(samples)} samples, there are {layout.num_sequences}")
    return [torch.as_tensor(sample, dtype=torch.int64, device="cpu") for sample in samples]
