# SPDX-License-Identifier: Apache-2.0
"""The check at start: what the first training step would refuse, or what would do nothing, before the model loads."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

import mis_ext
from mis_ext.correction.collectives import gather_objects
from mis_ext.correction.config import GUARD_NAMES
from mis_ext.files import names_in_yaml
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.packing import TokenLags, batch_layout
from mis_ext.hosts.runs import Run, all_arguments, current_run, read_argument
from mis_ext.hosts.session import Session
from mis_ext.hosts.slime_miles.hook import compute_mis_weights_with_cp, weigh_batch
from mis_ext.hosts.slime_miles.policy_loss import (
    IDS,
    MODEL_FLAG,
    OFFSETS,
    SLIME,
    host_without_ranks,
    is_miles,
    model_provider,
    on_host,
    policy_loss,
    refuse_missing_logits,
)
from mis_ext.keys.flat import FLAT_KEYS, STRAY_KEYS
from mis_ext.keys.run_config import ARGUMENTS, RunConfig, refuse_keys_of_loss, steps_per_rollout
from mis_ext.keys.strays import method_advice, near_miss
from mis_ext.loss.settings import CHECKS, KlType
from mis_ext.scoring.backend import wants_triton
from mis_ext.tools.explain.words import steps_of
from mis_ext.validation import check_bool, check_choice, check_integer, check_number


class _Entrance(NamedTuple):
    """Where a host takes a function of ours: flag and function, and its own loss type that goes there."""

    flag: str
    name: str
    function: Any
    loss_type: str


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


_HOOK = _Entrance(
    "--custom-tis-function-path", "mis_ext.compute_mis_weights_with_cp", compute_mis_weights_with_cp, "policy_loss"
)
_LOSS = _Entrance("--custom-loss-function-path", "mis_ext.policy_loss", policy_loss, "custom_loss")
_INLINE = "base64:"
"""Begins a file's content in place of its path, in Miles."""
_SET_LATER = (
    "debug_rollout_only",
    "debug_train_only",
    "load_debug_rollout_data",
    "padded_vocab_size",
    "train_backend",
)
"""Flags behind the one of that file in slime's parser, and what it sets later."""
_SWITCHES = ("use_tis", "get_mismatch_metrics")
_OF_HOSTS = (_argument(_HOOK.flag), _argument(_LOSS.flag), *_SWITCHES)
_LAUNCHES = (
    f"give --use-tis (or --get-mismatch-metrics) {_HOOK.flag} {_HOOK.name}, or --loss-type {_LOSS.loss_type} "
    f"{_LOSS.flag} {_LOSS.name}. slime ignores a misspelt flag without a message: compare yours letter by letter"
)

_TAKEN: dict[str, tuple[str, ...]] = {
    _HOOK.flag: (_HOOK.name,),
    _LOSS.flag: (_LOSS.name,),
    "--custom-megatron-init-path": ("mis_ext.check_setup",),
    "--custom-megatron-before-train-step-hook-path": (),
    "--custom-megatron-before-log-prob-hook-path": (),
    "--rollout-data-postprocess-path": ("mis_ext.prepare_rollout", "mis_ext.log_mismatch"),
    "--custom-generate-function-path": ("mis_ext.rollout.generate",),
    "--custom-reward-post-process-path": ("mis_ext.group_rewards",),
    MODEL_FLAG: ("mis_ext.model_provider",),
}
"""Which functions of ours a flag is for."""
_CALLED_ELSEWHERE = ("--custom-generate-function-path", "--custom-reward-post-process-path")
_CALLED_HERE = [flag for flag in _TAKEN if flag not in (_HOOK.flag, _LOSS.flag, *_CALLED_ELSEWHERE)]
"""Whatever these name the host loads on this rank; others perhaps in a process that has other packages."""
_LONGEST_ERROR = 2000
_MOST_NAMED = 8
"""Of ranks, and of nodes, in one error."""


