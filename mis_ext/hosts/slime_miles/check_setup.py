# SPDX-License-Identifier: Apache-2.0
"""The startup check: before the model loads, find errors of the first training step and keys without effect."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

import mis_ext
from mis_ext.correction.collectives import gather_objects
from mis_ext.frameworks import find_framework
from mis_ext.hosts.megatron import MISSING, refuse_host_scoring
from mis_ext.hosts.session import all_arguments, current_run, read_argument
from mis_ext.hosts.slime_miles.hook import compute_mis_weights_with_cp
from mis_ext.hosts.slime_miles.policy_loss import is_miles, policy_loss, refuse_missing_logits
from mis_ext.hosts.whole_loss import refuse_missing
from mis_ext.keys.reading import RunConfig, unread_by, without_effect
from mis_ext.keys.rows import ARGUMENTS, near_miss
from mis_ext.scoring.backend import wants_triton
from mis_ext.tools.explain import steps_of
from mis_ext.validation import Errors

_FUNCTIONS = {
    "policy_loss": ("custom_tis_function_path", compute_mis_weights_with_cp),
    "custom_loss": ("custom_loss_function_path", policy_loss),
}
"""The argument that makes the framework call a function of mis_ext, by loss type."""
_SWITCHES = "use_tis", "get_mismatch_metrics"
_ROLLOUT, _PREPARE = "rollout_data_postprocess_path", "mis_ext.prepare_rollout"
_GENERATE, _OURS = "custom_generate_function_path", "mis_ext.rollout.generate"


def check_setup(args: Any) -> None:
    """Check every key before training starts, and print what will run.

    For ``--custom-megatron-init-path mis_ext.check_setup``. slime, vime, and Miles call it on every rank of Megatron,
    before the model loads. If ``torch.distributed`` is initialized, all ranks must call it: they exchange their errors
    and their installed versions. Rank 0 prints what will run, and a line for each warning.

    Args:
        args: The framework's arguments, with the keys of mis_ext among them.

    Raises:
        ValueError: A flag or key is wrong or has no effect, or the framework would not call mis_ext.
        TypeError: A key has the wrong type.
        ImportError: A path does not name a module.
        AttributeError: A module has no such function.
        RuntimeError: Only some ranks raise one of these errors, or mis_ext is not the same on all ranks.
    """
    said, installed, error = [], "", None
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    try:
        installed = _installed() if has_ranks else ""
        said = _checked(args)
    except Exception as found:
        error = found
    if has_ranks:
        error = _error_of_ranks(installed, error)
    if error is not None:
        raise error
    if read_argument(args, "rank") in (None, 0):
        print("\n".join(f"mis_ext: {line}" for line in said), flush=True)


def _checked(args: Any) -> list[str]:
    """Check this rank and return the lines that rank 0 prints."""
    given = all_arguments(args)
    config = current_run(args, whole_loss=_called_by(args) == "custom_loss").config
    loss = config.whole_loss
    if loss is None:
        # Without loss_type the first step does not report them, because prepare_rollout reads them for a custom loss.
        Errors().refuse(without_effect([unread_by("policy_loss")], given)).raise_all()
    else:
        # The frameworks score the reference policy for these flags, and perhaps with a critic, whose ranks have kl_coef
        # 0.
        has_reference = given.get("use_kl_loss") or given.get("kl_coef") or given.get("advantage_estimator") == "ppo"
        refuse_missing(loss.settings, {"behavior", *["reference"] * bool(has_reference)}, MISSING)
    if not is_miles() and given.get("rollout_temperature") == 0:
        raise ValueError("rollout_temperature must be in (0, inf), got 0: slime divides logits by it")
    doubts, said = [*_doubts(given, config)], [_summary(config)]
    if read_argument(args, "custom_model_provider_path") == "mis_ext.model_provider":
        refuse_missing_logits(args, config)
        said.append("model_provider makes no logits: the loss and the framework's scoring passes use hidden states")
    if loss is not None and find_framework() is None:
        refuse_host_scoring(config)
    return [*said, *(f"warning: {found}" for found in (*doubts, *_unread_keys(args)))]


# --- the entry point


def _called_by(args: Any) -> str:
    """The loss type, which determines the function of mis_ext that the framework calls."""
    loss_type = read_argument(args, "loss_type") or "policy_loss"
    argument, function = _FUNCTIONS.get(str(loss_type), ("loss_type", None))
    path, flag = read_argument(args, argument), _flag(argument)
    if function is None:
        why = f"{flag} {loss_type} calls no function of mis_ext"
    elif loss_type == "policy_loss" and not any(read_argument(args, switch) for switch in _SWITCHES):
        why = "neither use_tis nor get_mismatch_metrics is true (a file with use_tis: false overrides --use-tis)"
    elif path is None:
        why = f"{flag} is not set"
    else:
        module, _, name = str(path).rpartition(".")
        try:
            found = inspect.unwrap(getattr(import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise type(error)(f"{flag} {path}: {error}") from error
        if found is function:
            return loss_type
        why = f"{flag} {path} is not mis_ext.{function.__name__} (a function that calls it needs functools.wraps)"
    raise ValueError(
        f"mis_ext would not be called: {why}. To correct, set --use-tis --custom-tis-function-path "
        "mis_ext.compute_mis_weights_with_cp, or --loss-type custom_loss --custom-loss-function-path "
        "mis_ext.policy_loss; slime silently ignores a misspelled flag"
    )


def _flag(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


# --- keys that need a launch


def _doubts(given: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Warn of custom functions and of the schedule of weight updates; raise for keys that no function reads."""
    correction, group, path, generates = config.correction, config.group, given.get(_ROLLOUT), given.get(_GENERATE)
    interval, tokens = given.get("update_weights_interval") or 1, given.get("on_policy_tokens")
    if is_miles() and group.needs_rollout:
        raise ValueError(f"{group.needs_rollout}: Miles passes no rollout data; remove the key")
    if is_miles() and _is_ours(path) and not correction.staleness:
        raise ValueError(f"{_flag(_ROLLOUT)} {path}: Miles passes no rollout data to it; remove the flag")
    if correction.staleness and given.get("use_opd"):
        raise ValueError("mis_staleness and use_opd use the same field, teacher_log_probs: unset one of them")
    if correction.denominator == "kept" and path is None and generates is not None and not _is_ours(generates):
        shared = f"mis_denominator: kept is wrong if {generates} makes several samples of a rollout"
        yield f"{shared}; {_flag(_ROLLOUT)} {_PREPARE} refuses them"
    if correction.staleness and interval > 1:
        ahead = f"--update-weights-interval {interval}: the trainer is up to {interval - 1} rollouts ahead"
        yield f"{ahead} of the newest version, and a lag of 0 does not mean current weights"
    # Keys, the argument of the function that may read them, and the function of mis_ext that reads them.
    needs = []
    if correction.staleness:
        needs += [("mis_staleness", _ROLLOUT, _PREPARE), ("mis_staleness", _GENERATE, _OURS)]
    if group.needs_rollout:
        needs.append((group.needs_rollout, _ROLLOUT, _PREPARE))
    if group.of_rewards and group.over != "kept":
        needs.append((group.of_rewards, "custom_reward_post_process_path", "mis_ext.group_rewards"))
    if isinstance(tokens, Mapping) and tokens:
        needs.append((f"on_policy_tokens ({', '.join(map(str, tokens))})", _GENERATE, _OURS))
    for keys, argument, function in needs:
        path = given.get(argument)
        if argument == _GENERATE and given.get("load_debug_rollout_data"):
            continue  # Nothing is generated.
        # log_mismatch has the same flag as prepare_rollout, and does not call it. A rollout function may generate.
        if path in (None, "mis_ext.log_mismatch") and not keys.startswith("on_policy_tokens"):
            raise ValueError(f"{keys} needs {_flag(argument)} {function}")
        if not _is_ours(path):
            caller = "a custom function" if path is None else f"{_flag(argument)} {path}"
            yield f"{keys} has no effect unless {caller} calls {function}"


