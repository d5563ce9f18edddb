# SPDX-License-Identifier: Apache-2.0
"""Properties that hold by mathematics: order, padding, what lies under a mask, and what is not finite."""

import math

import hypothesis.strategies as st
import pytest
import torch
from cases import (
    ATOL,
    GATES,
    RTOL,
    args_of,
    call_hook,
    correction_keys,
    drawn_keys,
    drawn_samples,
    flat,
    random_samples,
    sprinkle,
)
from host_loop import sum_of_sample_mean
from hypothesis import assume, given
from property_cases import FUZZ, LENGTHS, assert_same, points_of_grid, subset, weights_masks, weights_of_grid
from reference import Samples, correct

# These bounds are far apart for what a geometric mean does in practice, and the package says so.
pytestmark = pytest.mark.filterwarnings("ignore:a geometric (weight|gate)")


@FUZZ
@given(keys=drawn_keys(), samples=drawn_samples(), data=st.data())
def test_the_order_of_sequences_does_not_matter(keys, samples, data):
    assume(correct([samples], keys)[0].margin > 1e-5)
    order = data.draw(st.permutations(range(len(samples.masks))))
    weights, masks = weights_masks(keys, samples)
    permuted_weights, permuted_masks = weights_masks(keys, subset(samples, order))
    # The normaliser adds up in another order.
    torch.testing.assert_close(flat(permuted_weights), flat([weights[i] for i in order]), rtol=1e-6, atol=0)
    assert torch.equal(flat(permuted_masks), flat([masks[i] for i in order]))


@FUZZ
@given(keys=drawn_keys(), samples=drawn_samples())
def test_padding_every_response_to_one_length_with_garbage_under_the_mask_changes_nothing(keys, samples):
    assume(correct([samples], keys)[0].margin > 1e-5)
    longest = 2 + max(m.numel() for m in samples.masks)

    def pad(columns: list[torch.Tensor], filling: float) -> list[torch.Tensor]:
        return [torch.cat([c, torch.full((longest - c.numel(),), filling, dtype=c.dtype)]) for c in columns]

    padded = Samples(pad(samples.train, math.nan), pad(samples.rollout, math.inf), pad(samples.masks, 0))
    lengths = [m.numel() for m in samples.masks]
    loss, masks, metrics = call_hook(keys, samples)
    padded_loss, padded_masks, padded_metrics = call_hook(keys, padded)
    places = torch.cat([torch.arange(longest) < length for length in lengths])
    # Sums over the batch are cut into chunks at other places.
    torch.testing.assert_close(padded_loss[places], loss, rtol=1e-6, atol=0)
    assert not padded_loss[~places].any()
    assert torch.equal(flat(padded_masks)[places], flat(masks))
    response = flat(samples.masks) != 0
    for name, value in metrics.items():
        actual = padded_metrics[name][places][response]
        torch.testing.assert_close(actual, value[response], rtol=RTOL, atol=ATOL, equal_nan=True)
        assert padded_metrics[name][~places].isfinite().all()


GARBAGE = [(math.nan, 0.0), (0.0, math.nan), (math.inf, -math.inf), (-math.inf, 0.0), (0.0, math.inf)]
GARBAGE += [(3e38, -3e38), (-1e4, 0.0)]


@points_of_grid
def test_what_lies_under_masked_tokens_changes_nothing_bit_for_bit(weight, gate):
    samples = random_samples(LENGTHS, seed=31, mask=0.6)
    samples.masks[4].zero_()

    def with_garbage(pairs: list[tuple[float, float]]) -> Samples:
        """Under each masked token the next of the pairs."""
        num_tokens = sum(LENGTHS)
        columns = torch.tensor(pairs).repeat(num_tokens, 1)[:num_tokens].T
        dirty = [
            torch.where(response, torch.cat(own), garbage).split(LENGTHS)
            for own, garbage in zip((samples.train, samples.rollout), columns, strict=True)
        ]
        return Samples(*map(list, dirty), samples.masks)

    response, pg_loss = torch.cat(samples.masks) != 0, torch.linspace(-1, 1, sum(LENGTHS))
    for veto, normalizer, denominator in [("all vetoes", "kept", "kept"), ("no veto", "valid", "fixed")]:
        keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
        loss, masks, metrics = call_hook(keys, with_garbage([(0.0, 0.0)]), pg_loss=pg_loss)
        for garbage in (GARBAGE, GARBAGE[-2:]):
            dirty_loss, dirty_masks, dirty_metrics = call_hook(keys, with_garbage(garbage), pg_loss=pg_loss)
            assert torch.equal(loss, dirty_loss), garbage
            assert all(torch.equal(a, b) for a, b in zip(masks, dirty_masks, strict=True)), garbage
            assert_same(
                {name: value[response] for name, value in metrics.items()},
                {name: value[response] for name, value in dirty_metrics.items()},
            )
            assert all(value.isfinite().all() for value in dirty_metrics.values()), garbage