_SWITCHES_OF_HOSTS = (
    *("allgather_cp", "calculate_per_token_loss", "get_mismatch_metrics", "grpo_std_normalization", "keep_old_actor"),
    *("normalize_advantages", "observe_training_entropy", "recompute_loss_function", "rewards_normalization"),
    *("skip_actor_forward_only", "true_on_policy_mode", "use_critic", "use_dynamic_global_batch_size", "use_kl_loss"),
    *("use_opd", "use_opsm", "use_rollout_logprobs", "use_tis", "use_unbiased_kl"),
)
_COUNTS_OF_HOSTS = (
    *("context_parallel_size", "data_parallel_size", "global_batch_size", "n_samples_per_prompt"),
    *("num_steps_per_rollout", "rollout_batch_size", "tensor_model_parallel_size", "update_weights_interval"),
)
_finite = partial(check_number, low=-math.inf, high=math.inf, open_low=True, open_high=True)
_CHECKS_OF_HOSTS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_SWITCHES_OF_HOSTS, check_bool),
    **dict.fromkeys(_COUNTS_OF_HOSTS, partial(check_integer, low=1)),
    **{key: CHECKS[key][1] for key in ("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "opsm_delta")},
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "tis_clip", "tis_clip_low"), _finite),
    "kl_loss_type": partial(check_choice, choices=get_args(KlType)),
    "rollout_top_p": partial(check_number, low=0.0, high=1.0, open_low=True),
}
"""Flags of the hosts whose type or value makes a loss fail or NaN: a file can set them to anything."""


def check_setup(args: Any) -> None:
    """Check every key before training starts, call once what the host will call, and print what will run.

    For ``--custom-megatron-init-path mis_ext.check_setup``. Both hosts call it on every training rank of Megatron,
    after the process groups exist and before the model loads; with a critic also on the critic's ranks. Miles' FSDP
    backend does not call it. All have the same arguments, but not the same disk: if ranks of ``torch.distributed`` have
    met, all of them have to call it: they tell each other what they found, so an error of one node is an error of all.
    Rank 0 prints: a line that says what will run, and a line for each warning, and for what could not be tried.

    The one call, on two short drawn responses on a CPU, refuses what the first training step would refuse. It leaves
    nothing behind.

    slime ignores a flag that its parser does not know; Miles refuses it. So in slime a misspelt flag is found only if
    it leaves something missing. A misspelt key of a file is still among ``args``, and the error names it.

    Args:
        args: The host's arguments, with the keys of mis_ext among them.

    Raises:
        ValueError: A flag or key is wrong or without effect, or the host would call no function of mis_ext.
        TypeError: A key has the wrong type.
        ImportError: A path names no module.
        AttributeError: A module has no such function.
        RuntimeError: Some ranks raise one of these and others do not, or mis_ext is not the same on all of them. It
            names ranks and nodes.
    """
    said, error = [], None
    try:
        said = _checked(args)
    except Exception as found:
        error = found
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        error = _error_of_ranks(error)
    if error is not None:
        raise error
    if read_argument(args, "rank") in (None, 0):
        print("\n".join(said), flush=True)


def _checked(args: Any) -> list[str]:
    """What rank 0 says, of this rank's own findings."""
    entrance = _entrance_of(args)
    _refuse_wrong_flags(args)
    run = current_run(args, whole_loss=entrance is _LOSS)
    config = run.config
    if entrance is _HOOK:
        refuse_keys_of_loss(all_arguments(args))
    _refuse_missing_preparation(args, config)
    _refuse_missing_versions(args, config)
    said = [summary(config)]
    _refuse_wrong_paths(args)
    if _takes_hidden_states(args):
        refuse_missing_logits(args, config)
        said.append(
            "mis_ext: model_provider makes no logits: the loss and the host's scoring passes take hidden states"
        )
    # Said here, and not again in the first call.
    said += [f"mis_ext: warning: {found}" for found in config.unplugged if run.session.is_news(found)]
    said += [*_fp16_gradients(args), *_unscored_rollout(args, config), *_unread_keys(args)]
    of_prompts, path = config.group and config.group.needs_rollout, read_argument(args, "rollout_data_postprocess_path")
    if of_prompts and not str(path).startswith("mis_ext."):
        said.append(
            f"mis_ext: warning: {of_prompts} does nothing unless --rollout-data-postprocess-path {path} calls "
            "mis_ext.prepare_rollout"
        )
    generates, denominator = read_argument(args, "custom_generate_function_path"), config.correction.denominator
    if denominator == "kept" and path is None and not str(generates or "mis_ext.").startswith("mis_ext."):
        said.append(
            f"mis_ext: warning: mis_denominator: kept is wrong if {generates} makes several samples of a rollout; "
            "--rollout-data-postprocess-path mis_ext.prepare_rollout refuses them"
        )
    interval = read_argument(args, "update_weights_interval") or 1
    if config.correction.staleness and interval > 1:
        said.append(
            f"mis_ext: warning: with --update-weights-interval {interval} the trainer is up to {interval - 1} rollouts "
            "ahead of the newest version: a lag of 0 does not mean current weights"
        )
    if config.whole_loss is None and config.correction.metrics_only:
        said += _rounding_engine(args)
    return said + _rehearse(args, entrance, config)


