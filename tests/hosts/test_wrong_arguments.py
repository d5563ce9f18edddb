# SPDX-License-Identifier: Apache-2.0
"""An argument that is missing, of a wrong type or too short is an error that names it."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loss_cases
import pytest
import torch
from hook_batches import make_batch

import mis_ext
from mis_ext import PackedLayout

LOSS = {"use_tis": True, "mis_guard": "warn", "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.1}
PROMPTS = {"mis_prompt_mean": True, "n_samples_per_prompt": 2}


def log_probs(*shape: int) -> torch.Tensor:
    return torch.linspace(-3.0, -0.1, torch.Size(shape).numel()).view(shape)


def padded() -> dict[str, Any]:
    given = {name: log_probs(3, 5) for name in ("current", "behavior", "proximal", "reference")}
    given = {f"{name}_logprobs": values for name, values in given.items()}
    more = {"advantages": torch.ones(3, 5), "response_mask": torch.ones(3, 5), "divisors": torch.ones(3)}
    return given | more | {"entropy": torch.ones(3, 5)}


def from_hidden() -> dict[str, Any]:
    given = {name: values for name, values in padded().items() if name not in ("current_logprobs", "entropy")}
    return given | {"hidden": torch.ones(3, 5, 4), "weight": torch.ones(8, 4), "token_ids": torch.ones(3, 5).long()}


def rollout() -> dict[str, Any]:
    batch = make_batch(4, 10)
    batch |= {"log_probs": batch.pop("train_log_probs"), "advantages": [batch.pop("pg_loss")[:10]] * 4}
    batch |= {name: [0, 1, 2, 3] for name in ("rewards", "sample_indices", "rollout_ids")}
    batch |= {"global_batch_sizes": [2, 2], "num_microbatches": [1, 1], "micro_batch_indices": [[0, 1], [2, 3]]}
    return batch | {"rollout_mask_sums": torch.full((4,), 10.0)}


def scored() -> dict[str, Any]:
    return {"token_T": torch.tensor([1, 2]), "row_T": torch.tensor([0, 3])}


def corrected() -> dict[str, Any]:
    names = ("proximal_logprobs_T", "behavior_logprobs_T", "response_mask_R", "lag_T")
    return {name: log_probs(5).abs() for name in names} | {"layout": PackedLayout.whole([2, 3])}


def call_loss(logits: Any = None, **batch: Any) -> Any:
    return mis_ext.policy_loss(loss_cases.host_args(**LOSS), batch, logits)


CALLS: dict[str, tuple[Callable[[], dict], Callable[..., Any]]] = {
    "policy_loss_from_log_probs": (padded, lambda **given: mis_ext.policy_loss_from_log_probs(LOSS, **given)),
    "policy_loss_from_hidden": (from_hidden, lambda **given: mis_ext.policy_loss_from_hidden(LOSS, **given)),
    "policy_loss": (lambda: loss_cases.local_batch(loss_cases.whole_batch()), call_loss),
    "hook": (make_batch, lambda **given: mis_ext.compute_mis_weights_with_cp(argparse.Namespace(), **given)),
    "prepare_rollout": (rollout, lambda **given: mis_ext.prepare_rollout(argparse.Namespace(**PROMPTS), 0, given)),
    "log_mismatch": (rollout, lambda **given: mis_ext.log_mismatch(None, 0, given)),
    "score_tokens": (lambda: scored() | {"logits": torch.ones(4, 8)}, mis_ext.score_tokens),
    "score_hidden": (
        lambda: scored() | {"hidden": torch.ones(4, 3), "weight": torch.ones(8, 3), "bias": torch.ones(8)},
        mis_ext.score_hidden,
    ),
    "compute_correction": (
        corrected,
        lambda **given: mis_ext.compute_correction(**given, config=mis_ext.CorrectionConfig(staleness=True)),
    ),
    "group_advantages": (
        lambda: {"rewards": torch.ones(4), "groups": torch.tensor([0, 0, 1, 1]), "counted": torch.ones(4)},
        mis_ext.group_advantages,
    ),
}
OTHER_NAMES = {"sample_indices": "samples have no index", "row_T": "token_T"}


ABSENT = object()


def wrong(value: Any) -> Iterator[Any]:
    """In place of a legal value."""
    yield from (ABSENT, None)
    if isinstance(value, torch.Tensor):
        yield from (value.tolist(), value[:-1], value.unsqueeze(-1))
        if value.ndim == 3:
            yield value[:, :2]
    elif isinstance(value, list):
        yield from ([None, *value[1:]], value[:-1])


@pytest.mark.filterwarnings("ignore::mis_ext.MismatchWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name) -> None:
    make, call = CALLS[name]
    call(**make())
    unnamed = []
    for key in make():
        for value in wrong(make()[key]):
            try:
                given = make() | {key: value}
                call(**{name: each for name, each in given.items() if each is not ABSENT})
            except (ValueError, TypeError) as error:
                names = (key, key.removesuffix("_T"), OTHER_NAMES.get(key, key))
                if not any(each in str(error) for each in names) or "object" in str(error):
                    unnamed.append((key, value, error))
            except Exception as error:
                unnamed.append((key, value, error))
    assert unnamed == []


@pytest.mark.parametrize("args", [None, "mis.yaml", Path("mis.yaml"), [], mis_ext.CorrectionConfig()], ids=type)
def test_args_that_can_hold_no_key_are_refused(args) -> None:
    calls = {
        mis_ext.policy_loss_from_log_probs: padded(),
        mis_ext.policy_loss_from_hidden: from_hidden(),
        mis_ext.make_loss_func: {"batch": {}},
        mis_ext.policy_loss: {"batch": {}, "logits": None},
        mis_ext.compute_mis_weights_with_cp: make_batch(),
        mis_ext.session_for: {},
        mis_ext.prepare_rollout: {},
        mis_ext.group_rewards: {"samples": []},
        mis_ext.check_setup: {},
    }
    for call, given in calls.items():
        with pytest.raises(TypeError, match=rf"args must be a mapping .* got a {type(args).__name__}"):
            call(args, **given)


def test_too_few_logits_are_said_with_the_lengths_and_before_a_device_finds_out() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    with pytest.raises(ValueError, match=r"logits have shape \[1, 2, 8\] with 2 rows, but total_lengths"):
        call_loss(**batch | {"logits": batch["logits"][:, :2]})
