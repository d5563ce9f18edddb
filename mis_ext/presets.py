"""Configurations from files: a YAML of the user's, one of the presets that ship, or that of a method's row."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mis_ext.correction.config import CorrectionConfig
from mis_ext.hosts.slime_miles.flat_keys import config_from_mapping
from mis_ext.hosts.slime_miles.loss_keys import loss_settings
from mis_ext.hosts.slime_miles.native_keys import NATIVE_KEY, native_keys_of
from mis_ext.loss.settings import LOSS_KEYS, LossSettings
from mis_ext.preset_files import preset_path

if TYPE_CHECKING:
    from mis_ext.methods import Preset
    from mis_ext.methods.as_correction import HookMethod


def load_config(path: str | Path) -> CorrectionConfig:
    """The configuration that a YAML file spells, in flat or native form.

    Keys outside our prefixes are the host's and are ignored, as the hosts set every key of the file on their ``args``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a mapping, or one of its values is not legal.
        TypeError: A value has the wrong type.
    """
    content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of keys to values, got {type(content).__name__}")
    try:
        return config_from_mapping(content)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from None


def load_quietly(path: str | Path) -> tuple[CorrectionConfig, tuple[str, ...]]:
    """The configuration of a file, and what it says about itself, which is then no warning.

    Raises:
        As :func:`load_config`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(path)
    return config, tuple(dict.fromkeys(str(each.message) for each in caught))


def load_loss(path: str | Path) -> LossSettings | None:
    """The whole loss that a YAML file spells, with what it says of the host's flags; None where it has no key of ours.

    Raises:
        ValueError: A value is not legal, or contradicts another one.
        TypeError: A value has the wrong type.
    """
    content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    try:
        return loss_settings(content) if any(key in content for key in LOSS_KEYS) else None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from None


def preset(name: str) -> CorrectionConfig:
    """The preset called ``name``.

    Raises:
        ValueError: There is no such preset.
    """
    return load_config(preset_path(name))


def method_yaml(row: Preset) -> str:
    """A file that runs a method with its defaults: the hook's keys where the hook can do it, else the whole loss's."""
    from mis_ext.methods.as_correction import as_correction

    try:
        flags, keys = _of_hook(as_correction(row.method))
    except ValueError:
        flags, keys = _of_whole_loss(row)
    remarks = {
        "What": " ".join(row.text.partition("\n\n")[0].split()),
        "Formula": row.formula,
        "Source": row.paper,
        "Flags": flags,
    }
    if row.method.needs_state_values:
        remarks["Needs"] = "state_values in the batch of make_loss_func; slime and Miles have none."
    if NATIVE_KEY in keys and any(gate.get("action") is None for gate in keys[NATIVE_KEY].get("gates", ())):
        remarks["Denominator"] = "rejected terms stay in the host's; denominator: kept under mis: takes them out."
    comment = "\n".join(
        textwrap.fill(f"{title}: {text}", 118, break_on_hyphens=False) for title, text in remarks.items()
    )
    content = yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=120)
    return f"{textwrap.indent(comment, '# ')}\n{content}"


def _of_hook(method: HookMethod) -> tuple[str, dict[str, Any]]:
    clip = [f"--eps-clip {method.low:g}", f"--eps-clip-high {method.high:g}"]
    if method.dual is not None:
        clip.append(f"--eps-clip-c {method.dual:g}")
    flags = f"--use-tis --custom-tis-function-path mis_ext.compute_mis_weights_with_cp {' '.join(clip)}"
    return flags, {"use_tis": True, NATIVE_KEY: native_keys_of(method.config)}


def _of_whole_loss(row: Preset) -> tuple[str, dict[str, Any]]:
    policies = row.method.policies
    flags = ["--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"]
    if "proximal" not in policies:
        flags.append("--use-rollout-logprobs")
    if "reference" in policies:
        flags.append("--use-kl-loss --kl-loss-coef 0 --ref-load MODEL")
    chosen = {"name": row.name} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in row.defaults.items()
    }
    return " ".join(flags), {"mis_loss_method": chosen}
