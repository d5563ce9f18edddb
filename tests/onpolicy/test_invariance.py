# SPDX-License-Identifier: Apache-2.0
"""Whether a row depends on its batch, or a position on how its sequence was fed, and whether by rounding or truly."""

import importlib.util
import inspect
import math

import pytest
import torch
from torch import nn

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.invariance import InvarianceReport, check_batch_invariance, check_sequence_invariance

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_ROWS = 36  # No chunk size leaves a remainder that is itself a chunk size.


def normal(*shape, dtype=torch.float32, seed=0):
    # Drawn in float64, so that float64 rounds them too.
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ascending_rows(num_columns=6):
    rows = normal(NUM_ROWS, num_columns).abs() + 1
    rows[:, 0] = torch.arange(1.0, NUM_ROWS + 1)
    return rows


def rotated_sum(x):
    """Adds up a row pair by pair, from a start that depends on the number of rows: other roundings, the same sum."""
    x = x.roll(len(x), 1)
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def outcomes(report, *kinds):
    return {probe.name for probe in report.probes if probe.outcome in kinds}


def probe_of(report, name):
    (probe,) = (probe for probe in report.probes if probe.name == name)
    return probe


# --- rows of a batch


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_order_of_summation_that_depends_on_the_batch_is_rounding_and_counted_exactly(dtype):
    rows = normal(13, 64, dtype=dtype)
    report = check_batch_invariance(rotated_sum, rows)
    assert (report.kind, report.invariant) == ("rounding", False)
    alone = torch.cat([rotated_sum(row[None]) for row in rows])
    for size in (2, 7, 13):
        together = torch.cat([rotated_sum(chunk) for chunk in rows.split(size)])
        different = (alone != together).flatten(1).any(1).nonzero().flatten().tolist()
        probe = probe_of(report, "full batch" if size == 13 else f"chunks of {size}")
        assert (probe.num_different, probe.first_different) == (len(different), different[0])
        assert probe.max_abs_diff == (alone.double() - together.double()).abs().max()


@torch.no_grad()
def test_an_fp32_linear_is_invariant_in_the_mode():
    with batch_invariant_mode():
        assert check_batch_invariance(nn.Linear(140, 130), normal(17, 140)).invariant


