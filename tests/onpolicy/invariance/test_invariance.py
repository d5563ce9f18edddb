# SPDX-License-Identifier: Apache-2.0
"""Which functions depend on the batch, and whether by rounding or truly."""

import math
import warnings

import pytest
import torch
from batch_probes import NUM_ROWS, ascending_rows, normal, outcomes, probe_of, rotated_sum
from torch import nn

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.bits import ulp_distance
from mis_ext.onpolicy.invariance import InFloat64, check_batch_invariance

pytestmark = pytest.mark.usefixtures("one_thread")


def by_hand(fn, rows, size):
    """Rows that differ between chunks and each row alone, and by how much."""
    alone = torch.cat([fn(row[None].clone()) for row in rows])
    together = torch.cat([fn(chunk.clone()) for chunk in rows.split(size)])
    different = (alone != together).flatten(1).any(1).nonzero().flatten().tolist()
    return (
        different,
        (alone.double() - together.double()).abs().max().item(),
        ulp_distance(alone, together).max().item(),
    )


def agrees(probe, expected):
    different, max_abs_diff, max_ulp = expected
    return (
        probe.num_different == len(different)
        and probe.first_different == (different[0] if different else None)
        and (probe.max_abs_diff, probe.max_ulp) == (max_abs_diff, max_ulp)
        and probe.outcome == ("rounding" if different else "equal")
    )


@torch.no_grad()
def test_an_fp32_linear_varies_as_a_direct_comparison_says_and_not_in_the_mode():
    torch.manual_seed(0)
    linear, rows = nn.Linear(140, 130), normal(37, 140)
    report = check_batch_invariance(linear, rows)
    for size in (2, 3, 37):
        assert agrees(
            probe_of(report, "full batch" if size == 37 else f"chunks of {size}"), by_hand(linear, rows, size)
        )
    assert report.kind == ("rounding" if outcomes(report, "rounding") else "invariant")
    with batch_invariant_mode():
        assert check_batch_invariance(linear, rows[:17]).invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_order_of_summation_that_depends_on_the_batch_is_rounding(dtype):
    rows = normal(13, 64, dtype=dtype)
    report = check_batch_invariance(rotated_sum, rows)
    assert report.kind == "rounding"
    assert not report.invariant
    assert {probe.judged_by for probe in report.probes if probe.outcome == "rounding"} == {"float64"}
    for size in (2, 7, 13):
        assert agrees(
            probe_of(report, "full batch" if size == 13 else f"chunks of {size}"), by_hand(rotated_sum, rows, size)
        )
    assert probe_of(report, "full batch").num_different > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_mode", [False, True])
def test_subtracting_the_mean_of_the_batch_is_true_dependence_with_and_without_the_mode(dtype, in_mode):
    rows = normal(NUM_ROWS, 24, dtype=dtype)
    fn = in_the_mode(lambda x: x - x.mean(0)) if in_mode else lambda x: x - x.mean(0)
    report = check_batch_invariance(fn, rows)
    assert report.kind == "batch-dependent"
    differing = {probe.name for probe in report.probes if not probe.name.endswith("again")}
    assert outcomes(report, "batch-dependent") == differing
    assert probe_of(report, "full batch").judged_by == "float64"
    assert probe_of(report, "NaN rows before").judged_by == "non-finite"


def in_the_mode(fn):
    def wrapped(x):
        with batch_invariant_mode():
            return fn(x)

    return wrapped


def test_true_dependence_smaller_than_any_tolerance_is_still_found():
    # 1e-5 of the data: about a hundred roundings in float32.
    report = check_batch_invariance(lambda x: x + 1e-5 * x.mean(0), normal(NUM_ROWS, 24))
    assert probe_of(report, "full batch").outcome == "batch-dependent"


def test_rounding_that_is_amplified_to_the_size_of_the_data_is_still_rounding():
    report = check_batch_invariance(lambda x: (rotated_sum(x) * 2**22).sin(), normal(12, 64))
    probe = probe_of(report, "full batch")
    assert probe.max_abs_diff > 0.5
    assert probe.outcome == "rounding"


@pytest.mark.parametrize(
    ("inside", "outside", "grad_mode"),
    [
        (torch.float32, torch.float32, torch.enable_grad),
        (torch.bfloat16, torch.float32, torch.inference_mode),
        (torch.float16, torch.bfloat16, torch.enable_grad),
        (torch.float16, torch.bfloat16, torch.inference_mode),
    ],
)
def test_casts_and_closed_over_parameters_do_not_make_rounding_look_true(inside, outside, grad_mode):
    weight = normal(16, dtype=torch.float32, seed=1)
    rows = normal(12, 16, dtype=outside)
    zero = torch.zeros(1, 1)

    def fn(x):
        x = (x * weight[None] + zero).roll(len(x), 1).to(inside)
        while x.shape[1] > 1:
            x = (x[:, ::2] + x[:, 1::2] + torch.zeros(len(x), 1)).to(inside)
        return x.to(outside)

    with grad_mode():
        report = check_batch_invariance(fn, rows)
    assert report.kind == "rounding"
    assert {probe.judged_by for probe in report.probes if probe.outcome == "rounding"} == {"float64"}
    assert weight.dtype == torch.float32


def test_a_module_is_not_changed():
    linear = nn.Linear(24, 8)
    before = {name: (id(parameter), parameter.clone()) for name, parameter in linear.named_parameters()}
    check_batch_invariance(lambda x: linear(x - x.mean(0)), normal(NUM_ROWS, 24))
    for name, parameter in linear.named_parameters():
        identity, value = before[name]
        assert id(parameter) == identity
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        assert torch.equal(parameter, value)


