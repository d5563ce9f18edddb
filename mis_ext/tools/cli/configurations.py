# SPDX-License-Identifier: Apache-2.0
"""Commands that need no data: ``explain``, ``presets``, ``keys``, ``schema``, ``methods``, ``convert``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mis_ext.tools.cli.command import Result, show, show_grid, show_table

if TYPE_CHECKING:
    from mis_ext.tools.configuration_files import Configuration
    from mis_ext.tools.explain import Explanation

_DEFAULT = "mis"
"""The preset that is listed first."""
_NUMBERS = {
    "ess_token": "ESS of token ratios",
    "ess_sequence": "ESS of their products",
    "ess_geometric": "ESS of geometric means",
    "kept_tokens": "tokens kept",
    "kept_sequences": "responses kept",
}


def add_explain(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="explain a configuration and predict its effect; needs no data",
        description=(
            "Print the formulas and the drawbacks of a YAML file, a preset, or a published method. Predict "
            "its effect at the mismatch --k3 with a Gaussian approximation. If a preset and a method "
            "have the same name, the preset is used. mis-ext methods NAME --yaml prints a file that runs the method. "
            "Exit code: 0 success, 2 no such configuration."
        ),
    )
    parser.add_argument(
        "config",
        metavar="FILE.yaml|PRESET|METHOD",
        help="a configuration file, the name of a preset, or the name of a method if no preset has that name",
    )
    parser.add_argument(
        "--k3", type=float, default=1e-3, metavar="NATS", help="mismatch per token, in [0, 10]; default %(default)g"
    )
    parser.add_argument(
        "--length",
        type=float,
        default=2048,
        metavar="T",
        help="tokens of a response, in [1, 1e7]; default %(default)d",
    )
    parser.add_argument("--stale", action="store_true", help="responses are sampled with stale weights")
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="responses over which one call normalizes the weights"
    )
    parser.set_defaults(run=run_explain, shown_with=("rich",))


def run_explain(parsed: argparse.Namespace) -> Result:
    """Explain the configuration."""
    from mis_ext.tools.explain import explain_config

    chosen = _find_configuration(parsed.config)
    found = explain_config(
        chosen.config,
        k3=parsed.k3,
        length=parsed.length,
        is_stale=parsed.stale,
        num_sequences=parsed.sequences,
        said=chosen.said,
        loss=chosen.loss,
    )
    content = {"config": parsed.config, "about": chosen.about, **found.to_dict()}
    return Result(content, lambda: _show_explanation(parsed.config, chosen.about, found))


def _find_configuration(name: str) -> Configuration:
    """Return the configuration of a file, or of the preset or method of this name."""
    from mis_ext.files import list_presets, preset_path
    from mis_ext.methods import METHODS
    from mis_ext.tools.configuration_files import read_file, read_method
    from mis_ext.validation import did_you_mean

    if Path(name).suffix in (".yaml", ".yml"):
        return read_file(name)
    # Presets before paths: a folder named mis would hide the preset. For a file of that name pass ./mis.
    if name in list_presets():
        return read_file(preset_path(name))
    if name in METHODS:
        return read_method(METHODS[name])
    if Path(name).exists():
        return read_file(name)
    near = did_you_mean(name, (*list_presets(), *METHODS))
    raise ValueError(f"no file, preset, or method {name!r}{near}. Run mis-ext presets or mis-ext methods to list all")


def _show_explanation(name: str, about: Mapping[str, str], found: Explanation) -> None:
    from mis_ext.methods.published import SYMBOLS as METHOD_SYMBOLS
    from mis_ext.tools.explain import LIMITS, SYMBOLS

    def title(text: str) -> None:
        show(f"\n{text}", "bold")

    def lines(texts: Sequence[str], style: str = "") -> None:
        show_grid([(" -", text) for text in texts], gap=1, style=style, text_style=style)

    show(name, "bold")
    show(SYMBOLS if not about else f"{SYMBOLS} In the formula of the method: {METHOD_SYMBOLS}", "dim")
    if about:
        show_grid([(f"{title}:", text) for title, text in about.items()], gap=1, style="bold")
    title("Steps in order. (The order of gates does not matter: each gate uses the original mask.)")
    show_grid([(f"{step.name}:", step.formula) for step in found.steps], gap=1)
    title(f"Expected at k3 {found.effect.k3:g} per token")
    lengths = (f"T = {each.length:,.0f}" for each in found.at_lengths)
    rows = {label: [getattr(each, name) for each in found.at_lengths] for name, label in _NUMBERS.items()}
    rows |= {f"kept by {name}": [each.accepted[name] for each in found.at_lengths] for name in found.effect.accepted}
    show_table(("", *lengths), ((label, *map(_percent, each)) for label, each in rows.items()), numbers_right=True)
    show(LIMITS, "dim")
    known = "Pitfalls" if found.traps else "No known pitfalls" if found.is_known else "Pitfalls unknown"
    title(f"{known} at {found.effect.length:,.0f} tokens")
    if found.traps:
        lines([trap.text for trap in found.traps], "yellow")
    if found.notes:
        title("Good to know")
        lines(found.notes)


def _percent(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1e}" if 0.0 < value < 1e-3 else f"{value:.3f}"


def add_listings(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that print texts: ``presets``, ``keys``, ``schema``, ``methods``, and ``convert``."""
    presets = subparsers.add_parser(
        "presets",
        help="list the presets",
        description="List the presets. With NAME, print its file for --custom-config-path: "
        "mis-ext presets mis > mis.yaml",
    )
    keys = subparsers.add_parser(
        "keys",
        help="list the YAML keys: legal range, default, effect",
        description="List the YAML keys. With NAME, describe that key.",
    )
    schema = subparsers.add_parser(
        "schema",
        help="print a JSON Schema of the YAML keys, for editors",
        description="Print the JSON Schema of the keys: mis-ext schema > mis.schema.json. An editor with the YAML "
        "language server uses it if the YAML file has this line, as the presets do: "
        "# yaml-language-server: $schema=mis.schema.json",
    )
    methods = subparsers.add_parser(
        "methods",
        help="list the published methods: formula, source, use, drawbacks",
        description="List the methods. With NAME, describe that method.",
    )
    for listing, what in ((presets, "preset"), (keys, "key"), (methods, "method")):
        listing.add_argument("name", nargs="?", metavar="NAME", help=f"the name of a {what}")
    methods.add_argument(
        "--yaml",
        action="store_true",
        help="print a file that runs NAME: with the hook if possible, else with the full policy loss",
    )
    convert = subparsers.add_parser(
        "convert",
        help="convert the options of another framework to a YAML file with the same weights and masks",
        description="Read a configuration of verl: the .hydra/config.yaml of a run, the output of its command with "
        "--cfg job, or its rollout_correction alone. Print a YAML file with the same weights and masks. "
        "Options without an equivalent raise an error.",
    )
    convert.add_argument("framework", choices=("verl",), help="the framework of the options")
    convert.add_argument("file", metavar="FILE", help="the configuration, as YAML")
    runs = {presets: run_presets, keys: run_keys, schema: run_schema, methods: run_methods, convert: run_convert}
    for parser, run in runs.items():
        parser.set_defaults(run=run, shown_with=())