def _installed() -> str:
    """What must be the same on every rank: others would compute or exchange something else, and wait forever."""
    package, read = Path(mis_ext.__file__).parent, hashlib.sha256()
    # A checkout of another commit may have the same version. What editors leave behind is hidden, or no file.
    for path in sorted([*package.rglob("*.py"), *package.glob("_presets/*.yaml")]):
        name = path.relative_to(package)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            read.update(name.as_posix().encode() + path.read_bytes())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "Triton" if wants_triton(device) else "eager"
    return f"mis_ext {mis_ext.__version__}, files {read.hexdigest()[:8]}, {backend}"


def _error_of_ranks(error: Exception | None) -> Exception | None:
    """What this rank has to raise, so that either all ranks raise something or none does.

    Other versions of mis_ext read what is exchanged here: its keys stay.
    """
    found = {"node": platform.node(), "error": "", "installed": ""}
    try:
        found["installed"] = _installed()
    except Exception as wrong:
        error = error or wrong
    if error is not None:
        found["error"] = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    ranks = gather_objects(found, dist.group.WORLD)
    errors, installed = ([*dict.fromkeys(each[name] for each in ranks)] for name in ("error", "installed"))
    said = [f"{_places(ranks, 'error', text)}: {text}" for text in errors if text and "" in errors]
    if len(installed) > 1:
        said += [f"{_places(ranks, 'installed', text)}: {text or 'unknown'}" for text in installed]
        said.append("install the same mis_ext on every node, and set the same MIS_EXT_BACKEND")
    if not said:
        return error
    differ = RuntimeError("check_setup: ranks differ; " + "; ".join(said))
    differ.__cause__ = error
    return differ


def _places(ranks: list[dict[str, str]], name: str, value: str) -> str:
    """The ranks that found ``value``, and their nodes; of many the first."""
    numbers = [rank for rank, found in enumerate(ranks) if found[name] == value]
    nodes = [*dict.fromkeys(ranks[rank]["node"] for rank in numbers)]
    shown = [
        ", ".join([*map(str, each[:_MOST_NAMED]), *["..."] * (len(each) > _MOST_NAMED)]) for each in (numbers, nodes)
    ]
    return f"rank {shown[0]} on {shown[1]}"


def summary(config: RunConfig) -> str:
    """What will run, in one line: hook or whole loss, weight, gates, and how many metrics."""
    correction, loss = config.correction, config.whole_loss
    parts = ["mis_ext: the host's own loss calls compute_mis_weights_with_cp"]
    if loss is not None:
        parts = [f"mis_ext: policy_loss in place of the host's loss, {loss.settings.chosen_by}"]
    if config.group is not None:
        parts.append(config.group.summary)
    if loss is not None and not loss.has_correction:
        return " | ".join([*parts, "no correction (no use_tis)"])
    if correction.metrics_only:
        parts.append("measures only")
    else:
        steps = [step for step in steps_of(correction) if step.name not in ("ratio", "result")]
        parts += [f"{step.name}: {step.formula}" for step in steps]
    return " | ".join([*parts, f"{len(correction.metric_names)} metrics train/mis_*"])


