# SPDX-License-Identifier: Apache-2.0
"""The startup check: what the first training step would refuse, or what has no effect, before the model loads."""

from __future__ import annotations

import hashlib
import inspect
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

import mis_ext
from mis_ext.correction.collectives import gather_objects
from mis_ext.correction.config import GUARD_NAMES
from mis_ext.files import names_in_yaml
from mis_ext.hosts.groups import ALONE
from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.rollout_data import TokenLags
from mis_ext.hosts.runs import Run, all_arguments, current_run, read_argument
from mis_ext.hosts.session import Session
from mis_ext.hosts.slime_miles.hook import compute_mis_weights_with_cp, weigh_batch
from mis_ext.hosts.slime_miles.policy_loss import (
    IDS,
    OFFSETS,
    host_without_ranks,
    is_miles,
    on_host,
    policy_loss,
    refuse_missing_logits,
)
from mis_ext.keys.names import near_miss
from mis_ext.keys.reading import RunConfig
from mis_ext.keys.refusals import refuse_loss_keys
from mis_ext.keys.rows import ARGUMENTS, FLAT_KEYS
from mis_ext.scoring.backend import wants_triton
from mis_ext.tools.explain.words import steps_of


class _EntryPoint(NamedTuple):
    """A flag with which the framework calls a function of ours, and the loss type that does."""

    argument: str
    name: str
    function: Any
    loss_type: str

    @property
    def flag(self) -> str:
        return f"--{self.argument.replace('_', '-')}"


_HOOK = _EntryPoint(
    "custom_tis_function_path", "mis_ext.compute_mis_weights_with_cp", compute_mis_weights_with_cp, "policy_loss"
)
_LOSS = _EntryPoint("custom_loss_function_path", "mis_ext.policy_loss", policy_loss, "custom_loss")
_ROLLOUT_FLAG = "--rollout-data-postprocess-path"
_PREPARE = f"{_ROLLOUT_FLAG} mis_ext.prepare_rollout"


def check_setup(args: Any) -> None:
    """Check every key before training starts, call once what the framework will call, and print what will run.

    For ``--custom-megatron-init-path mis_ext.check_setup``. slime, vime, and Miles call it on every rank of Megatron,
    before the model loads. Where ranks of ``torch.distributed`` have met, all of them have to call it: they exchange
    their errors and what they have installed. Rank 0 prints what will run, a line for each warning, and one for what
    could not be called. The call is on two short drawn responses on a CPU, and leaves nothing behind.

    Args:
        args: The framework's arguments, with the keys of mis_ext among them.

    Raises:
        ValueError: A flag or key is wrong or without effect, or the framework would call no function of mis_ext.
        TypeError: A key has the wrong type.
        ImportError: A path names no module.
        AttributeError: A module has no such function.
        RuntimeError: Some ranks raise one of these and others do not, or mis_ext is not the same on all of them.
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
    entry = _entry_point(args)
    run = current_run(args, whole_loss=entry is _LOSS)
    config = run.config
    if entry is _HOOK:
        refuse_loss_keys(all_arguments(args))
    if not is_miles() and read_argument(args, "rollout_temperature") == 0:
        raise ValueError("rollout_temperature must be in (0, inf), got 0: slime divides logits by it")
    _refuse_missing_rollout(args, config)
    said = [summary(config)]
    if read_argument(args, "custom_model_provider_path") == "mis_ext.model_provider":
        refuse_missing_logits(args, config)
        said.append("model_provider makes no logits: the loss and the framework's scoring passes take hidden states")
    said += [f"warning: {found}" for found in _doubts(args, config)]
    return [*said, *_unread_keys(args), *_rehearse(args, entry, config)]


# --- the entry point: which function of ours the framework will call


def _entry_point(args: Any) -> _EntryPoint:
    """The one function of ours that the framework will call."""
    loss_type = read_argument(args, "loss_type") or _HOOK.loss_type
    if loss_type not in (_HOOK.loss_type, _LOSS.loss_type):
        raise _not_called(f"--loss-type {loss_type} calls no function of mis_ext")
    entry = _HOOK if loss_type == _HOOK.loss_type else _LOSS
    if entry is _HOOK and not (read_argument(args, "use_tis") or read_argument(args, "get_mismatch_metrics")):
        raise _not_called(
            "neither use_tis nor get_mismatch_metrics is true. To measure only, give --get-mismatch-metrics; "
            "use_tis: false in the file of --custom-config-path overrides --use-tis"
        )
    path = read_argument(args, entry.argument)
    if path is None:
        raise _not_called(f"{entry.flag} is not set")
    try:
        found = inspect.unwrap(_function_at(path))
    except (ImportError, AttributeError) as error:
        raise type(error)(f"{entry.flag} {path}: {error}") from error
    if found is not entry.function:
        wrapped = "a function of yours that calls it passes with functools.wraps"
        raise _not_called(f"{entry.flag} {path} is not {entry.name} ({wrapped})")
    return entry


def _not_called(why: str) -> ValueError:
    return ValueError(
        f"mis_ext would not be called: {why}. To correct, give --use-tis {_HOOK.flag} {_HOOK.name}, or --loss-type "
        f"{_LOSS.loss_type} {_LOSS.flag} {_LOSS.name}; slime ignores a misspelt flag without a message"
    )


def _function_at(path: str) -> Any:
    """The function that a dotted path names, as the frameworks find it."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