def run_presets(arguments: argparse.Namespace) -> Result:
    """List the presets, or print one file."""
    from mis_ext.files import hanging, list_presets, preset_remarks, preset_text

    if arguments.name is not None:
        file = preset_text(arguments.name)
        remarks = preset_remarks(arguments.name)._asdict()
        return Result({"name": arguments.name, **remarks, "yaml": file}, lambda: print(file, end=""))
    names = sorted(list_presets(), key=lambda name: name != _DEFAULT)
    presets = [{"name": name, **preset_remarks(name)._asdict()} for name in names]

    def show_presets() -> None:
        for each in presets:
            print(each["name"])
            print(hanging("  What: ", each["what"]))
            print(hanging("  When: ", each["when"]))
        print(
            f"\n{hanging('', 'mis-ext presets NAME > mis.yaml writes a file, mis-ext explain NAME prints its effect.')}"
        )

    return Result({"presets": presets}, show_presets)


def run_keys(parsed: argparse.Namespace) -> Result:
    """Describe one key, or all keys."""
    from mis_ext.files import hanging
    from mis_ext.keys.rows import ROWS, described
    from mis_ext.validation import check_known

    check_known("keys", [parsed.name] if parsed.name else [], ROWS)
    rows = [described(name) for name in ROWS if parsed.name in (None, name)]

    def show_keys() -> None:
        for row in rows:
            print(row["key"])
            for title, text in row.items():
                if title != "key" and text:
                    print(hanging(f"  {title}: ", str(text)))

    return Result(rows, show_keys)


def run_schema(_: argparse.Namespace) -> Result:
    """Print the schema."""
    from mis_ext.keys.rows import json_schema

    schema = json_schema()
    return Result(schema, lambda: print(json.dumps(schema, indent=1)))


def run_methods(arguments: argparse.Namespace) -> Result:
    """List the methods, or describe one method with the file that runs it."""
    from mis_ext.methods import METHODS, find_method
    from mis_ext.methods.catalogue import describe_method, list_methods, method_facts
    from mis_ext.methods.published import SYMBOLS
    from mis_ext.tools.configuration_files import method_yaml

    if arguments.name is None:
        if arguments.yaml:
            raise ValueError("--yaml needs the NAME of a method")
        methods = [method_facts(row) for row in METHODS.values()]
        return Result({"methods": methods, "symbols": SYMBOLS}, lambda: print(list_methods()))
    row = find_method(arguments.name)
    file = method_yaml(row)
    content = method_facts(row) | {"yaml": file, "symbols": SYMBOLS}
    return Result(content, lambda: print(file, end="") if arguments.yaml else print(describe_method(row)))


def run_convert(arguments: argparse.Namespace) -> Result:
    """Convert the file."""
    from mis_ext.hosts.verl_options import WHOLE_CONFIGURATION, convert_verl, dtype_remarks, options_in
    from mis_ext.keys.reading import keys_as_yaml, read_keys

    try:
        content = read_keys(arguments.file)
    except ValueError as error:
        raise ValueError(f"{error}. {WHOLE_CONFIGURATION}") from None
    keys, remarks = convert_verl(options_in(content))
    lines = ["From verl's rollout_correction; for MIS_EXT_KEYS.", *remarks, *dtype_remarks(content)]
    result = {"framework": arguments.framework, "file": arguments.file, "keys": keys, "remarks": lines}
    text = "".join(f"# {line}\n" for line in lines) + keys_as_yaml(keys)
    return Result(result, lambda: print(text, end=""))