def _fp16_gradients(args: Any) -> list[str]:
    """What the host itself would do wrong with gradients in fp16.

    With a loss scale that adapts Megatron-LM switches ``check_for_nan_in_loss_and_grad`` off. slime 624b824 and Miles
    31f1ca9 then call ``prepare_grads`` before the optimizer does, and each of both divides by the scale
    (https://github.com/THUDM/slime/pull/1842).
    """
    host = "miles" if is_miles() else "slime"
    step = getattr(sys.modules.get(f"{host}.backends.megatron_utils.model"), "train_one_step", None)
    adapts = read_argument(args, "fp16") and read_argument(args, "check_for_nan_in_loss_and_grad") is False
    if not adapts or step is None or "prepare_grads" not in inspect.unwrap(step).__code__.co_names:
        return []
    return [
        f"mis_ext: warning: with --fp16 and a loss scale that adapts this {host} divides gradients by the scale twice: "
        "train/grad_norm is far too small, clipping does nothing, and Adam's epsilon shrinks updates. Give "
        "--loss-scale 65536"
    ]


def _rounding_engine(args: Any) -> list[str]:
    """What the host's engine rounds to 8 bits or fewer, where nothing corrects the loss."""
    found = [f"--sglang-quantization {value}" for value in [read_argument(args, "sglang_quantization")] if value]
    cache = read_argument(args, "sglang_kv_cache_dtype")
    found += [f"--sglang-kv-cache-dtype {cache}"] * str(cache).startswith(("fp8", "fp4"))
    folder, described = read_argument(args, "hf_checkpoint"), None
    # What is not here is the name of a model elsewhere, which the host loads by itself.
    with contextlib.suppress(OSError, ValueError):
        described = folder and json.loads((Path(folder) / "config.json").read_bytes())
    stored = described.get("quantization_config") if isinstance(described, dict) else None
    if stored:
        found.append(f"--hf-checkpoint with weights in {stored.get('quant_method', 'a quantised format')}")
    if not found:
        return []
    return [
        f"mis_ext: warning: the engine rounds ({', '.join(found)}) and nothing corrects the loss. What that costs "
        "depends on the model: look at mis_k3_kl of the first ten steps, and take yaml/mis.yaml or a finer engine"
    ]


def _unread_keys(args: Any) -> list[str]:
    """What the file at ``--custom-config-path`` has that neither mis_ext nor the host reads; or that it is not here.

    Both hosts set each key as an attribute. That of a flag keeps its place among them; a new one stands behind all
    flags, of which this path is nearly the last in both parsers.

    Raises:
        ValueError: The file has a key of ours twice, of which the hosts take the last.
    """
    path = read_argument(args, "custom_config_path") or ""
    is_inline = path.startswith(_INLINE)
    name = f"{_INLINE}..." if is_inline else path
    names = [*(args if isinstance(args, Mapping) else getattr(args, "__dict__", ()))]
    flags = names[: names.index("custom_config_path")] if "custom_config_path" in names else []
    # Some are left where the file is not here.
    keys = [
        key
        for key in names
        if (key in STRAY_KEYS or method_advice(key))
        and read_argument(args, key) is not None
        and read_argument(args, key) is not False
    ]
    said = []
    try:
        if path:
            text = base64.b64decode(path.removeprefix(_INLINE)) if is_inline else Path(path).read_bytes()
            keys = [*dict.fromkeys([*names_in_yaml(text, once=FLAT_KEYS), *keys])]
    except (OSError, yaml.YAMLError, RecursionError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        said = [f"mis_ext: {name} cannot be read here ({why}): not every key in it that nobody reads is named"]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    known = {*flags, *ARGUMENTS, *_SET_LATER}
    unread = [key for key in keys if key not in known and not key.startswith("sglang_")]
    if not unread:
        return said

    def advice(key: str) -> str:
        if ours := method_advice(key) or STRAY_KEYS.get(key):
            return f" (if it is meant for mis_ext: {ours})"
        meant = near_miss(key, keys=flags)
        return f" (did you mean {meant!r}?)" if meant else ""

    listed = ", ".join(f"{key!a}{advice(key)}" for key in unread)
    return [
        *said,
        f"mis_ext: warning: keys{f' of {name}' * bool(name)} that neither mis_ext nor the host has, without effect "
        f"unless a function of yours reads them: {listed}",
    ]


def _entrance_of(args: Any) -> _Entrance:
    """The one function of ours that the host will call."""
    loss_type = read_argument(args, "loss_type") or _HOOK.loss_type
    entrance = next((each for each in (_HOOK, _LOSS) if each.loss_type == loss_type), None)
    if entrance is None:
        raise _not_called(args, f"--loss-type {loss_type} calls no function of mis_ext")
    if entrance is _HOOK and not any(read_argument(args, switch) for switch in _SWITCHES):
        raise _not_called(args, "neither use_tis nor get_mismatch_metrics is set")
    path = read_argument(args, _argument(entrance.flag))
    if path is None:
        instead = ", so the host's own TIS would run" if entrance is _HOOK and read_argument(args, "use_tis") else ""
        raise _not_called(args, f"{entrance.flag} is not set{instead}")
    try:
        leads_to_it = _found_at(path) is entrance.function
    except (ImportError, AttributeError) as error:
        raise type(error)(f"{entrance.flag} {path}: {error}; {_LAUNCHES}") from error
    if not leads_to_it:
        raise _not_called(
            args,
            f"{entrance.flag} {path} is not {entrance.name} (your own function that calls it passes with "
            "functools.wraps)",
        )
    return entrance


def _found_at(path: str) -> Any:
    """What a dotted path leads to, found as the hosts find it, without its wrappers."""
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name)
    while (inner := inspect.unwrap(found.func if isinstance(found, partial) else found)) is not found:
        found = inner
    return found


