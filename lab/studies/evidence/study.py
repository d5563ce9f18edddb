# SPDX-License-Identifier: Apache-2.0
"""What a study is, and the two methods that every study compares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .group import Group, Method


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question and its runs.

    Attributes:
        name: On the command line.
        question: The title of the report.
        groups: Trained one after the other; each is kept when it is finished.
    """

    name: str
    question: str
    groups: tuple[Group, ...]

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


NONE = Method(name="none")
TOKEN_TIS = Method(
    name="token_tis", keys={"use_tis": True, "tis_mode": "truncate", "tis_level": "token", "tis_upper_bound": 2.0}
)