@weights_of_grid
def test_a_loss_that_is_not_finite_under_the_mask_does_not_leak(weight):
    samples = random_samples(LENGTHS, seed=32, mask=0.6)
    response = torch.cat(samples.masks) != 0
    pg_loss = torch.where(response, 1.0, math.nan).requires_grad_()
    loss, _, _ = call_hook(correction_keys(weight), samples, pg_loss=pg_loss)
    assert torch.equal(loss.detach()[~response], torch.zeros(int((~response).sum())))
    loss.sum().backward()
    assert pg_loss.grad.isfinite().all()


@pytest.mark.parametrize("gate", ["no gate", "token gate"])
def test_at_token_level_a_non_finite_token_is_like_a_masked_one(gate):
    clean = random_samples(LENGTHS, seed=47)
    broken = Samples([t.clone() for t in clean.train], [r.clone() for r in clean.rollout], clean.masks)
    masked = Samples(clean.train, clean.rollout, [m.clone() for m in clean.masks])
    for sample, index, column, value in [(0, 0, broken.train, math.nan), (4, 2, broken.rollout, -math.inf)]:
        column[sample][index] = value
        broken.masks[sample][index] = 1
        masked.masks[sample][index] = 0
    keys = correction_keys(("token", "clip"), gate=gate, normalizer="kept")
    loss, masks, metrics = call_hook(keys, broken)
    expected_loss, expected_masks, expected_metrics = call_hook(keys, masked)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(flat(masks), flat(expected_masks))
    for name in metrics:
        if "kept" in name or "nonfinite" in name or "invalid" in name:
            continue
        actual = sum_of_sample_mean(metrics[name].split(LENGTHS), broken.masks)
        expected = sum_of_sample_mean(expected_metrics[name].split(LENGTHS), masked.masks)
        torch.testing.assert_close(
            actual, expected, rtol=RTOL, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    share = sum_of_sample_mean(metrics["mis_nonfinite_token_fraction"].split(LENGTHS), broken.masks)
    wanted = 1 / float(broken.masks[0].sum()) + 1 / float(broken.masks[4].sum())
    torch.testing.assert_close(share, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("weight", "gate"),
    [
        (("sequence", "truncate"), "no gate"),
        (("geometric", "clip"), "no gate"),
        (("token", "truncate"), "sequence gate"),
        (("none", "unbounded"), "geometric gate"),
    ],
    ids=str,
)
def test_above_token_level_a_non_finite_token_takes_its_sequence_out(weight, gate):
    clean = random_samples(LENGTHS, seed=48)
    broken = Samples([t.clone() for t in clean.train], clean.rollout, clean.masks)
    broken.train[4][0] = math.nan
    without = Samples(clean.train, clean.rollout, [m.clone() for m in clean.masks])
    without.masks[4].zero_()
    keys = correction_keys(weight, gate=gate, normalizer="kept" if weight[0] != "none" else "no normaliser")
    loss, masks, metrics = call_hook(keys, broken)
    expected_loss, expected_masks, _ = call_hook(keys, without)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(flat(masks), flat(expected_masks))
    # The mismatch of its other tokens is still measured.
    assert (metrics["mis_logprob_abs_diff"].split(LENGTHS)[4][1:][clean.masks[4][1:] != 0] != 0).any()


@weights_of_grid
def test_inputs_are_never_changed_and_a_call_that_recomputes_gives_the_same(weight):
    samples = sprinkle(random_samples(LENGTHS, seed=49), seed=6)
    copies = [[x.clone() for x in column] for column in (samples.train, samples.rollout, samples.masks)]
    for gate in GATES:
        keys = correction_keys(weight, gate=gate, veto="all vetoes", normalizer="kept", mis_denominator="kept")
        args = args_of(keys)
        before = dict(vars(args))
        pg_loss = torch.linspace(-1, 1, sum(LENGTHS)).requires_grad_()
        with torch.no_grad():
            first = call_hook(keys, samples, pg_loss=pg_loss, args=args)
        second = call_hook(keys, samples, pg_loss=pg_loss, args=args)
        assert (first[0].requires_grad, second[0].requires_grad) == (False, True)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
        assert_same(first[2], second[2])
        assert torch.equal(pg_loss.detach(), torch.linspace(-1, 1, sum(LENGTHS)))
        assert {key: vars(args)[key] for key in before} == before
        for copy, column in zip(copies, (samples.train, samples.rollout, samples.masks), strict=True):
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(copy, column, strict=True))
        for new in first[1]:
            new.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(copies[2], samples.masks, strict=True))