@pytest.mark.parametrize("fn", [lambda x: x - x.mean(0), lambda x: torch.complex(x, x - x.mean(0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_subtracting_the_mean_of_the_batch_is_true_dependence(fn, dtype):
    report = check_batch_invariance(fn, normal(NUM_ROWS, 24, dtype=dtype))
    assert report.kind == "batch-dependent"
    differing = {probe.name for probe in report.probes if not probe.name.endswith("again")}
    assert outcomes(report, "batch-dependent") == differing
    assert probe_of(report, "NaN rows before").max_abs_diff == math.inf


@pytest.mark.parametrize(("share", "outcome"), [(0.5, "rounding"), (2.0, "batch-dependent")])
def test_the_limit_is_the_root_of_the_precision(share, outcome):
    difference = share * 2.0**-11.5
    probe = probe_of(check_batch_invariance(lambda x: x - difference * (len(x) > 1), torch.ones(4, 3)), "full batch")
    assert probe.outcome == outcome


def triggered(condition):
    """Adds 1 to rows where the whole batch fulfils a condition."""
    return lambda x: x + 1.0 * bool(condition(x))


TRIGGERS = {
    "chunks of 2": lambda x: len(x) == 2,
    "chunks of 3": lambda x: len(x) == 3,
    "chunks of 5": lambda x: len(x) == 5,
    "chunks of 8": lambda x: len(x) == 8,
    "chunks of 16": lambda x: len(x) == 16,
    "reversed": lambda x: len(x) == NUM_ROWS and x[0, 0] == NUM_ROWS and x[1, 0] == NUM_ROWS - 1,
    "permuted": lambda x: len(x) == NUM_ROWS and x[:, 0].diff().sign().unique().numel() == 2,
    "zeros before": lambda x: (x[0] == 0).all(),
    "zeros after": lambda x: (x[-1] == 0).all(),
    "huge rows before": lambda x: (x[0] > 1e15).all(),
    "huge rows after": lambda x: (x[-1] > 1e15).all(),
    "NaN rows before": lambda x: x[0].isnan().all(),
    "NaN rows after": lambda x: x[-1].isnan().all(),
    "strided storage": lambda x: x.stride() == (12, 1),
    "transposed storage": lambda x: len(x) > 1 and x.stride() == (1, NUM_ROWS),
    "full batch": lambda x: len(x) == NUM_ROWS and x[0, 0] == 1 and x[:, 0].diff().min() > 0 and x.stride() == (6, 1),
    "chunks of 7": lambda x: len(x) == 7,
}


@pytest.mark.parametrize("name", TRIGGERS)
def test_each_probe_finds_what_only_it_can_find(name):
    report = check_batch_invariance(triggered(TRIGGERS[name]), ascending_rows())
    assert outcomes(report, "batch-dependent") == {name}
    assert 0 < probe_of(report, name).num_different <= NUM_ROWS
    assert outcomes(report, "failed", "rounding", "not repeatable") == set()


def test_noise_is_not_repeatable():
    report = check_batch_invariance(lambda x: x + torch.rand_like(x), ascending_rows())
    assert report.kind == "not repeatable"
    assert outcomes(report, "not repeatable") == {"reference, again"}


def test_a_function_may_change_its_input_and_use_its_output_again():
    rows = ascending_rows()
    before, memory = rows.clone(), torch.empty(2 * NUM_ROWS, 6)
    assert check_batch_invariance(lambda x: torch.mul(x.mul_(2.0), 3.0, out=memory[: len(x)]), rows).invariant
    assert check_batch_invariance(lambda x: x.mul_(2.0), rows).invariant
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x + torch.zeros(8, 6) if len(x) > 8 else x, "RuntimeError: The size of tensor a"),
        (lambda x: x[:8], "ValueError: the function must return 16 rows for 16 rows, got shape [8, 6]"),
        (lambda x: x if len(x) < 16 else [x], "TypeError: the function must return a tensor, got list"),
        (lambda x: x if len(x) < 16 else x[:, :0], "ValueError: the function must return 16 rows"),
        (lambda x: x.double() if len(x) in (4, 16) else x, "TypeError: cannot compare bits of torch.float64"),
        (lambda x: x if len(x) < 16 else x[:, :1], "RuntimeError: Sizes of tensors must match"),
    ],
)
def test_a_probe_that_raises_has_failed_and_the_function_is_not_invariant(fn, message):
    report = check_batch_invariance(fn, ascending_rows())
    assert (report.kind, report.invariant) == ("failed", False)
    assert message in probe_of(report, "chunks of 16").note
    assert probe_of(report, "chunks of 5").outcome == "equal"


def test_a_failed_probe_hides_no_graver_finding_and_is_hidden_by_no_lesser_one():
    def fails_at_16(fn):
        return lambda x: [] if len(x) == 16 else fn(x)

    rows = normal(18, 64)
    assert check_batch_invariance(fails_at_16(rotated_sum), rows).kind == "failed"
    assert check_batch_invariance(fails_at_16(lambda x: x - x.mean(0)), rows).kind == "batch-dependent"


def test_a_function_that_does_not_run_on_one_row_has_failed():
    report = check_batch_invariance(nn.BatchNorm1d(24), normal(NUM_ROWS, 24))
    assert report.kind == "failed"
    assert "more than 1 value per channel" in probe_of(report, "reference").note


def test_equal_nans_are_equal_and_a_zero_of_the_other_sign_is_a_difference_of_0():
    rows = ascending_rows()
    rows[3], rows[4, 2] = math.nan, math.inf
    assert check_batch_invariance(lambda x: x * 2, rows).invariant
    rows = normal(12, 64)
    rows[3], rows[4, 2] = math.nan, math.inf
    assert check_batch_invariance(rotated_sum, rows).kind == "rounding"
    report = check_batch_invariance(lambda x: x * 0.0 if len(x) > 1 else x * -0.0, ascending_rows())
    probe = probe_of(report, "full batch")
    assert (probe.outcome, probe.num_different, probe.max_abs_diff) == ("rounding", NUM_ROWS, 0.0)


def test_rows_of_token_ids_are_padded_with_zeros_only():
    ids = torch.arange(24).reshape(12, 2)
    report = check_batch_invariance(lambda x: x * 2, ids)
    assert report.invariant
    assert {probe.name for probe in report.probes if "before" in probe.name} == {"zeros before"}
    assert check_batch_invariance(lambda x: x - x.sum(0), ids).kind == "batch-dependent"


def test_a_function_that_returns_nothing_but_nan_has_failed():
    """Its rows are equal, whatever they depend on."""
    report = check_batch_invariance(lambda x: x.sum(0) * math.nan * x, ascending_rows())
    assert report.kind == "failed"
    assert "only NaN" in probe_of(report, "reference").note


def test_lists_are_refused_by_name():
    with pytest.raises(TypeError, match="rows must be a tensor, got list"):
        check_batch_invariance(lambda x: x, [[1.0], [2.0]])
    with pytest.raises(TypeError, match="sequence must be a tensor, got list"):
        check_sequence_invariance(lambda x: x, [1, 2])


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 4)])
def test_fewer_than_two_rows_are_an_error(shape):
    with pytest.raises(ValueError, match=r"at least 2 rows .* got shape"):
        check_batch_invariance(lambda x: x, torch.zeros(shape))


def test_a_report_without_a_single_comparison_is_no_pass():
    assert InvarianceReport(probes=()).kind == "failed"