@cache
def _taken() -> dict[str, list[Any]]:
    return {flag: [_found_at(name) for name in names] for flag, names in _TAKEN.items()}


def _refuse_wrong_flags(args: Any) -> None:
    """Refuse values of the host's flags with which its own loss or ours fails, or is NaN."""
    for flag, check in _CHECKS_OF_HOSTS.items():
        value = read_argument(args, flag)
        if value is not None:
            check(flag, value)
    temperature = read_argument(args, "rollout_temperature")
    if temperature is not None:
        # slime divides logits by it, Miles does not where it is 0.
        check_number("rollout_temperature", temperature, low=0.0, high=math.inf, open_low=not is_miles())


def _refuse_wrong_paths(args: Any) -> None:
    """Refuse a function of ours that is misspelt or stands at a flag that is not its own, however it is spelled."""
    for argument in all_arguments(args):
        path, flag = read_argument(args, argument), "--" + argument.replace("_", "-")
        if not argument.endswith("_path") or not isinstance(path, str) or not path:
            continue
        # The hosts' other paths are of files and folders.
        takes_function = argument.startswith("custom_") or argument.endswith(
            ("_function_path", "_hook_path", "_postprocess_path", "_filter_path")
        )
        if flag not in _CALLED_HERE and not (path.startswith("mis_ext.") and takes_function):
            continue
        try:
            found = _found_at(path)
        except (ImportError, AttributeError, ValueError) as error:
            if flag in _TAKEN:
                raise type(error)(f"{flag} {path}: {error}") from error
            # A file may well be named mis_ext.yaml.
            continue
        owner = str(getattr(found, "__module__", None) or getattr(found, "__name__", ""))
        if not owner.startswith("mis_ext."):
            continue
        own = [other for other, functions in _taken().items() if any(found is each for each in functions)]
        if flag not in own:
            takes = _TAKEN.get(flag, ())
            raise ValueError(
                f"{flag} {path}: the flag takes {' or '.join(takes) or 'no function of mis_ext'}"
                + "".join(f"; this one is for {other}" for other in own)
            )


def _takes_hidden_states(args: Any) -> bool:
    path = read_argument(args, _argument(MODEL_FLAG))
    return bool(path) and _found_at(path) is model_provider


def _idle_keys(args: Any) -> list[str]:
    return [key for key in FLAT_KEYS if key not in _SWITCHES and read_argument(args, key) is not None]


def _misspelt(args: Any) -> str:
    names = (name for name in all_arguments(args) if name not in (*_OF_HOSTS, *FLAT_KEYS))
    meant = {name: near_miss(name, keys=_OF_HOSTS) for name in names}
    return "".join(f"; {name!a}: did you mean {key!r}?" for name, key in meant.items() if key is not None)


