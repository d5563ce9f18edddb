# SPDX-License-Identifier: Apache-2.0
"""Interface to the framework: its ``args``, tokenizer, and abort flag."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from mis_ext.frameworks import Framework, find_framework
from mis_ext.rollout.custom_generate.endpoints import VLLM, endpoint_of, vllm_parameters
from mis_ext.rollout.custom_generate.routed_experts import check_replayable
from mis_ext.rollout.definition import LogProbsMode, define_log_probs
from mis_ext.rollout.generation import Tokenizer
from mis_ext.rollout.sampling_parameters import SamplingParameters
from mis_ext.validation import MismatchWarning, check_bool, check_known, check_number

KEY = "on_policy_tokens"
"""Key of the mapping in the frameworks' ``--custom-config-path`` file."""
VERSIONS = "teacher_log_probs"
"""Field of a sample with one value per response token, which both frameworks pass to the trainer like log-probs. It is
for distillation from a teacher, and otherwise unused."""
CANARY = f"{KEY}_canary"
"""Key in ``sample.train_metadata`` of the canary's verdict on the engines. The report reads it in dumps."""
Messages = Sequence[Mapping[str, Any]]
Environment = Callable[[Any, str], Awaitable[str | Messages | None]]
# These flags need fields that are not filled here. Training without them would be silently wrong.
_UNSUPPORTED_FLAGS = (
    "use_rollout_indexer_replay",
    "use_sampling_support_replay",
    "rollout_top_logprobs_num",
    "use_score_centering",
)
_LORA_FLAGS = ("lora_rank", "lora_adapter_path")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The mapping under :data:`KEY`.

    Attributes:
        environment: Dotted path of ``async def step(sample, text)``, called with the text of each turn of the model. It
            returns the next messages (role and content, as in chat templates), a text that is appended unchanged, or
            None at the end of the conversation. Without an environment there is one turn.
        max_turns: Turns of the model, 1 to 10,000. A longer conversation is truncated.
        max_attempts: Attempts of a request while the server does not respond, 1 to 1,000, one second apart.
        cache_by_version: Whether a request sends the version of the weights as ``extra_key``, so that SGLang's prefix
            cache only returns values of the same version. The version is read from the engines before each request.
        canary: The reaction if an engine scores a fixed text exactly as with an earlier version: ``"warn"`` or
            ``"stop"``. None: no check.
    """

    environment: str | None = None
    max_turns: int = 16
    max_attempts: int = 60
    cache_by_version: bool = False
    canary: Literal["warn", "stop"] | None = None

    def __post_init__(self) -> None:
        for name, high in (("max_turns", 10_000), ("max_attempts", 1_000)):
            value = getattr(self, name)
            check_number(f"{KEY}.{name}", value, low=1, high=high)
            if not isinstance(value, int):
                raise TypeError(f"{KEY}.{name} must be an integer in [1, {high}], got {value!r}")
        if self.environment is not None and (not isinstance(self.environment, str) or "." not in self.environment):
            raise ValueError(f"{KEY}.environment must be a dotted path such as my_agent.step, got {self.environment!r}")
        check_bool(f"{KEY}.cache_by_version", self.cache_by_version)
        if self.canary not in (None, "warn", "stop"):
            raise ValueError(f"{KEY}.canary must be warn or stop, got {self.canary!r}")

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """The settings in a framework's ``args``; the defaults if there are none."""
        given = getattr(args, KEY, None) or {}
        if not isinstance(given, Mapping):
            raise TypeError(f"{KEY} must be a mapping of {', '.join(f.name for f in fields(cls))}, got {given!r}")
        check_known(f"keys under {KEY}", given, [field.name for field in fields(cls)])
        return cls(**given)

    def max_context(self, args: Any, *, evaluation: bool) -> int | None:
        """The limit of the tokens of a prompt and its response together; None, or 0 in the frameworks, for no limit.

        Raises:
            ValueError: There is an environment and no limit: the engine would refuse requests that do not fit its
                context.
        """
        training: int | None = getattr(args, "rollout_max_context_len", None) or None
        limit = (getattr(args, "eval_max_context_len", None) or training) if evaluation else training
        if self.environment is not None and limit is None:
            flag = "eval_max_context_len" if evaluation else "rollout_max_context_len"
            raise ValueError(
                f"{KEY}.environment needs {flag}, at most the context length of the engine. The engine refuses a "
                "request whose prompt and max_new_tokens together are longer"
            )
        return limit

    def load_environment(self) -> Environment | None:
        """The environment's function, or None without an environment."""
        if self.environment is None:
            return None
        module, _, name = self.environment.rpartition(".")
        try:
            step = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{KEY}.environment: {self.environment} cannot be imported: {error}") from error
        if not inspect.iscoroutinefunction(step):
            raise TypeError(f"{KEY}.environment: {self.environment} must be an async function, got {step!r}")
        return cast(Environment, step)


def stores_versions(args: Any) -> bool:
    """True if the trainer needs the version of each token."""
    return bool(getattr(args, "mis_staleness", None))


