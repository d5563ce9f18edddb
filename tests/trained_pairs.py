# SPDX-License-Identifier: Apache-2.0
"""Every pair of the causes of `support/trained_plants.py` that makes sense together: what is named, and if it is right.

`python tests/trained_pairs.py` judges all of them anew in some minutes, and writes `tests/data/planted_pairs.csv`, from
which the documentation is generated. With numbers behind it, it judges other tokens and prints what differs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "support"))
from documented_tables import Table
from trained_plants import OF_ALL, PLANTS, collected

from mis_ext.tools.diagnosis import CAUSES, Diagnosis
from mis_ext.tools.diagnosis.places import MORE

FP16 = "fp16 kernels"
"""In the place of those in bfloat16."""
RECORD = Path(__file__).parent / "data" / "planted_pairs.csv"
KERNELS = "bf16_kernels"
"""In all tokens. Named where little else is."""
NAMES_BOTH = {"bf16_or_low_precision": (KERNELS, "low_precision")}
"""What a cause names in one breath, where their sizes are the same: either of them is among the alternatives then."""
RIGHT, DOUBTFUL, WRONG = "right", "among the alternatives", "x"
MIN_SHARE, FACTOR = 0.1, 2.0
"""From which share of k3 on a cause must be named, and within which factor its share must be right."""

NEVER_TOGETHER = {
    "weights are of one age": (
        "weights 4 updates old",
        "never synced, 6 steps",
        "half an update behind",
        "begun with old weights",
        "prefix of old weights",
    ),
    "an engine has one temperature": ("temperature 0.7", "temperature 1.05", "temperature 1.2"),
    "a cache has one number format": ("fp8 cache (e5m2)", "fp8 cache (e4m3)"),
    "an adapter is missing or merged": ("adapter on one side", "adapter merged on one side"),
    "the trainer sees one prompt": ("another prompt", "another chat template"),
    "all log-probs have one error": (*OF_ALL, "a tenth shifted"),
    "these samples have one error": ("2 greedy samples", "4 placeholders", "a bonus in 2 samples"),
}
"""Which plants exclude each other, by the reason."""

PAIRS = tuple(
    pair
    for pair in combinations(PLANTS, 2)
    if not any(pair[0] in group and pair[1] in group for group in NEVER_TOGETHER.values())
)


JUDGED = (*((plant,) for plant in PLANTS), *PAIRS)


class Verdict(NamedTuple):
    """What is named where causes are planted.

    Attributes:
        plants: What is planted.
        named: Causes, with the share of k3 that each is said to explain.
        verdict: ``RIGHT``, ``DOUBTFUL``, or what is wrong.
    """

    plants: tuple[str, ...]
    named: dict[str, float]
    verdict: str

    @property
    def sign(self) -> str:
        """One letter."""
        return {RIGHT: "+", DOUBTFUL: "o"}.get(self.verdict, WRONG)


def shares_of(plants: Sequence[str], *, seed: int = 0) -> dict[str, float]:
    """The share of each plant in k3, from what each gives alone; that of kernels, in all tokens, under ``KERNELS``.

    Tokens of a plant that can be taken out are not among those of the plants behind it in the table of causes.
    """
    floor = _k3(seed=seed)
    k3 = {plant: max(_k3(plant, seed=seed) - floor, 0.0) for plant in plants}
    k3[KERNELS] = _k3(FP16, seed=seed) if FP16 in plants else floor
    share = dict[str, float]()
    gone = [each for each in plants if PLANTS[each].is_part]
    for plant in k3:
        before = {each for each in gone if plant not in gone or _place(each) < _place(plant)}
        share[plant] = k3[plant] / sum(each for name, each in k3.items() if name not in before)
    return share


def _place(plant: str) -> int:
    """Of its cause in the table."""
    return [*CAUSES].index(PLANTS[plant].cause)


def _k3(*plants: str, seed: int) -> float:
    return collected(*plants, seed=seed).summary().overall.k3


def judged(plants: Sequence[str], *, seed: int = 0) -> Verdict:
    """Whether each cause of a tenth of k3 is named, none is that is not there, and shares are right."""
    found = collected(*plants, seed=seed).diagnoses()
    shares = shares_of(plants, seed=seed)
    by_name = {plant: [each for each in found if each.cause == PLANTS[plant].cause] for plant in plants}
    standing = {plant: _standing(plant, found) for plant in plants}
    # The search ends there.
    required = [plant for plant in plants if plant in OF_ALL] or plants
    large = [plant for plant in required if shares[plant] >= MIN_SHARE]
    wrong = list[str]()
    for plant in large:
        if not standing[plant]:
            wrong.append(f"{plant} is not named")
        elif not _is_enough(standing[plant], shares[plant]):
            wrong.append(f"{plant}: {_claimed(standing[plant]):.0%} of k3, not {shares[plant]:.0%}")
    for each in found:
        mine = [shares[plant] for plant in plants if each in standing[plant]]
        if each.cause == KERNELS:
            mine.append(shares[KERNELS])
        if not mine:
            wrong.append(f"`{each.cause}` is not there")
        # Beside an error of all log-probs it is a share of wrong numbers.
        elif each.k3_share > FACTOR * max(sum(mine), MIN_SHARE) and not {*plants} & {*OF_ALL}:
            wrong.append(f"`{each.cause}`: {each.k3_share:.0%} of k3, not {sum(mine):.0%}")
    is_doubtful = not all(_is_enough(by_name[plant], shares[plant]) for plant in large)
    verdict = "; ".join(wrong) or (DOUBTFUL if is_doubtful else RIGHT)
    return Verdict(tuple(plants), {each.cause: each.k3_share for each in found}, verdict)


def _standing(plant: str, found: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Which findings name a plant, or say that they could not be told from it, or from more of what is named."""
    cause, words = PLANTS[plant].cause, PLANTS[plant].words
    causes = {cause, *(both for both, either in NAMES_BOTH.items() if cause in either)}
    named = [each for each in found if each.cause in causes or _is_among(words, each)]
    return [each for each in found if each in named or (named and _is_among(MORE, each))]