# --- keys that need a launch


def _refuse_missing_rollout(args: Any, config: RunConfig) -> None:
    """Refuse keys that need the whole rollout where no function sees it; Miles passes that function ``args`` alone."""
    path = read_argument(args, "rollout_data_postprocess_path")
    of_prompts = config.group and config.group.needs_rollout
    is_ours, is_prepared = str(path).startswith("mis_ext."), str(path).endswith(".prepare_rollout")
    is_counted = config.correction.staleness and (config.whole_loss is None or config.whole_loss.has_correction)
    generates = read_argument(args, "custom_generate_function_path") or read_argument(args, "load_debug_rollout_data")
    refused = {
        f"{_ROLLOUT_FLAG} {path}: Miles passes no rollout data to it; remove the flag": (
            is_miles() and is_ours and not config.correction.staleness
        ),
        f"{of_prompts}: Miles passes no rollout data; remove it": is_miles() and of_prompts,
        f"{of_prompts}: {path} does nothing for it: give {_PREPARE}": of_prompts and is_ours and not is_prepared,
        "mis_staleness: use_opd has the teacher's log-probs where versions are stored; unset one of them": (
            is_counted and read_argument(args, "use_opd")
        ),
        "mis_staleness: the framework's own generate function stores no version of each token: give "
        "--custom-generate-function-path mis_ext.rollout.generate": is_counted and not generates,
        f"mis_staleness: needs {_PREPARE}, which counts the lags": is_counted and path is None,
    }
    for why, is_wrong in refused.items():
        if is_wrong:
            raise ValueError(why)


def _doubts(args: Any, config: RunConfig) -> Iterator[str]:
    """Warnings about functions of the user that may leave something out, and about the schedule of weight updates."""
    given, correction, group = all_arguments(args), config.correction, config.group
    generates, interval = given.get("custom_generate_function_path"), given.get("update_weights_interval") or 1
    is_foreign = given.get("rollout_data_postprocess_path") is None and not _is_ours(generates or "mis_ext.")
    if correction.denominator == "kept" and is_foreign:
        yield (
            f"mis_denominator: kept is wrong if {generates} makes several samples of a rollout; "
            "--rollout-data-postprocess-path mis_ext.prepare_rollout refuses them"
        )
    if correction.staleness and interval > 1:
        yield (
            f"--update-weights-interval {interval}: the trainer is up to {interval - 1} rollouts ahead of the newest "
            "version, and a lag of 0 does not mean current weights"
        )
    keys, asked = given.get("on_policy_tokens"), []
    if isinstance(keys, Mapping) and keys and not given.get("load_debug_rollout_data"):
        # The function checks it.
        what = f"on_policy_tokens ({', '.join(map(str, keys))})"
        asked.append((what, "custom_generate_function_path", "mis_ext.rollout.generate"))
    if group is not None and group.needs_rollout:
        asked.append((group.needs_rollout, "rollout_data_postprocess_path", "mis_ext.prepare_rollout"))
    if group is not None and group.of_rewards and group.over != "kept":
        asked.append((group.of_rewards, "custom_reward_post_process_path", "mis_ext.group_rewards"))
    for what, argument, function in asked:
        path, flag = given.get(argument), f"--{argument.replace('_', '-')}"
        if path is None and argument in given:
            yield f"{what} does nothing unless a function of yours calls {function}: {flag} is not set"
        elif path is not None and not _is_ours(path):
            yield f"{what} does nothing unless {flag} {path} calls {function}"


