# SPDX-License-Identifier: Apache-2.0
"""Settings and samples to compare the package with the reference example of slime and Miles."""

from pathlib import Path

import host_loop
import torch
import yaml
from cases import flat, random_samples
from reference import Samples

COMPAT = yaml.safe_load((Path(__file__).parents[2] / "yaml" / "miles_compat.yaml").read_text())


def batch(*, seed: int, masked_sample: bool) -> Samples:
    samples = random_samples([7, 1, 12, 4, 9, 2], seed=seed, outliers=0.12)
    if masked_sample:
        samples.masks[3].zero_()
    return samples


def settings_of(level: str, mode: str, rs_level: str | None, *, veto: bool, normalize: bool) -> dict:
    bounds = {"token": (0.75, 1.5), "sequence": (0.5, 2.5), "geometric": (0.95, 1.0625)}
    low, high = bounds[level]
    keys = {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_upper_bound": high}
    keys |= {"mis_guard": "warn", "mis_metrics": "all"}
    if mode != "truncate":
        keys["tis_lower_bound"] = low
    if rs_level is not None:
        rs_low, rs_high = {"token": (0.6, 1.8), "sequence": (0.25, 3.0), "geometric": (0.92, 1.09)}[rs_level]
        keys |= {"use_rs": True, "rs_level": rs_level, "rs_lower_bound": rs_low, "rs_upper_bound": rs_high}
    else:
        keys["use_rs"] = False
    if veto:
        keys["rs_veto_threshold"] = 0.04
    if normalize:
        keys["tis_batch_normalize"] = True
    return keys


def compat(keys: dict) -> dict:
    """The preset's keys with the changes of a user. Keys without an effect are dropped."""
    merged = {**COMPAT, **keys}
    idle = ["tis_lower_bound", "rs_veto_threshold", "tis_batch_normalize"]
    idle = [key for key in idle if key not in keys]
    if not keys["use_rs"]:
        idle += ["rs_level", "rs_lower_bound", "rs_upper_bound"]
    if "rs_veto_threshold" in idle:
        idle += ["rs_veto_requires_rs"]
    if "tis_batch_normalize" in idle:
        idle += ["tis_normalize_scope", "tis_normalize_over"]
    if not keys["use_rs"] and "rs_veto_threshold" in idle and keys["tis_mode"] != "mask":
        idle += ["tis_normalize_over"]
    return {key: value for key, value in merged.items() if key not in idle}


def averaged(values: list[torch.Tensor], masks: list[torch.Tensor]) -> torch.Tensor:
    """A metric of the example as one number per sample, its mean over the response, on every token."""
    means = [host_loop.masked_mean(v.double(), m.double()) for v, m in zip(values, masks, strict=True)]
    return flat([mean.expand(m.numel()) for mean, m in zip(means, masks, strict=True)])