def _not_called(args: Any, why: str) -> ValueError:
    ours, misspelt = _idle_keys(args), _misspelt(args)
    idle = f"; these keys would do nothing: {', '.join(ours)}" if ours else ""
    return ValueError(f"mis_ext would not be called: {why}{misspelt}{idle}; {_LAUNCHES}")


def _unscored_rollout(args: Any, config: RunConfig) -> list[str]:
    """What slime 624b824 would not have scored when the function at ``--rollout-data-postprocess-path`` looks at it."""
    needs = None if config.group is None else config.group.needs_rollout
    if needs is None or config.whole_loss is not None or SLIME not in sys.modules:
        return []
    scored_for = ("kl_coef", "get_mismatch_metrics", "use_rollout_logprobs", "use_critic", "keep_old_actor", "use_opd")
    replays, replays_rollout = (read_argument(args, f"use_{each}routing_replay") for each in ("", "rollout_"))
    is_scored = any(read_argument(args, name) for name in scored_for) or (replays and not replays_rollout)
    if is_scored or read_argument(args, "advantage_estimator") == "gspo" or steps_per_rollout(all_arguments(args)) != 1:
        return []
    return [
        f"mis_ext: warning: {needs}: with one optimizer step per rollout slime skips the pass that scores the rollout, "
        "and the first one will be refused: take several steps"
    ]


def _refuse_missing_preparation(args: Any, config: RunConfig) -> None:
    """Without any function at that flag nobody can have seen the rollout; one of the user's may call ours.

    Miles calls that function with its arguments alone, so there nobody ever has.
    """
    path = read_argument(args, "rollout_data_postprocess_path")
    of_prompts = None if config.group is None else config.group.needs_rollout
    is_ours = path is not None and path.startswith("mis_ext.")
    is_corrected = config.whole_loss is None or config.whole_loss.has_correction
    why = None
    if is_miles():
        if is_ours and not config.correction.staleness:
            why = f"--rollout-data-postprocess-path {path}: Miles passes no rollout data to it; take the flag out"
        elif of_prompts is not None:
            why = f"{of_prompts}: Miles passes no rollout data; remove it"
    elif of_prompts is not None and is_ours and not path.endswith(".prepare_rollout"):
        why = f"{of_prompts}: {path} does nothing for it: give --rollout-data-postprocess-path mis_ext.prepare_rollout"
    elif of_prompts is not None and is_corrected and path is None:
        why = f"{of_prompts}: needs --rollout-data-postprocess-path mis_ext.prepare_rollout, which is not set"
    if why is not None:
        raise ValueError(why)


def _refuse_missing_versions(args: Any, config: RunConfig) -> None:
    """Where tokens shall have lags: the rollout must store their versions, and somebody must count from them."""
    if not config.correction.staleness or (config.whole_loss is not None and not config.whole_loss.has_correction):
        return
    if read_argument(args, "use_opd"):
        raise ValueError(
            "mis_staleness: use_opd has the teacher's log-probs where versions are stored; unset one of them"
        )
    replayed = read_argument(args, "load_debug_rollout_data")
    if read_argument(args, "custom_generate_function_path") is None and not replayed:
        raise ValueError(
            "mis_staleness: the host's own generate function stores no version of each token: give "
            "--custom-generate-function-path mis_ext.rollout.generate"
        )
    path = read_argument(args, "rollout_data_postprocess_path")
    if path in (None, "mis_ext.log_mismatch"):
        raise ValueError(
            "mis_staleness: needs --rollout-data-postprocess-path mis_ext.prepare_rollout, which counts the lags"
        )


def _rehearse(args: Any, entrance: _Entrance, config: RunConfig) -> list[str]:
    """Call once what the host will call, and say what of it could not be tried.

    What drawn numbers look like is not said.

    Raises:
        ValueError: The first step would raise it; or a TypeError or ArithmeticError.
    """
    untried = []
    path, loss = read_argument(args, _argument(entrance.flag)), config.whole_loss
    module, _, name = path.rpartition(".")
    if getattr(import_module(module), name) is not entrance.function:
        untried.append(f"{entrance.flag} {path}, only {entrance.name} in it")
    if loss is not None and loss.scoring.by == "host":
        untried.append("the host's own function for log-probs")
    if loss is not None and loss.reducer_path is not None:
        untried.append(f"--custom-pg-loss-reducer-function-path {loss.reducer_path}")
    try:
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            call_once(args, config)
    except (ValueError, TypeError, ArithmeticError):
        raise
    except Exception as error:  # Something that only the host has: no reason to stop a run that may be right.
        untried.append(f"{entrance.name} itself ({type(error).__name__}: {error})")
    return [f"mis_ext: not tried at start, so an error in it comes in the first step: {each}" for each in untried]


