# SPDX-License-Identifier: Apache-2.0
"""What users of the package may have written down: by kind, a name a line, as ``tests/data/inventory.txt`` holds it.

``python tests/inventory.py`` adds what is new to that file; a line leaves it only by hand. Where it can be, a kind is
read where a user meets it, so that code may move: in errors, which say what is known, in the parser of the command, in
what is printed. Of a class, what a page or an example uses counts, and its fields.
"""

import asyncio
import json
import re
import sys
import tempfile
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))
from commands import json_of
from rollout_logs import genuine, good, write
from signatures import dotted, is_module, offered, still_called
from tiny_decoder import TinyDecoder, packed, recording_of

import mis_ext
import mis_ext.diagnosis
import mis_ext.dumps
import mis_ext.methods
import mis_ext.onpolicy
import mis_ext.rollout
from mis_ext.cli import main as mis_ext_command

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "inventory.txt"
Names = Iterable[str]

HOW = ("error", "warn")
LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss", "use_tis": True}
WRONG = "no such word"


def told(call: Callable[[], Any]) -> list[str]:
    """What the error of a wrong name, or of a wrong word, says that there is."""
    try:
        call()
    except (TypeError, ValueError) as error:
        for pattern, between in ((r"Known: (.*)", ", "), (r" must be one of (.*?), got", " | "), (r"are (.*)", ", ")):
            if found := re.search(pattern, str(error)):
                return found[1].split(between)
        if "must be true or false" in str(error):
            return ["true", "false"]
    return []


def _load(**keys: Any) -> Callable[[], Any]:
    return lambda: mis_ext.config_from_mapping(keys)


def _start(**keys: Any) -> Callable[[], Any]:
    return lambda: mis_ext.check_setup(Namespace(**LOSS | keys))


def yaml_keys() -> Iterator[str]:
    """Every key, and the words that may stand behind it."""
    for key in told(_load(tis_no=None)):
        yield key
        words = told(_start(**{key: WRONG}) if key.startswith("mis_loss_") else _load(**{"use_rs": False, key: WRONG}))
        yield from (f"{key}: {word}" for word in words if key != "mis_loss_method")
    yield from (f"mis_guard: {{{guard}: {how}}}" for guard in told(_load(mis_guard={WRONG: 1})) for how in HOW)
    yield from (
        f"mis_metrics: {word}" for word in ("all", "core") if mis_ext.config_from_mapping({"mis_metrics": word})
    )
    host = Namespace(args=Namespace(on_policy_tokens={WRONG: 1}), sample=None, sampling_params={}, state=None)
    for key in told(lambda: asyncio.run(mis_ext.rollout.generate(Namespace(**vars(host), evaluation=False)))):
        yield f"on_policy_tokens: {key}"


def native_keys() -> Iterator[str]:
    """The keys below ``mis:``, and the words behind them."""
    for key in told(_load(mis={WRONG: 1})):
        yield key
        yield from (f"{key}: {word}" for word in told(_load(mis={"weight": {}, key: WRONG})))
    for key in told(_load(mis={"weight": {WRONG: 1}})):
        yield f"weight: {key}"
        yield from (f"weight: {key}: {word}" for word in told(_load(mis={"weight": {key: WRONG}})))
    for key in told(_load(mis={"gates": [{WRONG: 1}]})):
        yield f"gates: {key}"
        yield from (f"gates: {key}: {word}" for word in told(_load(mis={"gates": [{"high": 2.0, key: WRONG}]})))


