# SPDX-License-Identifier: Apache-2.0
"""One response without any finite log-prob must not blank the curves of a step."""

import math

import loss_cases
import pytest
import torch
from cases import ATOL, RTOL, assert_close, call_hook, correction_keys, random_samples
from host_loop import sum_of_sample_mean, sum_of_token
from reference import Samples, correct

import mis_ext

# NumPy, in which the interpreter computes, warns of every NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
reducers = pytest.mark.parametrize("per_token", [False, True], ids=["sample means", "token sums"])
KEYS = correction_keys(("token", "clip"), gate="geometric gate", veto="low veto", normalizer="kept")
LENGTHS = [4, 7, 3, 9]
BROKEN = 1


def samples_with(*broken: int) -> Samples:
    samples = random_samples(LENGTHS, seed=5, mask=0.9)
    for index in broken:
        samples.train[index].fill_(-math.inf)
    return samples


def without(samples: Samples, index: int) -> Samples:
    columns = (samples.train, samples.rollout, samples.masks)
    return Samples(*(column[:index] + column[index + 1 :] for column in columns))


def of_samples(keys: dict) -> list[mis_ext.correction.metrics.MetricRow]:
    return [row for row in mis_ext.config_from_mapping(keys).rows.values() if row.over in ("valid_tokens", "sequences")]


@reducers
def test_a_host_that_divides_by_all_plots_the_mean_of_what_was_measured(per_token) -> None:
    samples, reduce = samples_with(BROKEN), sum_of_token if per_token else sum_of_sample_mean
    metrics = call_hook(KEYS, samples, per_token_loss=per_token)[2]
    known = without(samples, BROKEN)
    rows = of_samples(KEYS)
    assert len(rows) > 20
    assert all(values.isfinite().all() for values in metrics.values())
    (judged,) = correct([known], KEYS, per_token_loss=per_token)

    def plotted(values: list[torch.Tensor], masks: list[torch.Tensor]) -> float:
        size = sum(int(mask.sum()) for mask in masks) if per_token else len(masks)
        return float(reduce(values, masks)) / size

    for row in rows:
        name = f"mis_{row.name}"
        found = plotted([*metrics[name].double().split(LENGTHS)], samples.masks)
        wanted = plotted([torch.tensor(values, dtype=torch.float64) for values in judged.tokens[name]], known.masks)
        assert found == pytest.approx(wanted, rel=RTOL, abs=ATOL), name
    response = torch.cat(samples.masks) != 0
    of_broken = metrics["mis_unmeasured_seq_fraction"][response].split([int(mask.sum()) for mask in samples.masks])
    assert [float(values.mean()) for values in of_broken] == [0.0, 1.0, 0.0, 0.0]


def test_a_call_that_measured_nothing_reads_nan_and_counts_every_response() -> None:
    samples = samples_with(0, 1, 2, 3)
    metrics, response = call_hook(KEYS, samples)[2], torch.cat(samples.masks) != 0
    for row in of_samples(KEYS):
        assert metrics[f"mis_{row.name}"][response].isnan().all(), row.name
    for name in ("unmeasured_seq_fraction", "nonfinite_token_fraction"):
        assert (metrics[f"mis_{name}"][response] == 1.0).all()


# --- samples that the host removed


def logged(keys: dict, samples: Samples, *cuts: slice, per_token: bool = False) -> dict[str, float]:
    """What the host logs: it divides the sums of all micro-batches by all samples, or by all response tokens."""
    reduce, totals = sum_of_token if per_token else sum_of_sample_mean, dict[str, float]()
    for cut in cuts or (slice(None),):
        part = Samples(*(column[cut] for column in (samples.train, samples.rollout, samples.masks)))
        for name, values in call_hook(keys, part, per_token_loss=per_token)[2].items():
            sums = reduce([*values.double().split([len(mask) for mask in part.masks])], part.masks)
            totals[name] = totals.get(name, 0.0) + float(sums)
    size = sum(int(mask.sum()) for mask in samples.masks) if per_token else len(samples.masks)
    return {name: total / size for name, total in totals.items()}


NO_GATE = {"use_tis": True, "mis_guard": "warn", "mis_metrics": "all"}
ONE_GATE = NO_GATE | {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.01}


