"""What the user may set about :func:`mis_ext.rollout.generate`, and what it refuses to be used with."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from mis_ext.checks import check_known, check_number

KEY = "on_policy_tokens"
"""Key of the mapping in the hosts' ``--custom-config-path`` file."""

Observation = str | Sequence[Mapping[str, Any]] | None
Environment = Callable[[Any, str], Awaitable[Observation]]

# What these ask for travels in fields that are not filled here, and training without it would be wrong without a word.
_UNSUPPORTED_FLAGS = (
    "use_rollout_routing_replay",
    "use_rollout_indexer_replay",
    "use_sampling_support_replay",
    "rollout_top_logprobs_num",
)
_LORA_FLAGS = ("lora_rank", "lora_adapter_path")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The mapping under :data:`KEY`.

    Attributes:
        environment: Dotted path of ``async def step(sample, text)``, called with the text of each turn of the model; it
            returns the messages that come next (role and content, as chat templates take them), or a text that is
            appended as it stands, or None when the conversation is over. Without an environment there is one turn.
        max_turns: Turns of the model, 1 to 10,000; a conversation that would go on is truncated.
        max_attempts: How often a request is sent while the server does not answer, 1 to 1,000, a second apart.
    """

    environment: str | None = None
    max_turns: int = 16
    max_attempts: int = 60

    def __post_init__(self) -> None:
        for name, high in (("max_turns", 10_000), ("max_attempts", 1_000)):
            value = getattr(self, name)
            check_number(f"{KEY}.{name}", value, low=1, high=high)
            if not isinstance(value, int):
                raise TypeError(f"{KEY}.{name} must be an integer in [1, {high}], got {value!r}")
        if self.environment is not None and (not isinstance(self.environment, str) or "." not in self.environment):
            raise ValueError(f"{KEY}.environment must be a dotted path such as my_agent.step, got {self.environment!r}")

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """The settings in a host's ``args``; the defaults where there are none.

        Raises:
            TypeError: A value has another type.
            ValueError: A key is unknown or its value out of range.
        """
        given = getattr(args, KEY, None) or {}
        if not isinstance(given, Mapping):
            raise TypeError(f"{KEY} must be a mapping of {', '.join(f.name for f in fields(cls))}, got {given!r}")
        check_known(f"keys under {KEY}", given, [field.name for field in fields(cls)])
        return cls(**given)

    def max_context(self, args: Any, *, evaluation: bool) -> int | None:
        """The most tokens of a prompt and its response together, None for no limit; the hosts' 0 means none too.

        Raises:
            ValueError: There is an environment and no limit: SGLang would refuse what no longer fits its context.
        """
        training: int | None = getattr(args, "rollout_max_context_len", None) or None
        limit = (getattr(args, "eval_max_context_len", None) or training) if evaluation else training
        if self.environment is not None and limit is None:
            flag = "eval_max_context_len" if evaluation else "rollout_max_context_len"
            raise ValueError(
                f"{KEY}.environment needs {flag}, at most the context length of SGLang, which refuses a request whose "
                "prompt and max_new_tokens are longer together"
            )
        return limit

    def load_environment(self) -> Environment | None:
        """The environment's function, or None where there is no environment.

        Raises:
            TypeError: It is not an ``async def``.
        """
        if self.environment is None:
            return None
        module, _, name = self.environment.rpartition(".")
        step = getattr(importlib.import_module(module), name)
        if not inspect.iscoroutinefunction(step):
            raise TypeError(f"{KEY}.environment: {self.environment} must be an async def, got {step!r}")
        return cast(Environment, step)


def check_supported(args: Any, sample: Any) -> None:
    """Refuse what needs more than token ids, masks and log-probs.

    Raises:
        ValueError: A flag asks for it, or the sample has images, audio or video.
    """
    lora = () if getattr(args, "lora_train_only", False) else _LORA_FLAGS
    for flag in (*_UNSUPPORTED_FLAGS, *lora):
        if getattr(args, flag, None):
            raise ValueError(
                f"mis_ext.rollout.generate does not support {flag} (got {getattr(args, flag)!r}): unset it, or use the "
                "host's own generate function"
            )
    inputs = getattr(sample, "multimodal_inputs", None) or {}
    present = [name for name, value in inputs.items() if value is not None]
    if present:
        raise ValueError(f"mis_ext.rollout.generate takes text only, the sample has {', '.join(present)}")