class _Asked(dict[str, Any]):
    """``args`` that notes what it is asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def host_flags() -> Names:
    """Arguments of the hosts that a run honours or refuses."""
    args = _Asked(use_tis=True)
    mis_ext.session_for(args)
    return args.names


def methods() -> Iterator[str]:
    """Each method, and its parameters with their defaults, their words, and what is legal."""
    for name, row in mis_ext.methods.METHODS.items():
        yield name
        yield from (f"{name}: {parameter}: {value}" for parameter, value in row.defaults.items())
        for parameter, legal in row.legal.items():
            yield f"{name}: {parameter} in {legal}"
            yield from (f"{name}: {parameter}: {word}" for word in legal.split(" | ") if re.fullmatch("[a-z_]+", word))


def metrics() -> Iterator[str]:
    """Of the hook, whatever it does, and of the whole loss."""
    for config in _configs():
        yield from config.metric_names
    rows, ones = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    log_probs = {f"{policy}_logprobs": rows for policy in ("current", "proximal", "behavior", "reference")}
    given = log_probs | {"advantages": ones, "response_mask": ones, "entropy": ones}
    args = {"use_tis": True, "mis_guard": "warn", "use_kl_loss": True, "entropy_coef": 0.1, "use_opsm": True}
    yield from mis_ext.policy_loss_from_log_probs(args, **given).metrics
    streams = {f"{name}log_probs": [*rows] for name in ("", "rollout_")}
    lengths = {"total_lengths": [3], "response_lengths": [2], "loss_masks": [*ones]}
    logged: dict[str, float] = {}
    wandb = Namespace(run=True, define_metric=lambda *_, **__: None, log=logged.update)
    with patch.dict(sys.modules, wandb=wandb):
        mis_ext.log_mismatch(None, 0, streams | lengths)
    yield from logged


def _configs() -> Iterator[mis_ext.CorrectionConfig]:
    gates = (mis_ext.Gate(high=2.0), mis_ext.Gate(reduce="sum", high=2.0), mis_ext.Gate(reduce="mean", high=2.0))
    vetoes = [mis_ext.Gate(reduce="min", low=1e-4), mis_ext.Gate(reduce="max", high=1e4)]
    vetoes += [
        mis_ext.Gate(statistic=f"{whose}_probability", reduce="min", low=1e-6) for whose in ("proximal", "behavior")
    ]
    vetoes += [mis_ext.Gate(reduce="sum", low=0.5, high=2.0, target_accept=0.9, name="adapting")]
    both = {"normalize_over": "kept", "denominator": "kept", "metrics": "all"}
    yield mis_ext.CorrectionConfig(metrics_only=True, weight=None, metrics="all", staleness=True)
    for mode in mis_ext.BOUNDS:
        yield mis_ext.CorrectionConfig(weight=mis_ext.Weight(mode=mode), gates=(*gates, *vetoes), **both)
    for statistic, reduce in product(mis_ext.STATISTICS, ("token", "sum", "mean", "max", "min")):
        high = 0.9 if mis_ext.STATISTICS[statistic].high == 1.0 else 2.0
        gate = mis_ext.Gate(statistic=statistic, reduce=reduce, high=high)
        yield mis_ext.CorrectionConfig(weight=None, gates=(gate,), metrics="all")


def causes() -> Names:
    """What the diagnosis may name."""
    return mis_ext.diagnosis.CAUSES


def commands() -> Iterator[str]:
    """What pip installs and Python runs; each command, with its arguments, flags and their choices."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    yield from (f"pip install mis_ext[{name}]" for name in re.findall(r"^([\w-]+) = ", extras, flags=re.MULTILINE))
    yield from (f"command {line}" for line in re.findall(r'^[\w-]+ = "mis_ext[\w.]*:\w+"', project, flags=re.MULTILINE))
    if is_module("mis_ext.__main__"):
        yield "python -m mis_ext"
    parsers: list[ArgumentParser] = []
    parse = ArgumentParser.parse_args
    noted = lambda self, *_: parsers.append(self) or parse(self, ["x"])  # noqa: E731
    with patch.object(ArgumentParser, "parse_args", noted), redirect_stderr(StringIO()), suppress(SystemExit):
        mis_ext_command([])
    (choices,) = (action.choices for action in parsers[0]._actions if action.dest == "command")
    for name, parser in {"": parsers[0], **choices}.items():
        command = f"mis-ext {name}".strip()
        yield command
        for action in parser._actions:
            for spelt in action.option_strings or [str(action.metavar or action.dest)]:
                yield f"{command} {spelt}"
                yield from (f"{command} {spelt} {choice}" for choice in action.choices or () if name)


def documents() -> Iterator[str]:
    """The keys of what each command prints with ``--json``, and of a saved recording."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dump, recording, verl = folder / "run.jsonl", folder / "a.pt", folder / "verl.yaml"
        rows = [[-0.5, -1.0, -2.0], [-0.5, -1.25, -2.0]]
        samples = [dict(zip(WRITTEN, rows, strict=False), rollout_id=step, group_id=0, reward=1.0) for step in range(2)]
        dump.write_text("".join(json.dumps(each) + "\n" for each in samples))
        recording_of(TinyDecoder(), packed()).save(recording)
        verl.write_text("rollout_is: token\nrollout_is_threshold: 3.0\n")
        calls = write(folder, *good(), genuine("generate_abort"))
        for arguments in (
            ["audit", dump],
            ["report", dump, "--against", dump, "--preset", "mis"],
            ["diff", recording, recording],
            ["check-rollouts", calls, "--policy", "split", "--samples", folder / "samples.jsonl"],
            *map(str.split, ("explain mis", "presets", "presets mis", "methods", "methods gspo")),
            ["convert", "verl", verl],
        ):
            for path in sorted(set(_keys(json_of(*arguments)[1]))):
                yield f"mis-ext {arguments[0]} --json: {path}"
        for line in (folder / "samples.jsonl").read_text().splitlines():
            yield from (f"mis-ext check-rollouts --samples: {key}" for key in json.loads(line))
        yield from (f"Recording.save: {key}" for key in torch.load(recording))


DATA = re.compile(r"(^|\.)(keys|parameters|legal|outputs|inputs)\.")
"""Below these stand names that the document's subject has."""


def _keys(found: Any, path: str = "") -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            # The number of a step is no name.
            here = f"{path}{'0' if key.isdecimal() else key}"
            if not DATA.search(here):
                yield here
                yield from _keys(value, f"{here}.")
    elif isinstance(found, list):
        for value in found:
            yield from _keys(value, path)


