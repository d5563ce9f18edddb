"""``mis-ext explain``: what a configuration does, before it runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext.cli.result import Result

if TYPE_CHECKING:
    from mis_ext.explain import Effect, Explanation
    from mis_ext.keys.presets import Spelt

_OF_WEIGHT = ("above_high", "below_low", "weight_mean")
_NUMBERS = {
    "ess_token": "ESS of token ratios",
    "ess_sequence": "ESS of their products",
    "ess_geometric": "ESS of geometric means",
    "kept_tokens": "tokens kept",
    "live_tokens": "tokens with a policy gradient",
    "kept_sequences": "responses kept",
    "above_high": "ratios above the high bound",
    "below_low": "ratios below the low bound",
    "weight_mean": "mean weight before normalisation",
    "learning_rate": "effective learning rate",
    "ess": "ESS of what multiplies the loss",
}


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="what a configuration does, and what to expect of it; needs no data",
        description=(
            "Says in words and formulas what a YAML file, a preset or a published method does, and what speaks against "
            "it. Predicts by the Gaussian law what it does to a mismatch of the size --k3. If a preset and a method "
            "have the same name, it is the preset. mis-ext methods NAME --yaml prints the file of the method. Exit "
            "code: 0 done, 2 no such configuration."
        ),
    )
    parser.add_argument(
        "config",
        metavar="FILE.yaml|PRESET|METHOD",
        help="a configuration file, the name of a preset, or the name of a method if no preset has that name",
    )
    parser.add_argument(
        "--k3", type=_number, default=1e-3, metavar="NATS", help="mismatch per token, in [0, 10]; default %(default)g"
    )
    parser.add_argument(
        "--length",
        type=_number,
        default=2048,
        metavar="T",
        help="tokens of a response, in [1, 1e7]; default %(default)d",
    )
    parser.add_argument("--stale", action="store_true", help="responses are sampled with weights of an earlier step")
    parser.add_argument("--sequences", type=int, metavar="N", help="responses over which one call normalises")
    parser.set_defaults(run=run, shown_with=("rich",))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, such as 5e-3, got {text!r}") from None


def run(parsed: argparse.Namespace) -> Result:
    """Explain the configuration."""
    from mis_ext.explain import explain_config

    spelt = _spelt(parsed.config)
    found = explain_config(
        spelt.config,
        k3=parsed.k3,
        length=parsed.length,
        is_stale=parsed.stale,
        num_sequences=parsed.sequences,
        said=spelt.said,
        loss=spelt.loss,
        about=spelt.about,
    )
    return Result({"config": parsed.config} | found.to_dict(), lambda: _show(parsed.config, found))


def _spelt(name: str) -> Spelt:
    """What a file spells, or what the preset or else the method of this name does."""
    from mis_ext.checks import did_you_mean
    from mis_ext.keys.preset_files import list_presets, preset_path
    from mis_ext.keys.presets import read_file, read_method
    from mis_ext.methods import METHODS

    if Path(name).suffix in (".yaml", ".yml") or Path(name).exists():
        return read_file(name)
    if name in list_presets():
        return read_file(preset_path(name))
    if name in METHODS:
        return read_method(METHODS[name])
    names = (*list_presets(), *METHODS)
    raise ValueError(f"no preset and no method {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")


def _show(name: str, found: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def title(text: str) -> None:
        console.print(Text(f"\n{text}", style="bold"))

    def lines(texts: Iterable[str], style: str = "") -> None:
        # A hanging indent, so that each begins where the eye looks for it.
        grid = Table.grid(padding=(0, 1))
        for text in texts:
            grid.add_row(Text(" -", style=style), Text(text, style=style))
        console.print(grid)

    console.print(Text(name, style="bold"))
    console.print(Text(found.symbols, style="dim"))
    if found.about:
        grid = Table.grid(padding=(0, 1))
        for name, text in found.about.items():
            grid.add_row(Text(f"{name}:", style="bold"), Text(text))
        console.print(grid)
    title("Steps in their order. (The order of gates does not matter: each looks at the original mask.)")
    # Two columns: with four, a terminal of 80 columns would break each after every second word.
    steps = Table("", "formula, what it touches, meaning", show_lines=True)
    for step in found.steps:
        steps.add_row(Text(step.name), Text(f"{step.formula}\non {step.touches}: {step.meaning}"))
    console.print(steps)
    title("Gradient")
    lines(found.gradient)
    title("Denominator")
    lines(found.denominator)
    title(f"Expected at k3 {found.effect.k3:g} per token")
    table = Table("", *(f"T = {each.length:,.0f}" for each in found.at_lengths))
    for label, values in _rows(found.at_lengths):
        table.add_row(Text(label), *(Text(_percent(value), justify="right") for value in values))
    console.print(table)
    console.print(Text(found.limits, style="dim"))
    known = "What" if found.traps else "Nothing" if found.is_known else "Not known: what"
    title(f"{known} speaks against it at {found.effect.length:,.0f} tokens")
    if found.traps:
        lines((trap.text for trap in found.traps), "yellow")
    if found.notes:
        title("Good to know")
        lines(found.notes)


def _rows(effects: Iterable[Effect]) -> Iterable[tuple[str, list[float]]]:
    effects = [*effects]
    of: Callable[[Any, str], float] = getattr
    for name, label in _NUMBERS.items():
        values = [of(each, name) for each in effects]
        # A method without a correction beside it has no such weight.
        if name not in _OF_WEIGHT or not all(map(math.isnan, values)):
            yield label, values
    yield from ((f"kept by {name}", [each.accepted[name] for each in effects]) for name in effects[0].accepted)


def _percent(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1e}" if 0.0 < value < 1e-3 else f"{value:.3f}"
