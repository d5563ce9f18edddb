# SPDX-License-Identifier: Apache-2.0
"""Drawn key files: what ``check_setup`` passes, each key of it changes something in slime's first step."""

import argparse
import contextlib
import functools
import io
import random
import warnings
from typing import Any

import loss_cases
import torch

import mis_ext
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles.rollout import TokenLags
from mis_ext.methods import METHODS

ROLLOUT = {
    "rollout_data_postprocess_path": "mis_ext.prepare_rollout",
    "custom_generate_function_path": "mis_ext.rollout.generate",
}
HOOK = {"loss_type": "policy_loss"} | ROLLOUT
LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"} | ROLLOUT
SWITCHES = (*[{"use_tis": True}] * 6, {"get_mismatch_metrics": True}, {})
FLAGS = ({}, loss_cases.KL | {"kl_loss_type": "k3", "entropy_coef": 0.1}, {"calculate_per_token_loss": True})
OF_CORRECTION: dict[str, tuple] = {
    "tis_level": ("sequence", "geometric", "none"),
    "tis_mode": ("clip", "mask", "unbounded"),
    "tis_upper_bound": (1.2,),
    "tis_lower_bound": (0.9,),
    "tis_when": ("stale",),
    "use_rs": (True,),
    "rs_level": ("sequence", "geometric", "none"),
    "rs_lower_bound": (0.95,),
    "rs_upper_bound": (1.1,),
    "rs_gates": ([{"statistic": "proximal_probability", "low": 0.12}],),
    "rs_veto_threshold": (0.45,),
    "rs_veto_upper_threshold": (2.2,),
    "rs_veto_probability": (0.08,),
    "rs_max_staleness": (0, 1),
    "rs_staleness_level": ("sequence_max",),
    "tis_batch_normalize": (True,),
    "tis_normalize_over": ("valid",),
    "mis_denominator": ("kept",),
    "mis_staleness": (True,),
    "mis_metrics": ("all", ["mis_kl"], []),
    "mis_metric_max": (1e-4,),
}
OF_LOSS: dict[str, tuple] = {
    "mis_loss_method": tuple(name for name in METHODS if name != "ppo"),
    "mis_loss_mode": ("bypass", "reinforce"),
    "mis_loss_denominator": ("kept", "sequence", "constant"),
    "mis_loss_constant": (7.0,),
    "mis_loss_kl_tokens": ("all",),
    "mis_loss_entropy_tokens": ("all",),
    "mis_loss_unbiased_kl": (True,),
    "mis_loss_proximal": ("current",),
}
"""Values that are not the default. Not drawn are keys that say how, that stop or warn of faults, or act among ranks."""


def drawn(draw: random.Random) -> tuple[dict, dict]:
    launch = draw.choice((HOOK, LOSS)) | draw.choice(SWITCHES) | draw.choice(FLAGS)
    pool = OF_CORRECTION if launch["loss_type"] == "policy_loss" and draw.random() < 0.9 else OF_CORRECTION | OF_LOSS
    keys = draw.sample([*pool], draw.randint(1, 5))
    if "mis_loss_proximal" in keys:  # Where the ratio is 1 many methods are one.
        keys = [key for key in keys if key != "mis_loss_method"]
    return launch, {key: draw.choice(pool[key]) for key in keys}


def arguments(keys: dict) -> argparse.Namespace:
    return loss_cases.host_args(**{"eps_clip": 0.2, "eps_clip_high": None} | keys)


RATIOS = [[ratio] for ratio in (0.4, 0.47, 0.7, 0.87, 0.92, 1.02, 1.15, 1.5, 2.1, 2.5)] * 3
RATIOS += [[0.4, *[1.08] * 12], [2.5, *[0.955] * 20], [1.02] * 4, [0.98] * 4]
"""Of responses, one on each side of every bound; and an outlier whose response is within each of them."""
UNLIKELY = {5: -3.0, -8: -3.0, -7: -2.3}
"""Responses whose first token has another log-prob of the trainer."""


