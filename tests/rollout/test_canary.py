# SPDX-License-Identifier: Apache-2.0
"""The canary against engines of which it is known which weights they have: three of each kind."""

import math

import pytest
import torch

from mis_ext.rollout import Canary

NUM_TOKENS, WIDTH, VOCABULARY, RANK = 255, 32, 64, 4
VERSIONS = 4


class Truth:
    """The weights of a layer at each version, its states and targets, and what trainer and engine make of them.

    The engine rounds states and weights to bfloat16, so that it differs from the trainer at every version.
    """

    def __init__(self, seed, *, rate=0.05, adapter=False):
        torch.manual_seed(seed)
        self.states = torch.randn(NUM_TOKENS, WIDTH)
        self.targets = torch.randint(VOCABULARY, (NUM_TOKENS, 1))
        base, self.weights = torch.randn(WIDTH, VOCABULARY) / WIDTH**0.5, []
        low, high = torch.randn(WIDTH, RANK), torch.zeros(RANK, VOCABULARY)
        for _ in range(VERSIONS):
            if adapter:
                high = high + rate * torch.randn_like(high) / RANK**0.5
                self.weights.append(base + low @ high / WIDTH**0.5)
            else:
                base = base + rate * torch.randn_like(base) / WIDTH**0.5
                self.weights.append(base)

    def _score(self, logits):
        return logits.float().log_softmax(-1).gather(1, self.targets)[:, 0]

    def trainer(self, version):
        return self._score(self.states @ self.weights[version]).tolist()

    def engine(self, weights, *, noise=0.0):
        scored = self._score(self.states.bfloat16() @ weights.bfloat16())
        return (scored + noise * torch.randn(NUM_TOKENS)).clamp_max(0.0).tolist()


def verdicts(truth, has, *, with_trainer=True, noise=0.0, scorings=2):
    """What the canary says at each version, where the engine has those weights under that name."""
    canary, found = Canary(), []
    for version, weights in enumerate(has):
        trainer = truth.trainer(version) if with_trainer else None
        for _ in range(scorings):
            result = canary.check(version, truth.engine(weights, noise=noise), trainer=trainer)
        found.append((result.verdict, result.nearest))
    return found


seeds = pytest.mark.parametrize("seed", range(3))
adapters = pytest.mark.parametrize("adapter", [False, True])
sides = pytest.mark.parametrize("with_trainer", [False, True])


@seeds
@adapters
@sides
def test_new_weights_arrive(seed, adapter, with_trainer):
    truth = Truth(seed, adapter=adapter)
    found = verdicts(truth, truth.weights, with_trainer=with_trainer)
    assert [verdict for verdict, _ in found] == ["first", "arrived", "arrived", "arrived"]


@seeds
@adapters
@sides
def test_an_engine_that_stays_behind_has_the_weights_of_a_named_version(seed, adapter, with_trainer):
    truth = Truth(seed, adapter=adapter)
    old = [truth.weights[0], truth.weights[1], truth.weights[1], truth.weights[3]]
    found = verdicts(truth, old, with_trainer=with_trainer)
    assert found[2] == ("old", "1")
    assert found[1][0] == found[3][0] == "arrived"


@seeds
@pytest.mark.parametrize("scorings", [1, 2])
def test_the_same_weights_under_another_load_are_not_said_to_have_arrived(seed, scorings):
    """Two scorings alike measure a noise of 0, which the next batch breaks."""
    truth, canary = Truth(seed), Canary()
    for _ in range(scorings):
        canary.check(1, truth.engine(truth.weights[0]))
    assert canary.check(2, truth.engine(truth.weights[0], noise=1e-4)).verdict == "unknown"


@seeds
@pytest.mark.parametrize(("with_trainer", "after"), [(False, "unknown"), (True, "arrived")])
def test_an_adapter_that_changes_under_one_name_is_noise(seed, with_trainer, after):
    """The old name with new log-probs: a scoring again, which without the trainer hides every update after it."""
    truth, canary = Truth(seed, adapter=True), Canary()
    found = []
    for name, version in (("adapter", 0), ("adapter", 1), ("adapter", 2), ("other", 3)):
        trainer = truth.trainer(version) if with_trainer else None
        found.append(canary.check(name, truth.engine(truth.weights[version]), trainer=trainer))
    assert [result.verdict for result in found] == ["first", "first", "first", after]
    assert found[-1].noise > 0.01