def check_supported(args: Any, sample: Any, settings: Settings) -> None:
    """Refuse flags and samples that need more than token ids, masks, log-probs, versions and experts."""
    check_replayable(args)
    for name in ("cache_by_version", "canary"):
        if getattr(settings, name) and endpoint_of(sample) is VLLM:
            raise ValueError(
                f"{KEY}.{name} needs an SGLang endpoint that vLLM lacks; remove the key. To check weights, use "
                "mis_ext.rollout.compare_weights"
            )
    if stores_versions(args) and getattr(args, "use_opd", None):
        raise ValueError("mis_staleness and use_opd use the same field, teacher_log_probs: unset one of them")
    lora = () if getattr(args, "lora_train_only", False) else _LORA_FLAGS
    for flag in (*_UNSUPPORTED_FLAGS, *lora):
        if getattr(args, flag, None):
            raise ValueError(
                f"mis_ext.rollout.generate does not support {flag} (got {getattr(args, flag)!r}): unset it, or use the "
                "framework's own generate function"
            )
    inputs = getattr(sample, "multimodal_inputs", None) or {}
    present = [name for name, value in inputs.items() if value is not None]
    if present:
        raise ValueError(f"mis_ext.rollout.generate supports text only, but the sample has {', '.join(present)}")


def render_messages(tokenizer: ChatTokenizer, args: Any, sample: Any, messages: Messages, *, evaluation: bool) -> str:
    """Render messages with the chat template, ``apply_chat_template_kwargs`` and the tools of the sample.

    Raises:
        ValueError: An evaluation dataset has other options, but a sample does not name its dataset.
    """
    general = getattr(args, "apply_chat_template_kwargs", None)
    options = getattr(sample, "apply_chat_template_kwargs", None)
    for dataset in (getattr(args, "eval_datasets", None) or ()) if evaluation and not options else ():
        own = getattr(dataset, "apply_chat_template_kwargs", None)
        if own not in (None, general):
            raise ValueError(
                f"apply_chat_template_kwargs of the evaluation dataset {dataset.name} ({own}) are not those of the run "
                f"({general}): set them in its samples"
            )
    tools = sample.metadata.get("tools")
    given = {**(options or general or {}), **({} if tools is None else {"tools": tools})}
    return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **given, "tokenize": False})


# slime's SGLang returns the kept ids under one of these.
_KEPT_IDS = ("top_p_token_ids", "top_p_kept_token_ids")


_SPECULATION = (
    "sglang_speculative_algorithm: tokens follow the log-probs only with sglang_speculative_accept_threshold_single "
    "and _acc of 1, without min_p, and not on a CPU, an XPU, or ROCm, where SGLang verifies greedily"
)


class LogProbDefinitionWarning(MismatchWarning):
    """The server's log-probs are not those of the distribution that it samples from."""


def warn_of_definition(
    args: Any, sample: object, sampling_params: Mapping[str, Any], meta_infos: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Warn, once per process and definition, if the engine's log-probs are not those of the behavior policy.

    It also warns of speculative decoding. Greedy sampling is for evaluation, so it does not warn. ``meta_infos``: those
    of existing responses with tokens.
    """
    if endpoint_of(sample) is VLLM:
        parameters = SamplingParameters.from_request(vllm_parameters(sampling_params), server="vllm")
        # vime's own default; vLLM's is raw_logprobs.
        mode: LogProbsMode = getattr(args, "vllm_logprobs_mode", None) or "processed_logprobs"
        definition = define_log_probs(parameters, server="vllm", logprobs_mode=mode)
        asks_for_kept_ids = True
    else:
        parameters = SamplingParameters.from_request(sampling_params, server="sglang")
        definition = define_log_probs(parameters, server="sglang")
        asks_for_kept_ids = parameters.returns_kept_ids
    if definition.is_greedy:
        return
    if getattr(args, "sglang_speculative_algorithm", None):
        _warn_once(_SPECULATION)
    # The kept ids were requested, but the server does not return them.
    is_ignored = asks_for_kept_ids and definition.returned.truncation is not None
    is_ignored = is_ignored and any(not any(key in meta for key in _KEPT_IDS) for meta in meta_infos)
    if is_ignored or not (definition.is_behavior and definition.is_comparable):
        _warn_once("; ".join(definition.explain()))


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, LogProbDefinitionWarning, stacklevel=4)


class ChatTokenizer(Tokenizer, Protocol):
    """A Hugging Face tokenizer with a chat template."""

    def apply_chat_template(self, conversation: Messages, **kwargs: Any) -> str:
        """The conversation, rendered by the template."""
        ...


@functools.cache
def load_tokenizer(checkpoint: str, chat_template_path: str | None, framework: Framework | None) -> ChatTokenizer:
    """The tokenizer of a checkpoint, by the framework's own loader, which may repair it. It is cached.

    ``chat_template_path`` (Miles' flag of that name): a file with a template that replaces the checkpoint's.
    """
    if framework is not None:
        load = importlib.import_module(f"{framework.name}.utils.processing_utils").load_tokenizer
        options = {} if chat_template_path is None else {"chat_template_path": chat_template_path}
        return cast(ChatTokenizer, load(checkpoint, trust_remote_code=True, **options))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    if chat_template_path is not None:
        tokenizer.chat_template = Path(chat_template_path).read_text()
    return cast(ChatTokenizer, tokenizer)


def abort_flag(args: Any, sample: object, state: Any | None) -> Callable[[], bool]:
    """A function that returns whether the framework has aborted its rollout; always False without a framework.

    The framework aborts all current requests once. An episode in its environment's turn has no request, so it needs
    this flag. Newer versions of Miles pass the ``state`` that has the flag.
    """
    if state is None:
        framework = find_framework(sample)
        rollout = None if framework is None else sys.modules.get(framework.rollout)
        if rollout is None:
            return lambda: False
        # This returns the existing instance, because the class is a singleton.
        state = rollout.GenerateState(args)
    return lambda: bool(state.aborted)