def test_a_fresh_buffer_is_float64_too():
    def fn(x):
        memory = torch.empty(len(x), 64)
        memory[:] = x
        return rotated_sum(memory)

    assert probe_of(check_batch_invariance(fn, normal(12, 64)), "full batch").judged_by == "float64"


def test_complex_products_are_float64_too():
    x, frequencies = normal(4, 2), torch.polar(torch.ones(4), torch.arange(4.0))
    with InFloat64():
        turned = torch.view_as_real(torch.view_as_complex(x) * frequencies)
    expected = torch.view_as_complex(x.double()) * frequencies.to(torch.complex128)
    assert torch.equal(turned, torch.view_as_real(expected))


@pytest.mark.parametrize(("share", "outcome"), [(0.5, "rounding"), (2.0, "batch-dependent")])
def test_the_limit_is_half_way_between_the_precisions(share, outcome):
    # Twice the precision leaves 2**-29 of a rounding error, and all of a true difference: 2**-14.5 is half way.
    def fn(x):
        difference = 2.0**-23 * (share * 2.0**-14.5 if x.dtype == torch.float64 else 1.0)
        return x + difference * (len(x) > 1)

    probe = probe_of(check_batch_invariance(fn, torch.ones(4, 3)), "full batch")
    assert (probe.outcome, probe.judged_by, probe.max_abs_diff) == (outcome, "float64", 2.0**-23)


def test_a_warning_of_the_function_in_float64_is_not_passed_on():
    def fn(x):
        if x.dtype == torch.float64:
            warnings.warn("float64 is slow", stacklevel=1)
        return rotated_sum(x)

    assert probe_of(check_batch_invariance(fn, normal(12, 64)), "full batch").judged_by == "float64"


@torch.library.custom_op("mis_ext_test::fp32_rotated_sum", mutates_args=())
def fp32_rotated_sum(x: torch.Tensor) -> torch.Tensor:
    return rotated_sum(x.float()).to(x.dtype)


def through_a_buffer(fn):
    def wrapped(x):
        wrapped.buffer[: len(x)] = x
        return fn(wrapped.buffer[: len(x)])

    wrapped.buffer = torch.empty(2 * 12, 64)
    return wrapped


def through_numpy(fn):
    return lambda x: torch.from_numpy(fn(x).numpy().astype("float32"))


@pytest.mark.parametrize(
    ("rounding", "dependent"),
    [
        (fp32_rotated_sum, lambda x: fp32_rotated_sum(x) + x.mean(0).sum()),
        (through_a_buffer(rotated_sum), through_a_buffer(lambda x: x - x.mean(0))),
        (through_numpy(rotated_sum), through_numpy(lambda x: x - x.mean(0))),
    ],
    ids=["foreign kernel", "buffer of its own", "outside of torch"],
)
def test_where_float64_is_impossible_the_magnitude_decides(rounding, dependent):
    rows = normal(12, 64) + 1
    for fn, outcome in ((rounding, "rounding"), (dependent, "batch-dependent")):
        probe = probe_of(check_batch_invariance(fn, rows), "full batch")
        assert (probe.outcome, probe.judged_by) == (outcome, "magnitude")


def test_float64_itself_is_judged_by_magnitude():
    rows = normal(12, 64, dtype=torch.float64)
    report = check_batch_invariance(rotated_sum, rows)
    assert report.kind == "rounding"
    assert probe_of(report, "full batch").judged_by == "magnitude"
    assert check_batch_invariance(lambda x: x + 1e-6 * x.mean(0), rows).kind == "batch-dependent"


def test_a_zero_of_the_other_sign_is_a_difference():
    report = check_batch_invariance(lambda x: x * 0.0 if len(x) > 1 else x * -0.0, ascending_rows())
    probe = probe_of(report, "full batch")
    assert (probe.outcome, probe.num_different, probe.max_abs_diff, probe.max_ulp) == ("rounding", NUM_ROWS, 0.0, 0)


def test_a_zero_of_the_other_sign_is_rounding_whatever_float64_leaves_of_it():
    def fn(x):
        if x.dtype == torch.float64:
            return x * 0.0 + 1e-18 * (len(x) > 1)
        return x * 0.0 if len(x) > 1 else x * -0.0

    assert check_batch_invariance(fn, ascending_rows()).kind == "rounding"


def test_a_row_of_nans_is_equal_to_itself():
    rows = ascending_rows()
    rows[3] = math.nan
    rows[4, 2] = math.inf
    assert check_batch_invariance(lambda x: x * 2, rows).invariant
    rows = normal(12, 64)
    rows[3] = math.nan
    rows[4, 2] = math.inf
    assert check_batch_invariance(rotated_sum, rows).kind == "rounding"


def test_true_dependence_of_an_imaginary_part_is_no_rounding():
    report = check_batch_invariance(lambda x: torch.complex(x, x - x.mean(0)), normal(NUM_ROWS, 4))
    assert report.kind == "batch-dependent"
    assert probe_of(report, "full batch").judged_by == "float64"
    assert check_batch_invariance(lambda x: torch.complex(x, -x), normal(NUM_ROWS, 4)).invariant


def test_outputs_of_8_bits_are_judged_too():
    def shifted(x):
        return (x - x.mean(0)).to(torch.float8_e4m3fn)

    assert check_batch_invariance(shifted, normal(NUM_ROWS, 4)).kind == "batch-dependent"
    assert check_batch_invariance(lambda x: x.to(torch.float8_e4m3fn), normal(NUM_ROWS, 4)).invariant