def _is_ours(path: Any) -> bool:
    return str(path).startswith("mis_ext.")


def _unread_keys(args: Any) -> list[str]:
    """Keys of the file at ``--custom-config-path`` that neither mis_ext nor the framework reads.

    Both frameworks set each key as an attribute. New attributes come after all flags. This path is nearly the last flag
    in both parsers; in slime, ``debug_*``, ``load_debug_rollout_data`` and ``train_backend`` follow it.
    """
    path, names = read_argument(args, "custom_config_path"), [*getattr(args, "__dict__", ())]
    if not path or "custom_config_path" not in names:
        return []
    try:
        keys = yaml.safe_load(Path(path).read_bytes()) or {}
    except (OSError, yaml.YAMLError):
        return []  # The framework has read it, possibly on another node.
    flags = names[: names.index("custom_config_path")]
    known = {*flags, *ARGUMENTS, "debug_rollout_only", "debug_train_only", "padded_vocab_size"}
    unread = [str(key) for key in keys if key not in known and not str(key).startswith(("sglang_", "vllm_"))]
    hints = [f"{key!a}{near_miss(key, flags)}" for key in unread]
    said = f"keys of {path} that neither mis_ext nor the framework has, without effect unless a custom function reads"
    return [f"{said} them: {', '.join(hints)}"] * bool(hints)