def test_a_sample_that_the_host_removed_is_0_in_every_metric() -> None:
    samples = samples_with()
    samples.masks[BROKEN].zero_()
    known = without(samples, BROKEN)
    for keys in (NO_GATE, ONE_GATE, KEYS):
        found, rest = logged(keys, samples), logged(keys, known)
        assert found == pytest.approx({name: value * 3 / 4 for name, value in rest.items()}, rel=1e-6)
        # The same at every cut, the removed one alone too.
        cut = logged(keys, samples, slice(0, 1), slice(1, 2), slice(2, 4))
        names = {f"mis_{row.name}" for row in mis_ext.config_from_mapping(keys).rows.values() if row.over != "group"}
        if "tis_batch_normalize" not in keys:
            assert len(names) > 20
            assert all(cut[name] == pytest.approx(found[name]) for name in names)
        # Of tokens none is missing.
        tokens = logged(keys, samples, per_token=True)
        assert tokens == pytest.approx(logged(keys, known, per_token=True), rel=1e-6)
    assert (
        logged(NO_GATE, samples)["mis_kept_seq_fraction"]
        == logged(NO_GATE, samples)["mis_kept_token_fraction"]
        == 3 / 4
    )
    for level, kept in (("geometric", "mis_kept_seq_fraction"), ("token", "mis_kept_token_fraction")):
        gate = logged(ONE_GATE | {"rs_level": level}, samples)
        rejected = gate["mis_rs_mask_fraction_low"] + gate["mis_rs_mask_fraction_high"]
        assert 0.0 < rejected < 3 / 4
        assert gate[kept] + rejected == pytest.approx(3 / 4)
    exact = mis_ext.compute_mis_weights(
        mis_ext.config_from_mapping(NO_GATE),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
    )[2]
    assert exact["mis_kept_seq_fraction"] == 1.0


# --- the whole loss


def whole_loss(*broken: int, keep: slice = slice(None), **keys) -> tuple[dict, dict]:
    """Metrics as the host gets them, and ``[total, count]`` as a loop of one's own does."""
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    for index in broken:
        batch["log_probs"][index] = torch.full_like(batch["log_probs"][index], math.nan)
    args = loss_cases.host_args(**(loss_cases.GATES | {"mis_metrics": "all"} | keys))
    logits = batch.pop("logits")
    del batch["rollout_mask_sums"]
    starts = torch.tensor([0, *loss_cases.TOTALS]).cumsum(0).tolist()
    size = len(loss_cases.TOTALS)
    chosen = range(size)[keep]
    part = {name: [values[i] for i in chosen] for name, values in batch.items() if isinstance(values, list)}
    part_logits = torch.cat([logits[:, starts[i] : starts[i + 1]] for i in chosen], dim=1)
    metrics = mis_ext.policy_loss(args, part, part_logits)[1]
    return metrics, mis_ext.make_loss_func(args, part)(part_logits)[2]


@reducers
def test_a_loop_of_its_own_counts_the_measured_samples_exactly_however_they_are_cut(per_token) -> None:
    keys = {"calculate_per_token_loss": per_token}
    _, whole = whole_loss(1, **keys)
    parts = [whole_loss(1, keep=part, **keys)[1] for part in (slice(0, 1), slice(1, 2), slice(2, None))]
    _, known = whole_loss(keep=slice(2, None), **keys)
    config = loss_cases.GATES | {"mis_metrics": "all"}
    for row in of_samples(config):
        name = f"mis_{row.name}"
        total, count = sum(part[name] for part in parts)
        # Of the second sample nothing is known, and the last is masked.
        size = sum(int(mask.sum()) for mask in masks()) if per_token else 4
        assert whole[name][1] == pytest.approx(size), name
        assert_close(torch.stack([total, count]), whole[name].double(), what=name)
        rest = torch.tensor([float(x) for x in parts[0][name] + known[name]], dtype=torch.float64)
        assert_close(whole[name], rest, what=name)


def masks() -> list[torch.Tensor]:
    batch = loss_cases.whole_batch()
    return [mask for index, mask in enumerate(batch["loss_masks"]) if index != 1]


def test_the_whole_loss_of_a_host_reads_the_mean_of_the_measured_for_the_others() -> None:
    metrics, reported = whole_loss(1)
    assert all(value.isfinite() for value in metrics.values())
    for row in of_samples(loss_cases.GATES | {"mis_metrics": "all"}):
        name = f"mis_{row.name}"
        total, count = reported[name].tolist()
        # Five samples have response tokens, four of them were measured.
        assert float(metrics[name]) == pytest.approx(5 * total / count, rel=RTOL, abs=ATOL), name


def test_a_micro_batch_without_a_correction_adds_nothing_to_a_mean() -> None:
    _, reported = whole_loss(1, keep=slice(1, 2))
    for row in of_samples(loss_cases.GATES | {"mis_metrics": "all"}):
        assert reported[f"mis_{row.name}"].tolist() == [0.0, 0.0], row.name