# --- a call of what the host will call, before there is a model: on drawn log-probs, with the run's own configuration

_VOCABULARY = 16


class _Echo:
    """A group of ranks that all say what this one says; with the methods of Miles' fault-tolerant groups."""

    _replica_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any) -> _Echo:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self

    def wait(self) -> bool:
        return True


def call_once(args: Any, config: RunConfig) -> None:
    """The hook, or the whole loss where ``config`` has one, of two responses: whatever that raises is raised here.

    On a CPU and without other ranks: an echo stands for each group. No session, no random number and no graph of the
    run is touched.
    """
    correction, loss = config.correction, config.whole_loss
    session = Session(correction.replace(warn_only=GUARD_NAMES))
    # As the function at --rollout-data-postprocess-path leaves them.
    session.rollout_seen = True
    cp_size, dp_size = (read_argument(args, f"{each}_parallel_size") or 1 for each in ("context", "data"))
    groups = Groups.of_places(0, cp_size, _Echo(cp_size), 0, dp_size, _Echo(dp_size))
    # Two chunks of four tokens, and of eight, for each rank.
    total_lengths, response_lengths = [8 * cp_size, 16 * cp_size], [5, 7]
    padded = [max(total_lengths)] * 2 if config.is_padded else None
    layout = batch_layout(
        is_padded=config.is_padded,
        groups=groups,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        max_seq_lens=padded,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(0)

    def drawn(*, mean: float) -> list[Tensor]:
        values_T = mean + 0.1 * torch.randn(layout.num_local_tokens, generator=generator, dtype=torch.float32)
        return [*torch.split(values_T, [*layout.local_lengths])]

    masks = [torch.ones(length, dtype=torch.int32) for length in response_lengths]
    rollout, trained = drawn(mean=-2.0), drawn(mean=-2.0)
    session.token_lags = TokenLags(rollout, [*map(torch.zeros_like, rollout)])
    if loss is None:
        weigh_batch(
            Run(config, session),
            groups,
            pg_loss=torch.zeros(layout.num_local_tokens, dtype=torch.float32),
            train_log_probs=trained,
            rollout_log_probs=rollout,
            loss_masks=masks,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            max_seq_lens=padded,
        )
        return
    run = Run(replace(config, whole_loss=replace(loss, reducer_path=None)), session)
    tokens = [torch.randint(_VOCABULARY, (length,), generator=generator) for length in total_lengths]
    batch = {
        "total_lengths": total_lengths,
        "response_lengths": response_lengths,
        "max_seq_lens": padded,
        "unconcat_tokens": tokens,
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor(response_lengths),
        "advantages": drawn(mean=0.0),
        "log_probs": None if loss.is_told_to_skip else trained,
        "rollout_log_probs": rollout,
        IDS: [each[-length:] for each, length in zip(tokens, response_lengths, strict=True)],
        OFFSETS: [torch.arange(length + 1) for length in response_lengths],
    }
    # Both hosts score the reference policy for these flags. With a critic, whose ranks have kl_coef 0, nobody can tell.
    has_critic = read_argument(args, "advantage_estimator") == "ppo"
    if has_critic or read_argument(args, "use_kl_loss") or read_argument(args, "kl_coef"):
        batch["ref_log_probs"] = drawn(mean=-2.0)
    num_rows = [length // cp_size for length in padded or total_lengths]
    shape = (len(num_rows), num_rows[0]) if config.is_padded else (1, sum(num_rows))
    logits = torch.randn((*shape, _VOCABULARY), generator=generator, dtype=torch.float32).requires_grad_()
    on_host(batch_loss(run, host_without_ranks(run.config, groups), batch, logits).metrics)
