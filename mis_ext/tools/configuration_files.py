# SPDX-License-Identifier: Apache-2.0
"""Read configuration files, and write files that run published methods, for the report and the command line."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mis_ext.correction.config import CorrectionConfig
from mis_ext.files import read_yaml
from mis_ext.keys.reading import config_from_mapping, flat_keys, is_whole_loss, keys_as_yaml, read_config
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import as_correction
from mis_ext.methods.method import Method
from mis_ext.methods.published import PublishedMethod
from mis_ext.validation import errors_of

NO_CORRECTION = CorrectionConfig(metrics_only=True, weight=None)
"""Measures and changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The content of a configuration file, and facts about the method in it.

    Attributes:
        config: The correction.
        loss: The full policy loss, with the framework flags of the file; None without a key of the loss.
        said: Warnings from reading the file.
        about: Facts about a published method by title; empty without a method.
    """

    config: CorrectionConfig
    loss: LossSettings | None = None
    said: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)


def read_file(path: str | Path) -> Configuration:
    """Read a YAML file: a correction, or with a key of the full policy loss also that loss.

    With ``mis_loss_method``, keys of a correction need ``use_tis: true`` in the file.
    """
    content = read_yaml(path)
    with errors_of(str(path)):
        return _configuration(content)


def read_method(row: PublishedMethod) -> Configuration:
    """Return the content of :func:`method_yaml` for this row."""
    flags, keys = _flags_and_keys(row)
    return dataclasses.replace(_configuration(keys), about=_about(row, flags, method=row.method, parameters={}))


def _configuration(content: dict[str, Any]) -> Configuration:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = read_config(content, whole_loss=is_whole_loss(content))
    said = tuple(dict.fromkeys(str(each.message) for each in caught))
    config, loss = run.correction, None if run.whole_loss is None else run.whole_loss.settings
    if loss is None or loss.method is None:
        return Configuration(config=config, loss=loss, said=said)
    if run.double_correction is not None:
        if config.stops("double_correction"):
            raise ValueError(run.double_correction)
        said += (run.double_correction,)
    chosen, row = loss.method, find_method(loss.method.name)
    changed = {name: value for name, value in chosen.parameters if value != row.defaults[name]}
    about = _about(row, _whole_loss_flags(chosen.method), method=chosen.method, parameters=changed)
    return Configuration(config=config, loss=loss, said=said, about=about)


def method_yaml(row: PublishedMethod) -> str:
    """Return a file that runs a method with its defaults, with keys of a correction if possible, else of the loss."""
    flags, keys = _flags_and_keys(row)
    remarks = _remarks(row, flags)
    if "use_tis" in keys and any(gate.action == "reject" for gate in config_from_mapping(keys).all_gates.values()):
        remarks["Denominator"] = "rejected tokens count in the framework's; mis_denominator: kept removes them."
    comment = "\n".join(
        textwrap.fill(f"{title}: {text}", 118, break_on_hyphens=False) for title, text in remarks.items()
    )
    return f"{textwrap.indent(comment, '# ')}\n{keys_as_yaml(keys)}"


def _flags_and_keys(row: PublishedMethod) -> tuple[str, dict[str, Any]]:
    """Return the framework flags for a method with its defaults, and the keys of its file."""
    try:
        found = as_correction(row.method)
    except ValueError:
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in row.defaults.items()}
        return _whole_loss_flags(row.method), {"mis_loss_method": {"name": row.name} | values}
    dual = "" if found.dual is None else f" --eps-clip-c {found.dual:g}"
    flags = (
        "--use-tis --custom-tis-function-path mis_ext.compute_mis_weights_with_cp "
        f"--eps-clip {found.low:g} --eps-clip-high {found.high:g}{dual}"
    )
    return flags, flat_keys(found.config)


def _whole_loss_flags(method: Method) -> str:
    flags = ["--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"]
    if "proximal" not in method.policies:
        flags.append("--use-rollout-logprobs")
    if "reference" in method.policies:
        flags.append("--use-kl-loss --kl-loss-coef 0 --ref-load MODEL")
    return " ".join(flags)


def _remarks(row: PublishedMethod, flags: str) -> dict[str, str]:
    remarks = {
        "What": " ".join(row.text.partition("\n\n")[0].split()),
        "Formula": row.formula,
        "Source": row.paper,
        "Flags": flags,
    }
    if row.method.needs_state_values:
        remarks["Needs"] = "state_values in the batch of make_loss_func; slime and Miles have none."
    return remarks


def _about(row: PublishedMethod, flags: str, *, method: Method, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return facts about a method with its parameters."""
    changed = [f"{name}={value} (default {row.defaults[name]})" for name, value in parameters.items()]
    more = {"Parameters": ", ".join(changed) or "the defaults", "Log-probs": ", ".join(method.policies)}
    return _remarks(row, flags) | more
