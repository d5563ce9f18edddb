# SPDX-License-Identifier: Apache-2.0
"""What a study is, and the methods that studies compare."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from .group import Group, Method

METHODS = Path(__file__).parents[3] / "yaml"
SEEDS = (1, 2, 3, 4)
MORE_SEEDS = tuple(range(1, 9))


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question and its runs.

    Attributes:
        name: On the command line.
        question: What the report answers.
        groups: Trained one after the other; each is kept when it is finished.
        margin: Differences of the mean reward within it are no difference.
        reference: The setting whose uncorrected runs all others are compared with too.
    """

    name: str
    question: str
    groups: tuple[Group, ...]
    margin: float = 0.02
    reference: str | None = None

    def with_seeds(self, seeds: Iterable[int]) -> Study:
        """Its groups that have any of these seeds, and a new group for each seed that a setting has not."""
        wanted = list(dict.fromkeys(seeds))
        groups = [group for group in self.groups if not set(wanted).isdisjoint(group.seeds)]
        settings: dict[tuple[str, ...], list[Group]] = {}
        for group in self.groups:
            settings.setdefault((group.condition, *(method.name for method in group.methods)), []).append(group)
        for of_setting in settings.values():
            has = {seed for group in of_setting for seed in group.seeds}
            groups += [of_setting[0].with_seeds((seed,)) for seed in wanted if seed not in has]
        return replace(self, groups=tuple(groups))

    def with_more(self, names: Iterable[str]) -> Study:
        """With the groups of further seeds that are among these names of groups."""
        present = set(names)
        seeds = {int(part) for name in present for part in re.findall(r"-seed(\d+)", name)}
        more = [group for group in self.with_seeds(sorted(seeds)).groups if group not in self.groups]
        return replace(self, groups=(*self.groups, *(group for group in more if group.name in present)))


def preset(name: str, **changes: Any) -> Method:
    """A configuration file of ``yaml/``, with changes."""
    return Method(name=name, keys=yaml.safe_load((METHODS / f"{name}.yaml").read_text()) | changes)


def geometric(half_width: float) -> Method:
    """A geometric gate and nothing else."""
    bounds = {"rs_lower_bound": 1 - half_width, "rs_upper_bound": 1 + half_width}
    keys = {"use_tis": True, "tis_level": "none", "use_rs": True, "rs_level": "geometric"}
    return Method(name=f"geometric_{half_width:g}", keys=keys | bounds)


GATE = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.99, "rs_upper_bound": 1.01}
NONE = Method(name="none")
TOKEN_TIS, SEQUENCE_TIS = preset("token_tis"), preset("sequence_tis")
TOKEN_MASK = Method(
    name="token_mask",
    keys={"use_tis": True, "tis_mode": "mask", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0},
)
FILTERS = (
    TOKEN_MASK,
    preset("icepop"),
    preset("sequence_mis"),
    *map(geometric, (0.01, 0.03, 0.1)),
    # The default until this study.
    Method(
        name="mis_0.01",
        keys={**TOKEN_TIS.keys, **GATE, "rs_veto_threshold": 1.0e-4, "tis_batch_normalize": True},
    ),
)
WITH_CONTROLS = (
    NONE,
    TOKEN_TIS,
    SEQUENCE_TIS,
    *FILTERS,
    *(Method(name=f"{method.name}, random", like=method.name) for method in FILTERS),
)
FEW = (NONE, TOKEN_TIS, TOKEN_MASK, SEQUENCE_TIS, *FILTERS[1:4], FILTERS[-1])

# The methods that differ most.
MAIN = (NONE, TOKEN_TIS, TOKEN_MASK, FILTERS[2], FILTERS[-1])


def by_seeds(group: Group, size: int) -> tuple[Group, ...]:
    """Groups of ``size`` seeds each, which several GPUs can share."""
    return tuple(group.with_seeds(group.seeds[start : start + size]) for start in range(0, len(group.seeds), size))
