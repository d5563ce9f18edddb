# SPDX-License-Identifier: Apache-2.0
"""One micro-batch and many options of the full loss, with recorded losses of the frameworks to test ours."""

import math
from argparse import Namespace

import torch
from zigzag import take

VOCABULARY = 8
LENGTHS = [(3, 9), (5, 2), (4, 1), (2, 13), (6, 3), (3, 4)]
"""Prompt and response; the last response is fully masked."""
TOTALS = [prompt + response for prompt, response in LENGTHS]
RESPONSES = [response for _, response in LENGTHS]
ROLLOUTS = [0, 0, 1, 2, 3, 3]
"""Samples that share a denominator; two more tokens of the second one's rollout are in another micro-batch."""
MAX_SEQ_LEN = 18

HOOK = {
    "use_tis": True,
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_upper_bound": 1.15,
    "mis_guard": "warn",
    "mis_metrics": "all",
    "mis_max_reject_fraction": 1.0,
}
GATES = HOOK | {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.8, "rs_upper_bound": 1.25}
GATES_ALONE = {key: value for key, value in GATES.items() if not key.startswith("tis_")} | {"tis_level": "none"}
SEQUENCES = HOOK | {
    "tis_level": "sequence",
    "tis_batch_normalize": True,
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": 0.95,
    "rs_upper_bound": 1.05,
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
CISPO = {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1}

OPTIONS = {
    "ppo": {},
    "dual clip": {"eps_clip_c": 1.2},
    "entropy": {"entropy_coef": 0.1},
    "k1": KL | {"kl_loss_type": "k1"},
    "k2": KL | {"kl_loss_type": "k2"},
    "k3": KL | {"kl_loss_type": "k3"},
    "low_var_kl": KL | {"kl_loss_type": "low_var_kl"},
    "unbiased k3": KL | {"kl_loss_type": "k3", "use_unbiased_kl": True},
    "unbiased k1": KL | {"kl_loss_type": "k1", "use_unbiased_kl": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03},
    "gspo, dual clip, gates": GATES | {"advantage_estimator": "gspo", "eps_clip_c": 1.01},
    "unbiased low_var_kl": KL | {"kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "cispo": CISPO,
    "cispo, low bound": CISPO | {"eps_clip": 0.1},
    "cispo, gates": CISPO | GATES,
    "tokens": {"calculate_per_token_loss": True, "entropy_coef": 0.1},
    "opsm": {"use_opsm": True, "opsm_delta": 0.01},
    "rollout log-probs": {"use_rollout_logprobs": True},
    "no proximal log-probs": {"skip_actor_forward_only": True},
    "metrics only": {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"},
    "weights": HOOK,
    "gates, entropy, kl": GATES | KL | {"kl_loss_type": "k3", "entropy_coef": 0.1},
    "sequences, tokens": SEQUENCES | {"calculate_per_token_loss": True},
    "sequences, opsm, gspo": SEQUENCES | {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": -1.0},
    "reducer, gates": GATES | KL | {"custom_pg_loss_reducer_function_path": "loss_cases.reduce_by_kept"},
    "temperature": {"rollout_temperature": 0.7, "entropy_coef": 0.1},
}
OF_SLIME_ONLY = ("cispo", "cispo, low bound", "cispo, gates", "top-p", "top-p, gates, hot")
OF_MILES_ONLY = ("unseen entropy", "true on-policy")
CONTEXT_PARALLEL = ("gates, entropy, kl", "gspo, dual clip, gates", "sequences, opsm, gspo", "tokens")
"""Options that are also recorded with two ranks."""
TOP_P = {"rollout_top_p": 0.9, "entropy_coef": 0.1}
NOT_RECORDED = {
    "top-p": TOP_P,
    "top-p, gates, hot": GATES | TOP_P | {"rollout_temperature": 1.7},
    "hot": GATES | {"rollout_temperature": 1.7, "entropy_coef": 0.1},
    "unseen entropy": {"observe_training_entropy": False},
    "true on-policy": {"true_on_policy_mode": True, "entropy_coef": 0.1},
    "all-gather": {"allgather_cp": True, "entropy_coef": 0.1},
    "ppo by name": KL | {"mis_loss_method": "ppo", "eps_clip": 0.2, "eps_clip_high": 0.2, "entropy_coef": 0.1},
}
"""Scoring in the frameworks, and a method that equals their own loss.

`lab/peers/host_losses/record.py --check` compares them with the running frameworks.
"""
KEPT = ("true on-policy", "all-gather")
"""Options with which the framework's own function is kept."""
NOT_PADDED = ("gspo, dual clip, gates", "sequences, opsm, gspo")
"""Options with which Miles fails for padded sequences and two ranks: it gathers responses as if they were packed."""
DIFFERENT = {("miles", "rollout log-probs"): ("train_rollout_logprob_abs_diff", "train_rollout_kl")}
"""Miles compares the behavior log-probs with themselves there, and reports 0; we compare the current ones."""


def without_differences(host: str, name: str, found: dict) -> dict:
    """The metrics that must be equal."""
    left_out = DIFFERENT.get((host, name), ())
    return found | {"metrics": {key: value for key, value in found["metrics"].items() if key not in left_out}}


def reduce_by_kept(total_lengths, response_lengths, masks, calculate_per_token_loss):
    """A reducer as users write it: the mean over all counted tokens."""
    assert len(total_lengths) == len(response_lengths) == len(masks)
    assert not calculate_per_token_loss

    def reduce(loss):
        parts = loss.split(response_lengths)
        return sum((part * mask).sum() for part, mask in zip(parts, masks, strict=True)) / sum(map(torch.sum, masks))

    return reduce


def reduce_by_constant(total_lengths, response_lengths, masks, calculate_per_token_loss):
    """A reducer that does not need to know the part of a rank."""
    return lambda loss: loss.sum() / 100.0


def refuse_masks(*_):
    """A reducer that cannot be created."""
    raise ZeroDivisionError("a reducer of no tokens")


def refuse_loss(*_):
    """A reducer that cannot be called."""
    return refuse_masks


def host_args(**options) -> Namespace:
    """Arguments as in slime and Miles."""
    defaults = {
        "advantage_estimator": "grpo",
        "allgather_cp": False,
        "calculate_per_token_loss": False,
        "custom_pg_loss_reducer_function_path": None,
        "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp",
        "entropy_coef": 0.0,
        "eps_clip": 0.1,
        "eps_clip_c": None,
        "eps_clip_high": 0.15,
        "get_mismatch_metrics": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "log_probs_chunk_size": -1,
        "observe_training_entropy": True,
        "opsm_delta": 1e-4,
        "qkv_format": "thd",
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "skip_actor_forward_only": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0,
        "true_on_policy_mode": False,
        "use_kl_loss": False,
        "use_opsm": False,
        "use_rollout_logprobs": False,
        "use_tis": False,
        "use_unbiased_kl": False,
    }
    return Namespace(**defaults | options)


def whole_batch(*, dtype=torch.float32) -> dict:
    """Logits ``[L, V]`` per sample, and a batch of whole samples."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    def noise(samples: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
        return [sample + scale * normal(len(sample)) for sample in samples]

    logits = [normal(total, VOCABULARY) for total in TOTALS]
    tokens = [torch.randint(VOCABULARY, (total,), generator=generator) for total in TOTALS]
    current = [
        x.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[prompt - 1 : -1, 0]
        for x, ids, (prompt, _) in zip(logits, tokens, LENGTHS, strict=True)
    ]
    old = noise(current, 0.12)
    masks = [(torch.rand(response, generator=generator) > 0.2).int() for response in RESPONSES]
    masks[2][0] = masks[0][4] = 1
    masks[-1].zero_()
    own = [int(mask.sum()) for mask in masks]
    sums = [sum(n for n, other in zip(own, ROLLOUTS, strict=True) if other == rollout) for rollout in ROLLOUTS]
    sums = [total + 2 * (rollout == 1) for total, rollout in zip(sums, ROLLOUTS, strict=True)]
    values = {
        "advantages": noise([torch.full((n,), 1.0 - 2.0 * (i % 2)) for i, n in enumerate(RESPONSES)], 0.3),
        "log_probs": old,
        "rollout_log_probs": noise(old, 0.15),
        "ref_log_probs": noise(current, 0.4),
        "opd_reverse_kl": noise(old, 0.1),
    }
    # Beyond the cap of low_var_kl.
    values["ref_log_probs"][0][4] = current[0][4] + 3.0
    return {
        "logits": [x.to(dtype) for x in logits],
        "unconcat_tokens": tokens,
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor(sums, dtype=torch.float32),
        **{key: [x.to(dtype) for x in samples] for key, samples in values.items()},
    }


PER_TOKEN = ("advantages", "log_probs", "rollout_log_probs", "ref_log_probs", "opd_reverse_kl")


def without_sample(batch: dict, index: int) -> dict:
    """All samples but one."""
    kept = [number for number in range(len(batch["response_lengths"])) if number != index]
    return {
        key: values[kept] if isinstance(values, torch.Tensor) else [values[number] for number in kept]
        for key, values in batch.items()
    }


def with_top_p(batch: dict, *, unrecorded: int = 0) -> dict:
    """With two to five kept ids of each response token, or none; the end of the first sample has no record."""
    generator = torch.Generator().manual_seed(5)
    ids_S, offsets_S = [], []
    for response in batch["response_lengths"]:
        counts = torch.randint(2, 6, (response,), generator=generator)
        counts[::4] = 0
        ids = [torch.randperm(VOCABULARY, generator=generator)[: int(count)] for count in counts]
        ids_S.append(torch.cat([*ids, torch.zeros(0, dtype=torch.int64)]).int())
        offsets_S.append(torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32))
    if unrecorded:
        offsets_S[0] = offsets_S[0][:-unrecorded]
        ids_S[0] = ids_S[0][: int(offsets_S[0][-1])]
    # The rollouts of the frameworks have lists too.
    ids_S[1], offsets_S[1] = ids_S[1].tolist(), offsets_S[1].tolist()
    return batch | {"rollout_top_p_token_ids": ids_S, "rollout_top_p_token_offsets": offsets_S}


def local_batch(batch: dict, *, cp_rank: int = 0, cp_size: int = 1, is_padded: bool = False) -> dict:
    """This rank's part, with its logits ``[1, T, V]``, or ``[B, L, V]`` for padded sequences."""
    totals = batch["total_lengths"]
    padded = [MAX_SEQ_LEN] * len(totals) if is_padded else None
    local = dict(batch)
    for key in [key for key in (*PER_TOKEN, "state_values") if key in batch]:
        local[key] = take(batch[key], total_lengths=totals, cp_rank=cp_rank, cp_size=cp_size, padded_lengths=padded)
    rows = [
        local_rows(x, cp_rank=cp_rank, cp_size=cp_size, length=MAX_SEQ_LEN if is_padded else len(x))
        for x in batch["logits"]
    ]
    local["logits"] = torch.stack(rows) if is_padded else torch.cat(rows).unsqueeze(0)
    if is_padded:
        local["max_seq_lens"] = padded
    return local


def local_rows(logits: torch.Tensor, *, cp_rank: int, cp_size: int, length: int) -> torch.Tensor:
    """A sample's rows on this rank, padded."""
    if cp_size == 1:
        return torch.nn.functional.pad(logits, (0, 0, 0, length - len(logits)))
    chunk = math.ceil(length / (2 * cp_size))
    chunks = torch.nn.functional.pad(logits, (0, 0, 0, 2 * cp_size * chunk - len(logits))).split(chunk)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def contiguous_rows(batch: dict, *, cp_rank: int, cp_size: int) -> torch.Tensor:
    """``[1, T, V]``: the rank's part of the rows of all samples, for attention that gathers all rows."""
    rows = torch.cat(batch["logits"])
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % cp_size)).chunk(cp_size)[cp_rank].unsqueeze(0)


def with_options(batch: dict, args: Namespace) -> dict:
    """Without keys that the framework would not have."""
    return batch | {"log_probs": None} if args.skip_actor_forward_only else batch


def of_lengths(lengths: list[int]) -> dict:
    """A micro-batch with prompts of three tokens, and log-probs instead of logits."""
    generator = torch.Generator().manual_seed(0)

    def column() -> list:
        return list((torch.randn(sum(lengths), generator=generator) * 0.05 - 2.0).split(lengths))

    keys = ("current", "entropy", "advantages", "log_probs", "rollout_log_probs", "ref_log_probs")
    return {key: column() for key in keys} | {
        "unconcat_tokens": [torch.randint(8, (length + 3,), generator=generator) for length in lengths],
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in lengths],
        "rollout_mask_sums": torch.tensor(lengths).float(),
        "total_lengths": [length + 3 for length in lengths],
        "response_lengths": lengths,
        "logits": torch.zeros(1, 1, 2),
    }