def logits_of(current: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows that give each token of a response, after a prompt of one, its log-prob; and one that scores nothing."""
    rows = ((1.0 - current.exp()) / 7).log()[:, None].repeat(1, 8).scatter(1, tokens[1:, None], current[:, None])
    return torch.cat([rows, torch.zeros(1, 8)])


@functools.cache
def batch_of() -> dict[str, Any]:
    """Besides ``RATIOS`` six longer responses; samples that share a rollout, a masked token, one without a log-prob."""
    draw = torch.Generator().manual_seed(1)
    responses = [*map(len, RATIOS), *[4, 5, 6] * 2]

    def near(samples: list[torch.Tensor], *, scale: float) -> list[torch.Tensor]:
        return [x + scale * torch.randn(len(x), generator=draw) for x in samples]

    def flat(value: float) -> list[torch.Tensor]:
        return [torch.full((length,), value) for length in responses]

    batch: dict[str, Any] = {
        "response_lengths": responses,
        "total_lengths": [length + 1 for length in responses],
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in responses],
        "rollout_mask_sums": torch.tensor(responses) + torch.arange(len(responses)) % 3,
        "unconcat_tokens": [torch.randint(8, (length + 1,), generator=draw) for length in responses],
        "advantages": near(flat(0.0), scale=1.0),
        "log_probs": near(flat(-2.0), scale=0.05),
        "ref_log_probs": near(flat(-2.0), scale=0.3),
    }
    for number, value in UNLIKELY.items():
        batch["log_probs"][number][0] = value
    batch["rollout_log_probs"] = near(batch["log_probs"], scale=0.4)
    for number, ratios in enumerate(RATIOS):
        batch["rollout_log_probs"][number] = batch["log_probs"][number] - torch.tensor(ratios).log()
    current = near(batch["log_probs"], scale=0.01)
    current[len(RATIOS) :] = near(current[len(RATIOS) :], scale=0.4)
    batch["logits"] = torch.cat([logits_of(*pair) for pair in zip(current, batch["unconcat_tokens"], strict=True)])[
        None
    ]
    batch["loss_masks"][-1][1] = 0
    batch["rollout_log_probs"][-2][1] = torch.nan
    return batch


def first_step(keys: dict) -> list[torch.Tensor]:
    """All that slime gets: values of the loss, its gradient, masks, metrics with their names."""
    args, batch = arguments(keys), dict(batch_of())
    is_hook = keys["loss_type"] == "policy_loss"
    lags = [(torch.arange(len(sample)) + place) % 3.0 for place, sample in enumerate(batch["rollout_log_probs"])]
    lags[30:34] = map(torch.zeros_like, lags[30:34])
    current_run(args, whole_loss=not is_hook).session.token_lags = TokenLags(batch["rollout_log_probs"], lags)
    logits = batch.pop("logits").clone().requires_grad_()
    if not is_hook:
        loss, metrics = mis_ext.policy_loss(args, batch, logits)
        loss.backward()
        return [loss.detach(), logits.grad, *of_names(metrics)]
    names = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
    pg_loss = torch.cat(batch["advantages"]).requires_grad_()
    loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(
        args, pg_loss=pg_loss, train_log_probs=batch["log_probs"], **{name: batch[name] for name in names}
    )
    loss.sum().backward()
    return [loss.detach(), pg_loss.grad, *masks, *of_names(metrics)]


def of_names(metrics: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [*metrics.values(), torch.tensor([hash(name) for name in metrics])]


def attempt(keys: dict) -> tuple[list[torch.Tensor] | None, str]:
    """The first step, None where it is refused, and all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = first_step(keys)
        except (ValueError, TypeError):
            found = None
    return found, "\n".join(str(each.message) for each in caught)


def test_no_drawn_key_passes_the_check_and_does_nothing() -> None:
    draw, silent, surprising, num_passed = random.Random(75), [], [], 0
    for _ in range(300):
        launch, keys = drawn(draw)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                mis_ext.check_setup(arguments(launch | keys))
            except (ValueError, TypeError):
                continue
        found, said = attempt(launch | keys)
        if found is None:
            surprising.append(launch | keys)
            continue
        num_passed += 1
        for key in keys:
            without, _ = attempt(launch | {other: value for other, value in keys.items() if other != key})
            if key not in said and without is not None and equal(found, without):
                silent.append((key, launch | keys))
    assert surprising == []
    assert silent == []
    assert num_passed > 60


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=False)
    is_equal = [a.shape == b.shape and torch.equal(a.nan_to_num(-1e9), b.nan_to_num(-1e9)) for a, b in pairs]
    return len(one) == len(other) and all(is_equal)
