# SPDX-License-Identifier: Apache-2.0
"""What each mode of the whole loss is: its formula in float64, written out here, and how the modes relate."""

import loss_cases
import pytest
import torch
from loss_cases import GATES, HOOK, KL, SEQUENCES

from mis_ext import CorrectionConfig, compute_mis_weights, config_from_mapping
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import Host, batch_loss, plain_scores
from mis_ext.hosts.session import current_run
from mis_ext.loss.policy import MILES_METRICS

PLAIN = Host(Groups(), plain_scores)
BEHAVIOR = {"use_rollout_logprobs": True}
UNBOUNDED = {key: value for key, value in HOOK.items() if key != "tis_upper_bound"} | {"tis_mode": "unbounded"}
PENALTIES = KL | {"kl_loss_type": "k3", "mis_loss_unbiased_kl": True, "entropy_coef": 0.1, "rollout_temperature": 0.7}
MODES = {
    "baseline": GATES,
    "decoupled": {"mis_loss_mode": "decoupled"} | GATES,
    "decoupled, sequence weights": {"mis_loss_mode": "decoupled"} | SEQUENCES,
    "bypass": {"mis_loss_mode": "bypass"} | BEHAVIOR | GATES,
    "bypass, sequence weights": {"mis_loss_mode": "bypass"} | BEHAVIOR | SEQUENCES,
    "bypass, gates alone": {"mis_loss_mode": "bypass", "tis_level": "none"}
    | BEHAVIOR
    | {key: value for key, value in GATES.items() if not key.startswith("tis_")},
    "reinforce": {"mis_loss_mode": "reinforce"} | BEHAVIOR | GATES,
    "reinforce, sequence weights": {"mis_loss_mode": "reinforce"} | BEHAVIOR | SEQUENCES,
}


def test_a_kl_of_the_rollout_counts_at_most_10_of_a_token_as_in_miles() -> None:
    batch = double_batch()
    batch["rollout_log_probs"] = [each - 30.0 for each in batch["log_probs"]]
    logits = batch.pop("logits").requires_grad_()
    run = current_run(loss_cases.host_args(), whole_loss=True)
    metrics = batch_loss(run, Host(Groups(), plain_scores, MILES_METRICS), batch, logits).metrics
    torch.testing.assert_close(metrics["train_rollout_kl"] / 10.0, metrics["train_rollout_logprob_abs_diff"] / 30.0)


def double_batch() -> dict:
    return loss_cases.local_batch(loss_cases.whole_batch(dtype=torch.float64))


def computed(keys: dict, batch: dict | None = None, **more):
    """Loss, metrics, and the gradient in the logits."""
    batch = dict(double_batch() if batch is None else batch)
    logits = batch.pop("logits").clone().requires_grad_()
    found = batch_loss(current_run(loss_cases.host_args(**keys | more), whole_loss=True), PLAIN, batch, logits)
    (gradient,) = torch.autograd.grad(found.loss, logits)
    return found.loss.detach(), found.metrics, gradient


