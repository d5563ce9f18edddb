# SPDX-License-Identifier: Apache-2.0
"""The canary against engines of which it is known which weights they have: three of each kind."""

import math

import pytest
import torch

from mis_ext.rollout import Canary

NUM_TOKENS, WIDTH, VOCABULARY, RANK = 255, 32, 64, 4
VERSIONS = 4


class Truth:
    """The weights of a layer at each version, its states and targets, and what the engine makes of them in bfloat16."""

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

    def engine(self, weights, *, noise=0.0):
        logits = (self.states.bfloat16() @ weights.bfloat16()).float()
        scored = logits.log_softmax(-1).gather(1, self.targets)[:, 0]
        return (scored + noise * torch.randn(NUM_TOKENS)).clamp_max(0.0).tolist()


def verdicts(truth, has):
    """What the canary says at each version, where the engine has those weights under that name."""
    canary, found = Canary(), []
    for version, weights in enumerate(has):
        for _ in range(2):
            result = canary.check(version, truth.engine(weights))
        found.append((result.verdict, result.nearest))
    return found


seeds = pytest.mark.parametrize("seed", range(3))
adapters = pytest.mark.parametrize("adapter", [False, True])


@seeds
@adapters
def test_new_weights_arrive(seed, adapter):
    truth = Truth(seed, adapter=adapter)
    found = verdicts(truth, truth.weights)
    assert [verdict for verdict, _ in found] == ["first", "arrived", "arrived", "arrived"]


@seeds
@adapters
def test_an_engine_that_stays_behind_has_the_weights_of_a_named_version(seed, adapter):
    truth = Truth(seed, adapter=adapter)
    old = [truth.weights[0], truth.weights[1], truth.weights[1], truth.weights[3]]
    found = verdicts(truth, old)
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
def test_an_adapter_that_changes_under_one_name_is_noise(seed):
    """The old name with new log-probs: a scoring again, which hides every update after it."""
    truth, canary = Truth(seed, adapter=True), Canary()
    names = ("adapter", "adapter", "adapter", "other")
    found = [canary.check(name, truth.engine(weights)) for name, weights in zip(names, truth.weights, strict=True)]
    assert [result.verdict for result in found] == ["first", "first", "first", "unknown"]
    assert found[-1].noise > 0.01


@seeds
def test_an_update_that_changes_nothing_looks_as_old_weights_do_and_the_words_say_so(seed):
    truth, canary = Truth(seed, rate=0.0), Canary()
    for version in range(2):
        result = canary.check(version, truth.engine(truth.weights[version]))
    assert result.verdict == "old"
    assert "or no weight changed" in result.explain()


@seeds
def test_an_update_below_what_kernels_do_cannot_be_told(seed):
    truth, canary = Truth(seed), Canary()
    canary.check(1, truth.engine(truth.weights[0], noise=1e-3))
    assert canary.check(2, truth.engine(truth.weights[0], noise=1e-3)).verdict == "unknown"


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
