# SPDX-License-Identifier: Apache-2.0
"""Rows for the probes of invariance, a sum that depends on the batch, and what a report says of a probe."""

import torch

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