def _summary(config: RunConfig) -> str:
    """Describe the active configuration in one line: hook or full policy loss, weight, filters, number of metrics."""
    correction, loss, group = config.correction, config.whole_loss, config.group
    hook = "the framework's loss calls compute_mis_weights_with_cp"
    parts = [hook if loss is None else f"policy_loss replaces the framework's loss, {loss.settings.chosen_by}"]
    parts += [f"baseline of a prompt: {group.baseline} over {group.over}"] * bool(group.of_rewards)
    parts += ["every prompt has the same weight"] * group.prompt_mean
    if loss is not None and not loss.has_correction:
        return " | ".join([*parts, "no correction (no use_tis)"])
    parts += [f"{step.name}: {step.formula}" for step in steps_of(correction) if step.name != "ratio"]
    parts += ["measures only"] * correction.metrics_only
    return " | ".join([*parts, f"{len(correction.metric_names)} metrics train/mis_*"])


# --- nodes


def _installed() -> str:
    """Return values that must be equal on every rank; otherwise ranks would wait forever."""
    package, read = Path(mis_ext.__file__).parent, hashlib.sha256()
    # A checkout of another commit may have the same version. Skip files of editors: they are hidden, or not regular
    # files.
    for path in sorted([*package.rglob("*.py"), *package.glob("_presets/*.yaml")]):
        name = path.relative_to(package)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            read.update(name.as_posix().encode() + path.read_bytes())
    backend = "Triton" if wants_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu")) else "eager"
    return f"mis_ext {mis_ext.__version__}, files {read.hexdigest()[:8]}, {backend}"


def _error_of_ranks(installed: str, error: Exception | None) -> Exception | None:
    """Return the error of this rank, so that either all ranks raise one or none does.

    Other versions of mis_ext read these messages, so their keys must not change.
    """
    message = "" if error is None else f"{type(error).__name__}: {error}"[:2000]
    found = {"node": platform.node(), "error": message, "installed": installed}
    ranks = gather_objects(found, dist.group.WORLD)
    is_partial, differs = any(not each["error"] for each in ranks), len({each["installed"] for each in ranks}) > 1
    # For each value, one rank of each node that has it.
    places: dict[str, dict[str, int]] = {}
    for name in ["error"] * is_partial + ["installed"] * differs:
        for rank, each in enumerate(ranks):
            places.setdefault(each[name], {}).setdefault(each["node"], rank)
    said = [
        f"{', '.join(f'rank {rank} on {node}' for node, rank in where.items())}: {value}"
        for value, where in places.items()
        if value
    ]
    if not said:
        return error
    said += ["install the same mis_ext on every node, and set the same MIS_EXT_BACKEND"] * differs
    differ = RuntimeError("check_setup: ranks differ; " + "; ".join(said))
    differ.__cause__ = error
    return differ