def _is_among(words: str, found: Diagnosis) -> bool:
    return bool(words) and any(words in each for each in found.alternatives)


def _claimed(found: Sequence[Diagnosis]) -> float:
    return sum(each.k3_share for each in found)


def _is_enough(found: Sequence[Diagnosis], share: float) -> bool:
    return bool(found) and _claimed(found) * FACTOR >= share


# --- the record


def recorded() -> dict[tuple[str, ...], Verdict]:
    """The verdict on each plant and on each pair, as it is written down."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    verdicts = dict[tuple[str, ...], Verdict]()
    for row in rows:
        plants = tuple(filter(None, (row["first"], row["second"])))
        named = {cause: float(share) for cause, share in map(str.split, filter(None, row["named"].split(", ")))}
        verdicts[plants] = Verdict(plants, named, row["verdict"])
    return verdicts


def write(verdicts: Iterable[Verdict]) -> None:
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("first", "second", "named", "verdict"))
        for plants, named, verdict in verdicts:
            shares = ", ".join(f"{cause} {share:.2f}" for cause, share in named.items())
            rows.writerow((*plants, *[""] * (2 - len(plants)), shares, verdict))


def plants_table() -> Table:
    """What is named where one cause is planted."""
    rows = (
        (*verdict.plants, ", ".join(f"`{name}`" for name in verdict.named), verdict.verdict)
        for plants, verdict in recorded().items()
        if len(plants) == 1
    )
    return Table(("planted", "named", "this is"), tuple(rows))


def pairs_table() -> Table:
    """Every plant beside every other, a sign for each."""
    signs = {frozenset(plants): verdict.sign for plants, verdict in recorded().items()}
    numbers = "".join(str(number % 10) for number in range(1, len(PLANTS) + 1))
    rows = []
    for number, plant in enumerate(PLANTS, 1):
        line = "".join(signs.get(frozenset((plant, other)), ".") for other in PLANTS)
        rows.append((str(number), plant, f"`{line}`"))
    return Table(("", "planted", f"beside `{numbers}`"), tuple(rows))


def never_table() -> Table:
    """Plants that exclude each other."""
    return Table(("why", "planted"), tuple((reason, ", ".join(group)) for reason, group in NEVER_TOGETHER.items()))


def main() -> None:
    """Write the record anew, or print what differs from it on other tokens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED", help="of other tokens; none: write the record")
    seeds = parser.parse_args().seeds
    if not seeds:
        write(judged(plants) for plants in JUDGED)
        return
    verdicts = recorded()
    for seed in seeds:
        kinds = Counter[str]()
        for plants in JUDGED:
            verdict = judged(plants, seed=seed)
            kinds[verdict.sign] += 1
            if (verdict.sign == WRONG) != (verdicts[plants].sign == WRONG):
                print(f"seed {seed}: {' + '.join(plants)}: {verdict.verdict}; recorded: {verdicts[plants].verdict}")
        print(f"seed {seed}: {dict(kinds)}", flush=True)


if __name__ == "__main__":
    main()