def test_a_report_can_be_read():
    report = check_batch_invariance(triggered(TRIGGERS["permuted"]), ascending_rows())
    first, _, *lines = str(report).splitlines()
    assert first == "batch-dependent"
    (line,) = (line for line in lines if line.startswith("permuted"))
    assert line.split() == ["permuted", "batch-dependent", "36", "0", "1"]


# --- a sequence in parts

NUM_TOKENS = 20
FED_IN_PARTS = {
    "decode",
    "prefill 10, then decode",
    "chunked prefill of 2",
    "chunked prefill of 3",
    "chunked prefill of 16",
}


def running_sum(x):
    """Exact for small integers, so equal bits whatever the order."""
    return x.cumsum(-2)


def summing_decoder(*, forgets_chunks=False):
    def make_decoder():
        seen = []

        def decode(x):
            if forgets_chunks:
                seen.clear()
            seen.extend(x)
            start = len(seen) - len(x)
            return torch.stack([sum(seen[: start + offset + 1]) for offset in range(len(x))])

        return decode

    return make_decoder


def tokens():
    return torch.arange(1.0, NUM_TOKENS + 1)[:, None] * torch.ones(3)


def test_an_exact_function_is_invariant_in_every_probe():
    report = check_sequence_invariance(running_sum, tokens(), make_decoder=summing_decoder())
    assert report.invariant
    assert outcomes(report, "equal") == FED_IN_PARTS | {"reference, again", "prefixes"}


def test_without_a_decoder_prefixes_are_probed():
    report = check_sequence_invariance(running_sum, tokens())
    assert outcomes(report, "equal") == {"reference, again", "prefixes"}
    assert report.invariant


def test_an_output_that_sees_later_tokens_is_true_dependence():
    report = check_sequence_invariance(lambda x: x - x.mean(0), tokens())
    assert report.kind == "batch-dependent"


@pytest.mark.parametrize("length", [1, 4, 7, 9, 17, 19])
def test_prefixes_are_tried_around_powers_of_two_and_at_the_end(length):
    report = check_sequence_invariance(lambda x: x + (len(x) == length), tokens())
    probe = probe_of(report, "prefixes")
    assert (probe.num_different, probe.first_different) == (length, 0)


def test_a_cache_that_forgets_is_found_where_it_forgets():
    forgetful = check_sequence_invariance(running_sum, tokens(), make_decoder=summing_decoder(forgets_chunks=True))
    assert outcomes(forgetful, "batch-dependent") == FED_IN_PARTS
    assert probe_of(forgetful, "decode").num_different == NUM_TOKENS - 1
    assert probe_of(forgetful, "prefill 10, then decode").first_different == 10
    assert probe_of(forgetful, "chunked prefill of 16").first_different == 16
    assert probe_of(forgetful, "chunked prefill of 3").num_different == NUM_TOKENS - 3


def test_a_decoder_is_fed_in_order_from_an_empty_cache_and_in_the_sizes_named():
    fed = []

    def make_decoder():
        fed.append([])
        total = torch.zeros(3)

        def decode(x):
            nonlocal total
            fed[-1].append(len(x))
            outputs = total + running_sum(x)
            total = outputs[-1]
            return outputs

        return decode

    assert check_sequence_invariance(running_sum, tokens(), make_decoder=make_decoder).invariant
    assert fed == [[1] * 20, [10] + [1] * 10, [2] * 10, [3] * 6 + [2], [16, 4]]


def test_a_decoder_that_raises_has_failed():
    def make_decoder():
        raise RuntimeError("no cache today")

    report = check_sequence_invariance(running_sum, tokens(), make_decoder=make_decoder)
    assert outcomes(report, "failed") == FED_IN_PARTS
    assert probe_of(report, "decode").note == "RuntimeError: no cache today"


def test_two_tokens_are_enough_and_one_is_an_error():
    assert check_sequence_invariance(running_sum, tokens()[:2], make_decoder=summing_decoder()).invariant
    with pytest.raises(ValueError, match=r"at least 2 tokens, got shape \[1, 3\]"):
        check_sequence_invariance(running_sum, tokens()[:1])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@torch.no_grad()
def test_the_example_for_a_transformers_model_runs_and_finds_decoding_exact():
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=24, **heads)).eval()
    example = inspect.cleandoc(check_sequence_invariance.__doc__).partition("::\n")[2].partition("\nArgs:")[0]
    reports = []
    names = {"model": model, "ids": torch.arange(NUM_TOKENS), "DynamicCache": DynamicCache}
    names["check_sequence_invariance"] = lambda *arguments, **named: reports.append(
        check_sequence_invariance(*arguments, **named)
    )
    with batch_invariant_mode():
        exec(inspect.cleandoc(example), names)
    assert outcomes(reports[0], "equal") >= FED_IN_PARTS