def log_probs_of(logits: torch.Tensor, batch: dict, temperature: float) -> tuple[list, list]:
    """Of each response its tokens' log-probs, and the entropies."""
    log_probs, entropies, begin = [], [], 0
    for ids, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        rows = logits[0, begin + total - response - 1 : begin + total - 1] / temperature
        log_p = rows - rows.logsumexp(-1, keepdim=True)
        log_probs.append(log_p.gather(-1, ids[total - response :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        begin += total
    return log_probs, entropies


def correction_of(keys: dict, trainer: list, batch: dict) -> tuple[list, list]:
    """Weights and kept tokens; the one thing that is not written out here, for it has judges of its own."""
    config = config_from_mapping({key: value for key, value in keys.items() if key.startswith(("tis_", "rs_", "use_"))})
    assert isinstance(config, CorrectionConfig)
    weights, masks, _ = compute_mis_weights(
        config,
        train_log_probs=[x.detach() for x in trainer],
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
    )
    return weights, masks


def written_out(keys: dict, batch: dict, logits: torch.Tensor, *, now: torch.Tensor) -> torch.Tensor:
    """The loss of a mode; what has no gradient is that of the logits ``now``."""
    args = loss_cases.host_args(**keys)
    mode = keys.get("mis_loss_mode", "baseline")
    current, entropies = log_probs_of(logits, batch, args.rollout_temperature)
    frozen, _ = log_probs_of(now, batch, args.rollout_temperature)
    weights, kept = correction_of(keys, batch["log_probs"] if mode in ("baseline", "decoupled") else frozen, batch)
    total = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(kept):
        advantage, behavior = batch["advantages"][i], batch["rollout_log_probs"][i]
        weight = weights[i].double()
        if mode == "reinforce":
            gain = weight * advantage * current[i]
        else:
            old = behavior if mode == "bypass" else batch["log_probs"][i]
            ratio = (current[i] - old).exp()
            clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            if mode == "bypass" and keys.get("tis_level") != "none":
                # The whole weight is that of the correction: the ratio has the token's own in it already.
                weight = weight / (frozen[i] - behavior).exp()
            gain = weight * gain
        distance = current[i] - batch["ref_log_probs"][i]
        kl = (current[i] - behavior).exp() * ((-distance).exp() - 1 + distance)
        tokens = -gain - args.entropy_coef * entropies[i] + args.kl_loss_coef * kl
        total = total + (tokens * mask).sum() / batch["rollout_mask_sums"][i].double()
    return total


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_a_finite_difference_of_the_loss_as_written_out(mode) -> None:
    keys = MODES[mode] | PENALTIES
    batch = double_batch()
    loss, _, gradient = computed(keys)
    logits = batch["logits"]
    torch.testing.assert_close(loss, written_out(keys, batch, logits, now=logits), rtol=1e-6, atol=1e-7)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        ends = [written_out(keys, batch, logits + step * direction, now=logits) for step in (1e-5, -1e-5)]
        torch.testing.assert_close((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-7)


def assert_same(one: tuple, other: tuple) -> None:
    torch.testing.assert_close((one[0], one[2]), (other[0], other[2]), rtol=1e-6, atol=1e-9)


# --- denominators and rejected tokens


def divisors(denominator: str, batch: dict, kept: list) -> list[float]:
    own, left = ([max(float(m.sum()), 1.0) for m in masks] for masks in (batch["loss_masks"], kept))
    host = batch["rollout_mask_sums"].clamp_min(1.0).tolist()
    return {
        "original": host,
        "kept": [d * k / n for d, k, n in zip(host, left, own, strict=True)],
        "sequence": own,
        "constant": [5.0] * len(own),
    }[denominator]


@pytest.mark.parametrize("denominator", ["original", "kept", "sequence", "constant"])
def test_a_denominator_divides_each_sample_and_nothing_but_the_policy_gradient(denominator) -> None:
    batch = double_batch()
    more = {"mis_loss_constant": 5.0} if denominator == "constant" else {}
    keys = GATES | {"entropy_coef": 0.1, "mis_loss_denominator": denominator} | more
    loss, metrics, _ = computed(keys)
    weights, kept = correction_of(GATES, batch["log_probs"], batch)
    assert any(k.sum() < m.sum() for k, m in zip(kept, batch["loss_masks"], strict=True))
    current, _ = log_probs_of(batch["logits"], batch, 1.0)
    wanted = 0.0
    for i, divisor in enumerate(divisors(denominator, batch, kept)):
        ratio = (current[i] - batch["log_probs"][i]).exp()
        advantage = batch["advantages"][i]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)
        wanted = wanted - (weights[i] * gain * kept[i]).sum() / divisor
    torch.testing.assert_close(metrics["pg_loss"], wanted, rtol=1e-6, atol=1e-8)
    original = computed(GATES | {"entropy_coef": 0.1})
    assert torch.equal(metrics["entropy_loss"], original[1]["entropy_loss"])
    torch.testing.assert_close(loss, wanted - 0.1 * metrics["entropy_loss"], rtol=1e-6, atol=1e-8)
    # The gradient of one sample's rows, without the entropy's share, changes by the ratio of the divisors.
    before, after = computed(GATES)[2], computed(GATES | more, mis_loss_denominator=denominator)[2]
    begin = 0
    for i, total in enumerate(batch["total_lengths"]):
        factor = divisors("original", batch, kept)[i] / divisors(denominator, batch, kept)[i]
        rows = slice(begin, begin + total)
        torch.testing.assert_close(after[0, rows], before[0, rows] * factor, rtol=1e-6, atol=1e-9)
        begin += total


@pytest.mark.parametrize("part", ["kl", "entropy"])
def test_penalties_lose_rejected_tokens_unless_told_to_keep_them(part) -> None:
    name = {"kl": "kl_loss", "entropy": "entropy_loss"}[part]
    keys = KL | {"kl_loss_type": "k3", "entropy_coef": 0.1}
    free, lost = computed(keys), computed(keys | GATES)
    kept = computed(keys | GATES, **{f"mis_loss_{part}_tokens": "all"})
    assert torch.equal(free[1][name], kept[1][name])
    assert lost[1][name] < kept[1][name]
    assert torch.equal(lost[1]["pg_loss"], kept[1]["pg_loss"])
    coefficient = {"kl": 0.3, "entropy": -0.1}[part]
    torch.testing.assert_close(kept[0] - lost[0], coefficient * (kept[1][name] - lost[1][name]))
    assert not torch.allclose(kept[2], lost[2], rtol=1e-3)


def test_a_token_without_a_log_prob_adds_nothing() -> None:
    batch = double_batch()
    place, other = (0, 3), (1, 0)
    for i, t in (place, other):
        batch["loss_masks"][i][t] = 1
    masked = double_batch()
    for i, t in (place, other):
        masked["loss_masks"][i][t] = 0
    for key, value, (i, t) in (("log_probs", torch.nan, place), ("advantages", torch.inf, other)):
        batch[key] = [x.clone() for x in batch[key]]
        batch[key][i][t] = value
    assert_same(computed(KL | {"entropy_coef": 0.1}, batch), computed(KL | {"entropy_coef": 0.1}, masked))