def _is_ours(path: Any) -> bool:
    return str(path).startswith("mis_ext.")


def _unread_keys(args: Any) -> list[str]:
    """Keys of the file at ``--custom-config-path`` that neither mis_ext nor the framework reads.

    Both frameworks set each key as an attribute. A new one comes after all flags, of which this path is nearly the
    last in both parsers; slime's parser has ``debug_*``, ``load_debug_rollout_data`` and ``train_backend`` behind it.

    Raises:
        ValueError: The file has a key of ours twice, of which the frameworks take the last.
    """
    path = read_argument(args, "custom_config_path")
    if not path:
        return []
    names = [*args] if isinstance(args, Mapping) else [*getattr(args, "__dict__", ())]
    flags = names[: names.index("custom_config_path")] if "custom_config_path" in names else []
    try:
        keys = names_in_yaml(Path(path).read_bytes(), once=FLAT_KEYS)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        return [f"{path[:80]} cannot be read here ({why}): keys in it that nobody reads are not named"]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    known = {*flags, *ARGUMENTS, "debug_rollout_only", "debug_train_only", "padded_vocab_size"}
    unread = [key for key in keys if key not in known and not key.startswith(("sglang_", "vllm_"))]
    meant = {key: near_miss(key, flags) for key in unread}
    hints = [f"{key!a} (did you mean {flag!r}?)" if flag else ascii(key) for key, flag in meant.items()]
    said = f"keys of {path} that neither mis_ext nor the framework has, without effect unless a function of yours reads"
    return [f"warning: {said} them: {', '.join(hints)}"] * bool(hints)


def summary(config: RunConfig) -> str:
    """Describe the active configuration in one line: hook or full policy loss, weight, filters, number of metrics."""
    correction, loss = config.correction, config.whole_loss
    parts = ["the framework's loss calls compute_mis_weights_with_cp"]
    if loss is not None:
        parts = [f"policy_loss replaces the framework's loss, {loss.settings.chosen_by}"]
    if config.group is not None:
        group = config.group
        parts += [f"baseline of a prompt: {group.baseline} over {group.over}"] * bool(group.of_rewards)
        parts += ["every prompt weighs the same"] * group.prompt_mean
    if loss is not None and not loss.has_correction:
        return " | ".join([*parts, "no correction (no use_tis)"])
    if correction.metrics_only:
        parts.append("measures only")
    else:
        steps = [step for step in steps_of(correction) if step.name not in ("ratio", "result")]
        parts += [f"{step.name}: {step.formula}" for step in steps]
    return " | ".join([*parts, f"{len(correction.metric_names)} metrics train/mis_*"])


# --- nodes


def _installed() -> str:
    """Return values that must be equal on every rank, because ranks would otherwise wait forever."""
    package, read = Path(mis_ext.__file__).parent, hashlib.sha256()
    # A checkout of another commit may have the same version. What editors leave behind is hidden, or no file.
    for path in sorted([*package.rglob("*.py"), *package.glob("_presets/*.yaml")]):
        name = path.relative_to(package)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            read.update(name.as_posix().encode() + path.read_bytes())
    backend = "Triton" if wants_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu")) else "eager"
    return f"mis_ext {mis_ext.__version__}, files {read.hexdigest()[:8]}, {backend}"


