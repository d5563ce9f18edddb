# SPDX-License-Identifier: Apache-2.0
"""The first part of the evidence's README: how many runs there are, and each method's effect in each setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .floor import Floor
from .outcomes import Condition, Difference, benjamini_hochberg, holm
from .results import Results
from .studies import STUDIES, Study

# Method in results, and what readers know it as.
METHODS = {
    "token_tis": "token TIS",
    "token_mask": "token mask",
    "sequence_tis": "sequence TIS",
    "sequence_mis": "sequence MIS",
    "geometric_0.01": "geometric gate 1 %",
    "mis_0.01": "gate, token TIS, veto",
}
# Stale weights first, and of each kind those with 8 seeds; setting, study, name.
ROWS = (
    ("parts_stale_1", "parts", "weights 1 step old, fp8 cache"),
    ("on_policy_stale", "on_policy", "weights 1 step old"),
    *((f"staleness_{age}", "staleness", f"weights {age} step{'s' * (age > 1)} old") for age in (1, 2, 4, 8, 16)),
    ("staleness_0", "staleness", "not stale, the same study"),
    ("bf16_controlled", "bf16_controlled", "bf16, controlled"),
    ("bf16", "bf16", "SGLang, bf16"),
    ("fp8_weights_controlled", "fp8_weights_controlled", "fp8 weights, controlled"),
    ("fp8_weights", "fp8_weights", "SGLang, fp8 weights"),
    ("fp8_cache_controlled", "fp8_cache_controlled", "fp8 cache, controlled"),
    ("fp8_cache", "fp8_cache", "SGLang, fp8 cache"),
    ("fp8_products", "fp8_products", "SGLang, fp8 products"),
    ("int8_products", "int8_products", "SGLang, int8 products"),
)
BLOCK = re.compile(r"(<!-- overview: generated -->\n).*?(<!-- end of overview -->)", re.DOTALL)
FIRST_STEPS = slice(0, 20)


def report(results: Results, page: Path, floor: Floor) -> None:
    """Renew the generated part of a page, which has to be there with its marks."""
    text = page.read_text(encoding="utf-8")
    if not BLOCK.search(text):
        raise ValueError(f"{page}: no line <!-- overview: generated --> with its end")
    lines = "\n".join(overview(results, floor))
    page.write_text(BLOCK.sub(lambda marks: f"{marks[1]}\n{lines}\n\n{marks[2]}", text), encoding="utf-8")
    print(page)


def overview(results: Results, floor: Floor) -> list[str]:
    """Its lines."""
    count = Counts.of_studies(STUDIES.values(), results)
    conditions = {name: _condition(results, STUDIES[study], name) for name, study, _ in ROWS}
    differences = {
        (name, method): condition.difference(method, condition.base, "reward")
        for name, condition in conditions.items()
        for method in METHODS
        if method in condition.curves
    }
    p_values = [each.p_value for each in differences.values()]
    overall = [cell for cell, p in zip(differences, holm(p_values), strict=True) if p < 0.05]
    discovered = [cell for cell, p in zip(differences, benjamini_hochberg(p_values), strict=True) if p < 0.05]
    bold = [cell for cell, verdict in _verdicts(conditions, floor).items() if verdict in ("better", "worse")]
    named = "; ".join(f"{METHODS[method]} with {_name(setting)}" for setting, method in overall)
    return [
        f"**{count.runs:,} runs.** {count.unpaired} have no pair: they measured the mismatch only. {count.identical} "
        "are bit by bit those of another method with the same seed. "
        f"{len(floor.differences)} repeat another one: their mean rewards differ by {floor.spread:.3f} (root mean "
        f"square), {max(map(abs, floor.differences)):.3f} at most; "
        f"{100 * np.mean(np.abs(floor.differences) > 0.02):.0f} % by more than 0.02.",
        "",
        f"**Noise floor**, what an arm has against itself, pooled: ±{floor.half_width(4):.3f} with 4 seeds, "
        f"±{floor.half_width(8):.3f} with 8. From the setting's own pairs: {_own_floors(conditions, floor)}.",
        "",
        f"| engine | seeds | k3, first 20 steps | none | {' | '.join(METHODS.values())} "
        "| kept by the gate: first 20 steps, all |",
        "|---" * (len(METHODS) + 5) + "|",
        *_rows(conditions, differences, floor),
        "",
        f"Of these {len(differences)} cells {len(bold)} are bold. Holm's correction over all of them leaves "
        f"{len(overall)} ({named}). Benjamini and Hochberg's leaves {len(discovered)}"
        f"{', all with stale weights' if all(_is_stale(setting) for setting, _ in discovered) else ''}.",
    ]


@dataclass(frozen=True)
class Counts:
    """Of finished runs: all, those that no other one can be compared with, those that are another method's."""

    runs: int
    unpaired: int
    identical: int

    @classmethod
    def of_studies(cls, studies: Iterable[Study], results: Results) -> Counts:
        """A pair has one seed in one setting, or is of a setting and its study's reference."""
        runs = unpaired = identical = 0
        for study in studies:
            done = [group for group in study.groups if results.is_done(group)]
            settings = dict.fromkeys(group.condition for group in done)
            for setting in settings:
                curves = _condition(results, study, setting).curves
                by_seed: dict[int, list[bytes]] = {}
                for seeds in curves.values():
                    for seed, numbers in seeds.items():
                        # Rewards alone can be equal by chance.
                        curve = b"".join(numbers[name].tobytes() for name in ("reward", "entropy"))
                        by_seed.setdefault(seed, []).append(curve)
                runs += sum(map(len, by_seed.values()))
                identical += sum(len(of_seed) - len(set(of_seed)) for of_seed in by_seed.values())
                if study.reference not in settings:
                    unpaired += sum(len(of_seed) == 1 for of_seed in by_seed.values())
        return cls(runs, unpaired, identical)


