"""What the weights estimate, by enumerating every response of a small policy instead of sampling.

The behavior and proximal policies are tables of next-token probabilities per prefix. Token 0 ends a response, and so
does the maximal length. Expectations are exact sums; only the package's weights are float32.
"""

import math

import pytest
import torch
from reference import Samples

import mis_ext

VOCABULARY = 3
MAX_LENGTH = 4
# float32 weights inside float64 sums.
RTOL = 2e-6


class Toy:
    """Two policies over all responses; `sharpness` sets how far they are apart."""

    def __init__(self, *, seed: int, sharpness: float = 1.0, max_length: int = MAX_LENGTH, stops: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.behavior: dict[tuple, torch.Tensor] = {}
        self.proximal: dict[tuple, torch.Tensor] = {}
        self.responses: list[tuple] = []
        pending: list[tuple] = [()]
        while pending:
            prefix = pending.pop()
            logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
            shift = sharpness * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
            self.behavior[prefix] = logits.softmax(0)
            self.proximal[prefix] = (logits + shift).softmax(0)
            for token in range(VOCABULARY):
                longer = (*prefix, token)
                done = len(longer) == max_length or (stops and token == 0)
                (self.responses if done else pending).append(longer)
        self.value = {y: float(torch.randn((), generator=generator)) for y in self.responses}

    def log_probs(self, policy: dict, response: tuple) -> torch.Tensor:
        return torch.stack([policy[response[:t]][token] for t, token in enumerate(response)]).log()

    def probability(self, policy: dict, response: tuple) -> float:
        return float(self.log_probs(policy, response).sum().exp())

    def samples(self) -> Samples:
        return Samples(
            [self.log_probs(self.proximal, y).float() for y in self.responses],
            [self.log_probs(self.behavior, y).float() for y in self.responses],
            [torch.ones(len(y)) for y in self.responses],
        )

    def prefix_probability(self, policy: dict, prefix: tuple) -> float:
        return self.probability(policy, prefix) if prefix else 1.0

    def value_after(self, policy: dict, prefix: tuple) -> float:
        """Expected value of the responses that start with `prefix`, continued by `policy`."""
        total = 0.0
        for y in self.responses:
            if y[: len(prefix)] == prefix:
                total += self.probability(policy, y) * self.value[y]
        return total / self.prefix_probability(policy, prefix)


def corrected(toy: Toy, **keys) -> tuple[list[list[float]], list[list[float]]]:
    samples = toy.samples()
    weights, masks, _ = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping({"use_tis": True, "mis_guard": "warn", **keys}),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    return [w.double().tolist() for w in weights], [m.double().tolist() for m in masks]


@pytest.mark.parametrize("stops", [True, False], ids=["with end token", "fixed length"])
@pytest.mark.parametrize("seed", range(3))
def test_sequence_weights_without_bounds_are_unbiased(seed, stops):
    toy = Toy(seed=seed, stops=stops)
    weights, _ = corrected(toy, tis_level="sequence", tis_mode="unbounded")
    estimate = sum(
        toy.probability(toy.behavior, y) * w[0] * toy.value[y] for y, w in zip(toy.responses, weights, strict=True)
    )
    truth = sum(toy.probability(toy.proximal, y) * toy.value[y] for y in toy.responses)
    naive = sum(toy.probability(toy.behavior, y) * toy.value[y] for y in toy.responses)
    assert math.isclose(estimate, truth, rel_tol=RTOL, abs_tol=RTOL)
    assert abs(naive - truth) > 1e-3


@pytest.mark.parametrize("cap", [1.0, 1.25, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_truncation_bias_is_the_excess_weight_and_stays_below_its_bound(seed, cap):
    toy = Toy(seed=seed)
    weights, _ = corrected(toy, tis_level="sequence", tis_mode="truncate", tis_upper_bound=cap)
    truth = estimate = excess = excess_value = 0.0
    for y, w in zip(toy.responses, weights, strict=True):
        mu, pi = toy.probability(toy.behavior, y), toy.probability(toy.proximal, y)
        truth += pi * toy.value[y]
        estimate += mu * w[0] * toy.value[y]
        excess += max(pi - cap * mu, 0.0)
        excess_value += max(pi - cap * mu, 0.0) * toy.value[y]
    bias = truth - estimate
    assert math.isclose(bias, excess_value, rel_tol=RTOL, abs_tol=RTOL)
    assert abs(bias) <= excess * max(abs(v) for v in toy.value.values()) + RTOL
    assert excess > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_masked_weight_estimates_the_target_on_what_is_kept(seed):
    toy = Toy(seed=seed)
    weights, masks = corrected(toy, tis_level="sequence", tis_mode="mask", tis_lower_bound=0.5, tis_upper_bound=2.0)
    estimate = truth = kept = 0.0
    for y, w, m in zip(toy.responses, weights, masks, strict=True):
        mu, pi = toy.probability(toy.behavior, y), toy.probability(toy.proximal, y)
        inside = 0.5 <= pi / mu <= 2.0
        estimate += mu * w[0] * m[0] * toy.value[y]
        truth += pi * inside * toy.value[y]
        kept += pi * inside
    assert math.isclose(estimate, truth, rel_tol=RTOL, abs_tol=RTOL)
    assert 0 < kept < 1


def token_weighted_sum(toy: Toy, weights: list[list[float]]) -> dict[tuple, float]:
    """E_mu[sum_t w_t f(y) 1{s_t = s, a_t = a}] for every state s and action a."""
    out: dict[tuple, float] = {}
    for y, w in zip(toy.responses, weights, strict=True):
        for t in range(len(y)):
            out[y[: t + 1]] = out.get(y[: t + 1], 0.0) + toy.probability(toy.behavior, y) * w[t] * toy.value[y]
    return out


@pytest.mark.parametrize("seed", range(3))
def test_token_weights_correct_the_action_but_neither_the_state_nor_what_follows(seed):
    toy = Toy(seed=seed)
    weights, _ = corrected(toy, tis_level="token", tis_mode="unbounded")
    estimate = token_weighted_sum(toy, weights)
    unbiased = True
    for longer, actual in estimate.items():
        state, action = longer[:-1], longer[-1]
        chosen = float(toy.proximal[state][action])
        stated = toy.prefix_probability(toy.behavior, state) * chosen * toy.value_after(toy.behavior, longer)
        wanted = toy.prefix_probability(toy.proximal, state) * chosen * toy.value_after(toy.proximal, longer)
        assert math.isclose(actual, stated, rel_tol=RTOL, abs_tol=RTOL)
        unbiased &= math.isclose(actual, wanted, rel_tol=1e-3)
    assert not unbiased


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_for_one_token_responses_every_level_is_unbiased(level):
    toy = Toy(seed=5, max_length=1)
    weights, _ = corrected(toy, tis_level=level, tis_mode="unbounded")
    for longer, actual in token_weighted_sum(toy, weights).items():
        wanted = toy.probability(toy.proximal, longer) * toy.value[longer]
        assert math.isclose(actual, wanted, rel_tol=RTOL, abs_tol=RTOL)


@pytest.mark.parametrize("seed", range(3))
def test_the_expected_token_ratio_is_one_in_every_state_and_the_geometric_mean_falls_short(seed):
    toy = Toy(seed=seed, stops=False)
    token, _ = corrected(toy, tis_level="token", tis_mode="unbounded")
    geometric, _ = corrected(toy, tis_level="geometric", tis_mode="unbounded")
    for t in range(MAX_LENGTH):
        for state in {y[:t] for y in toy.responses}:
            below = [(y, w) for y, w in zip(toy.responses, token, strict=True) if y[:t] == state]
            expected = sum(toy.probability(toy.behavior, y) * w[t] for y, w in below)
            assert math.isclose(expected, toy.prefix_probability(toy.behavior, state), rel_tol=RTOL)
    mean = sum(toy.probability(toy.behavior, y) * w[0] for y, w in zip(toy.responses, geometric, strict=True))
    assert mean < 1 - 1e-3


def exhaustive_rollout() -> tuple[Samples, dict[int, tuple[float, float]]]:
    """One-token responses in numbers proportional to the behavior policy, so that plain means are expectations."""
    behavior = [8, 5, 2, 1]
    proximal = [5, 4, 4, 3]
    train, rollout, masks = [], [], []
    for mu, pi in zip(behavior, proximal, strict=True):
        for _ in range(mu):
            train.append(torch.tensor([math.log(pi / 16)]))
            rollout.append(torch.tensor([math.log(mu / 16)]))
            masks.append(torch.ones(1))
    return Samples(train, rollout, masks), {
        i: (b / 16, p / 16) for i, (b, p) in enumerate(zip(behavior, proximal, strict=True))
    }


def test_metrics_of_an_exhaustive_rollout_are_the_divergences_themselves():
    samples, table = exhaustive_rollout()
    _, _, metrics = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(
            {"use_tis": True, "mis_metric_max": math.inf, "mis_guard": "warn", "mis_metrics": "all"}
        ),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )
    pairs = list(table.values())
    kl = sum(mu * math.log(mu / pi) for mu, pi in pairs)
    chi2 = sum(pi * pi / mu for mu, pi in pairs) - 1
    wanted = {
        "mis_kl": kl,
        "mis_k3_kl": kl,
        "mis_tv": sum(abs(mu - pi) for mu, pi in pairs) / 2,
        "mis_chi2_token": chi2,
        "mis_chi2_seq": chi2,
        "mis_ess_ratio_token": 1 / (1 + chi2),
        "mis_ess_ratio_seq": 1 / (1 + chi2),
        "mis_lr_multiplier_token": (1 + chi2) ** -0.5,
        "mis_lr_multiplier_seq": (1 + chi2) ** -0.5,
        "mis_ratio_max": 3.0,
        "mis_ratio_min": 0.625,
        "mis_ratio_above_2_fraction": 1 / 16,
        "mis_tis_weight_before_bound": 1.0,
        "mis_tis_weight_after_bound": 15 / 16,
        "mis_tis_truncate_fraction": 1 / 16,
        "mis_tis_truncate_fraction_low": 0.0,
        "mis_log_ppl_diff_min": -math.log(3.0),
        "mis_log_ppl_diff_max": -math.log(0.625),
    }
    for name, value in wanted.items():
        # Logarithms rounded to float32, then differences of numbers near 1.
        assert math.isclose(float(metrics[name]), value, rel_tol=2e-6, abs_tol=5e-7), name


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalising_an_exhaustive_rollout_changes_nothing_because_the_expected_ratio_is_one(level):
    samples, _ = exhaustive_rollout()
    keys = {"use_tis": True, "tis_level": level, "tis_mode": "unbounded", "mis_guard": "warn"}
    results = []
    for normalize in [False, True]:
        config = mis_ext.config_from_mapping(keys | ({"tis_batch_normalize": True} if normalize else {}))
        weights, _, _ = mis_ext.compute_mis_weights(
            config,
            train_log_probs=samples.train,
            rollout_log_probs=samples.rollout,
            loss_masks=samples.masks,
        )
        results.append(torch.cat(weights))
    torch.testing.assert_close(results[1], results[0], rtol=RTOL, atol=0)