def _error_of_ranks(installed: str, error: Exception | None) -> Exception | None:
    """Return the error of this rank, so that either all ranks raise one or none does.

    Other versions of mis_ext read what is exchanged here: its keys stay.
    """
    message = "" if error is None else f"{type(error).__name__}: {error}"[:2000]
    found = {"node": platform.node(), "error": message, "installed": installed}
    ranks = gather_objects(found, dist.group.WORLD)
    is_partial, differs = any(not each["error"] for each in ranks), len({each["installed"] for each in ranks}) > 1
    # For each value one rank of each node that has it.
    shown: dict[str, dict[str, str]] = {}
    for name in ["error"] * is_partial + ["installed"] * differs:
        for rank, each in enumerate(ranks):
            if each[name]:
                shown.setdefault(each[name], {}).setdefault(each["node"], f"rank {rank} on {each['node']}")
    if not shown:
        return error
    said = [f"{', '.join([*where.values()][:8])}: {value}" for value, where in shown.items()]
    said += ["install the same mis_ext on every node, and set the same MIS_EXT_BACKEND"] * differs
    differ = RuntimeError("check_setup: ranks differ; " + "; ".join(said))
    differ.__cause__ = error
    return differ


# --- the rehearsal: one call of what the framework will call, on drawn log-probs, with the run's own configuration


def _rehearse(args: Any, entry: _EntryPoint, config: RunConfig) -> list[str]:
    """Call once what the framework will call, and say what of it could not be called.

    Raises:
        ValueError: The first step would raise it; or a TypeError or ArithmeticError.
    """
    loss, path = config.whole_loss, read_argument(args, entry.argument)
    parts = {
        f"{entry.flag} {path}, only {entry.name} in it": _function_at(path) is not entry.function,
        "the framework's function for log-probs": loss is not None and loss.scoring == "host",
        f"--custom-pg-loss-reducer-function-path {loss and loss.reducer_path}": loss is not None and loss.reducer_path,
    }
    untested = [part for part, is_foreign in parts.items() if is_foreign]
    try:
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            _call_once(args, config)
    except (ValueError, TypeError, ArithmeticError):
        raise
    except Exception as error:  # Something that only the framework has: no reason to stop a run that may be right.
        untested.append(f"{entry.name} itself ({type(error).__name__}: {error})")
    return [f"not tested at start, so an error in it comes in the first step: {each}" for each in untested]


def _call_once(args: Any, config: RunConfig) -> None:
    """The hook, or the full policy loss where ``config`` has one, of two responses on one rank of a CPU.

    No session, random number, or graph of the run is touched.
    """
    session = Session(config.correction.replace(warn_only=GUARD_NAMES))
    session.rollout_seen = True  # As the function at --rollout-data-postprocess-path leaves it.
    lengths, generator = [5, 7], torch.Generator().manual_seed(0)

    def drawn(*, mean: float) -> list[Tensor]:
        return [mean + 0.1 * torch.randn(length, generator=generator) for length in lengths]

    trained, rollout = drawn(mean=-2.0), drawn(mean=-2.0)
    session.token_lags = TokenLags(rollout, [*map(torch.zeros_like, rollout)])
    batch: dict[str, Any] = {
        "rollout_log_probs": rollout,
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in lengths],
        "total_lengths": [8, 16],
        "response_lengths": lengths,
        "max_seq_lens": [16, 16] if config.is_padded else None,
    }
    loss = config.whole_loss
    if loss is None:
        weigh_batch(Run(config, session), ALONE, pg_loss=torch.zeros(12), train_log_probs=trained, **batch)
        return
    tokens = [torch.arange(8), torch.arange(16)]
    batch |= {
        "unconcat_tokens": tokens,
        "rollout_mask_sums": torch.tensor(lengths),
        "advantages": drawn(mean=0.0),
        "log_probs": None if loss.is_told_to_skip else trained,
        IDS: [each[-length:] for each, length in zip(tokens, lengths, strict=True)],
        OFFSETS: [torch.arange(length + 1) for length in lengths],
    }
    # The frameworks score the reference policy for these flags. With a critic, whose ranks have kl_coef 0, perhaps.
    has_critic = read_argument(args, "advantage_estimator") == "ppo"
    if has_critic or read_argument(args, "use_kl_loss") or read_argument(args, "kl_coef"):
        batch["ref_log_probs"] = drawn(mean=-2.0)
    run = Run(replace(config, whole_loss=replace(loss, reducer_path=None)), session)
    logits = torch.randn((2, 16, 16) if config.is_padded else (1, 24, 16), generator=generator).requires_grad_()
    on_host(batch_loss(run, host_without_ranks(run.config, ALONE), batch, logits).metrics)