WRITTEN: dict[str, Any] = {
    "log_probs": [-1.0, -2.0],
    "rollout_log_probs": [-1.5, -2.5],
    "loss_masks": [1, 0],
    "response_lengths": 2,
    "total_lengths": 3,
    "tokens": [5, 6, 7],
    "rollout_token_ids": [6, 7],
    "weight_versions": ["3"],
    "train_weight_version": "4",
    "sample_indices": 8,
    "advantages": [0.5, 0.5],
    "rewards": 1.0,
    "group_indices": 9,
    "rollout_id": 3,
}
"""A row of a dump in its longest spelling."""
OTHERS = {
    "log_prob": "log_probs",
    "rollout_log_prob": "rollout_log_probs",
    "loss_mask": "loss_masks",
    "response_length": "response_lengths",
    "total_length": "total_lengths",
    "token": "tokens",
    "rollout_token_id": "rollout_token_ids",
    "weight_version": "weight_versions",
    "sample_index": "sample_indices",
    "index": "sample_indices",
    "advantage": "advantages",
    "reward": "rewards",
    "group_index": "group_indices",
    "group_id": "group_indices",
    "step": "rollout_id",
}


def columns() -> Iterator[str]:
    """The keys of a row of a dump that change what is read."""
    yield from filter(is_read, (*WRITTEN, *OTHERS))


def is_read(key: str) -> bool:
    """Whether the reader takes a key of a row in the place of its longest spelling."""
    longest = OTHERS.get(key, key)
    without = {other: value for other, value in WRITTEN.items() if other != longest}
    return _sample(without) != _sample(without | {key: WRITTEN.get(longest)}) == _sample(WRITTEN)


def _sample(row: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_text(json.dumps(row))
        (sample,) = mis_ext.dumps.Dumps([path], need_tokens=False)
        return str(vars(sample) | {"path": ""})


def environment() -> Iterator[str]:
    """Variables that the package reads: whole strings of its source."""
    for file in sorted((ROOT / "mis_ext").rglob("*.py")):
        yield from re.findall(r'"((?:MIS_EXT|MISMATCH)_[A-Z_]+)"', file.read_text(encoding="utf-8"))


def anchors() -> Iterator[str]:
    """Pages, and places in them, that messages name."""
    for file in sorted((ROOT / "mis_ext").rglob("*.py")):
        yield from re.findall(r"\bdocs/[\w/]+\.md(?:#[\w-]+)?", file.read_text(encoding="utf-8"))


class Kind(NamedTuple):
    """How names are found today, and whether a recorded one is still good, where that is more than to be found."""

    found: Callable[[], Names]
    is_good: Callable[[str], bool] | None = None


def moved() -> dict[str, str]:
    """Where a page or a place in it went, from where it was."""
    lines = (ROOT / "docs" / "moved.txt").read_text(encoding="utf-8").splitlines()
    return dict((f"docs/{name}" for name in line.split()) for line in lines if not line.startswith("#"))


def is_there(anchor: str) -> bool:
    """Today, or where it went."""
    new = moved()
    page, _, place = new.get(anchor, anchor).partition("#")
    path = ROOT / new.get(page, page)
    return path.is_file() and (not place or place in {*_places(path.read_text(encoding="utf-8"))})


def _places(text: str) -> Iterator[str]:
    yield from re.findall(r'<a id="([^"]+)"', text)
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


KINDS = {
    "names in __all__": Kind(offered),
    "dotted paths and signatures": Kind(dotted, still_called),
    "keys of a YAML file": Kind(yaml_keys),
    "keys below mis:": Kind(native_keys),
    "arguments of the hosts": Kind(host_flags),
    "presets": Kind(mis_ext.list_presets),
    "methods": Kind(methods),
    "metrics": Kind(metrics),
    "causes": Kind(causes),
    "commands": Kind(commands),
    "keys of a row of a dump": Kind(columns, is_read),
    "documents and files": Kind(documents),
    "environment": Kind(environment),
    "pages that messages name": Kind(anchors, is_there),
}


def recorded() -> dict[str, list[str]]:
    """The file, by kind."""
    found: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names = found.setdefault(line.strip("[]"), [])
        elif line:
            names.append(line)
    return found


def gone(kind: str, names: Names) -> list[str]:
    """Those of the recorded names that a user no longer has."""
    find, is_good = KINDS[kind]
    if is_good is not None:
        return [name for name in names if not is_good(name)]
    today = {*find()}
    return [name for name in names if name not in today]


def main(arguments: Sequence[str] | None = None) -> None:
    """Add what is new to the file."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(arguments)
    before = recorded() if FILE.is_file() else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = [[f"[{kind}]", *sorted({*before.get(kind, ()), *row.found()})] for kind, row in KINDS.items()]
    FILE.write_text("\n\n".join("\n".join(block) for block in blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