def _condition(results: Results, study: Study, name: str) -> Condition:
    groups = [group for group in study.groups if group.condition == name and results.is_done(group)]
    return Condition.of_rows(name, [row for group in groups for row in results.rows(group)])


def _verdicts(conditions: dict[str, Condition], floor: Floor) -> dict[tuple[str, str], str]:
    """As on the settings' own pages: Holm's correction for all methods of a setting."""
    return {
        (name, method): verdict
        for name, condition in conditions.items()
        for method, verdict in condition.verdicts(floor.of(name).margin(_num_seeds(condition), 0.02)).items()
        if method in METHODS
    }


def _rows(
    conditions: dict[str, Condition], differences: dict[tuple[str, str], Difference], floor: Floor
) -> Iterable[str]:
    verdicts = _verdicts(conditions, floor)
    for name, study, label in ROWS:
        condition = conditions[name]
        cells = [f"[{label}]({study}.md)", str(_num_seeds(condition))]
        k3 = condition.mean(condition.base, "k3", FIRST_STEPS)
        cells += [f"{k3:.1f}" if k3 >= 1 else f"{k3:.1e}".replace("e-0", "e-")]
        cells += [f"{condition.mean(condition.base, 'reward'):.3f}"]
        for method in METHODS:
            difference, verdict = differences.get((name, method)), verdicts.get((name, method))
            form = "**{}**" if verdict in ("better", "worse") else "none" if verdict == "no difference" else "{}"
            cells.append("" if difference is None else form.format(difference))
        gate = next(method for method in ("geometric_0.01", "mis_0.01") if method in condition.curves)
        kept = (condition.mean(gate, "kept_sequences", part) for part in (FIRST_STEPS, slice(None)))
        cells.append(", ".join(f"{share:.2f}" for share in kept))
        yield f"| {' | '.join(cells)} |"


def _own_floors(conditions: dict[str, Condition], floor: Floor) -> str:
    own: Sequence[str] = [
        f"{_name(name)} ±{floor.of(name).half_width(_num_seeds(condition)):.3f} ({_num_seeds(condition)} seeds)"
        for name, condition in conditions.items()
        if name in floor.by_setting
    ]
    return ", ".join(own)


def _num_seeds(condition: Condition) -> int:
    return len(condition.curves[condition.base])


def _name(setting: str) -> str:
    return next(label for name, _, label in ROWS if name == setting)


def _is_stale(setting: str) -> bool:
    return _name(setting).startswith("weights ")