@seeds
def test_with_the_trainer_old_weights_are_found_behind_the_noise(seed):
    truth = Truth(seed)
    stuck = [truth.weights[0]] * VERSIONS
    found = verdicts(truth, stuck, noise=0.01)
    assert found == [("first", None), *[("old", "0")] * 3]


@seeds
def test_an_update_that_changes_nothing_is_no_old_weight_to_a_trainer_that_says_so(seed):
    truth = Truth(seed, rate=0.0)
    found = verdicts(truth, truth.weights)
    assert [verdict for verdict, _ in found] == ["first", "unknown", "unknown", "unknown"]
    # Without the trainer it looks as old weights do, and the words say so.
    canary = Canary()
    for version in range(2):
        result = canary.check(version, truth.engine(truth.weights[version]))
    assert result.verdict == "old"
    assert "or no weight changed" in result.explain()


@seeds
@pytest.mark.parametrize("has_new", [False, True])
def test_an_update_below_what_kernels_do_cannot_be_told(seed, has_new):
    truth = Truth(seed, rate=1e-4)
    found = verdicts(truth, truth.weights if has_new else [truth.weights[0]] * VERSIONS)
    assert [verdict for verdict, _ in found] == ["first", "unknown", "unknown", "unknown"]


@seeds
def test_weights_of_something_else_are_neither_new_nor_old(seed):
    truth = Truth(seed)
    else_ = Truth(seed + 100).weights[0]
    assert verdicts(truth, [*truth.weights[:3], else_])[3][0] == "other"


def test_k3_stands_beside_its_own_history():
    truth = Truth(0)
    canary = Canary()
    results = [
        canary.check(version, truth.engine(weights), trainer=truth.trainer(version))
        for version, weights in enumerate(truth.weights)
    ]
    difference = torch.tensor(truth.trainer(3)) - torch.tensor(truth.engine(truth.weights[3]))
    k3 = (difference.double().expm1() - difference.double()).mean().item()
    assert results[3].k3 == pytest.approx(k3, rel=1e-6)
    assert results[3].usual_k3 == sorted(result.k3 for result in results[:3])[1]
    assert math.isnan(results[0].usual_k3)


def test_what_was_not_the_trainers_is_no_part_of_the_history_of_k3():
    truth = Truth(0)
    canary = Canary()
    has = [truth.weights[0], truth.weights[1], truth.weights[0], truth.weights[3]]
    results = [
        canary.check(version, truth.engine(weights), trainer=truth.trainer(version))
        for version, weights in enumerate(has)
    ]
    assert results[2].verdict == "old"
    assert results[3].usual_k3 == (results[0].k3 + results[1].k3) / 2 < results[2].k3


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ([-1.0], "at least|2 finite numbers"),
        ([-1.0, math.nan, -1.0], "3 finite numbers"),
        ([-1.0, 0.5, -1.0], "from -1 to 0.5"),
        ([-1.0, -math.inf, -1.0], "from -inf"),
    ],
)
def test_what_are_no_log_probs_is_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        Canary().check("1", engine)


def test_the_noise_is_the_largest_difference_of_two_scorings():
    canary, moved = Canary(), [-1.5, -2.5, -3.5]
    for scores in ([-1.0, -2.0, -3.0], moved, moved):
        canary.check("1", scores)
    assert canary.check("2", moved).noise == 0.5


def test_another_text_is_refused():
    canary = Canary()
    canary.check("1", [-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match="engine's log-probs of the canary must be 3 finite numbers"):
        canary.check("2", [-1.0, -2.0])
    with pytest.raises(ValueError, match="trainer's log-probs of the canary must be 3 finite numbers"):
        canary.check("2", [-1.0, -2.0, -3.0], trainer=[-1.0])
