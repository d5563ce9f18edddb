"""Token ids of prompts and observations, such that no token that was sampled is ever tokenized again."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from mis_ext.rollout.generation import Tokenizer

# Stands for an assistant's turn, to find where the template's text after such a turn begins.
_MARK = "\N{REFERENCE MARK}assistant\N{REFERENCE MARK}"


class ChatTokenizer(Tokenizer, Protocol):
    """A Hugging Face tokenizer with a chat template."""

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """The conversation as the template renders it."""
        ...


@functools.cache
def load_tokenizer(checkpoint: str, chat_template_path: str | None, host: str | None) -> ChatTokenizer:
    """The tokenizer of a checkpoint, by the host's own loader, which may repair it; kept for the next call.

    Args:
        checkpoint: Directory or name, the hosts' ``hf_checkpoint``.
        chat_template_path: File with a chat template in place of the checkpoint's, Miles' flag of that name.
        host: The framework whose ``<host>.utils.processing_utils.load_tokenizer`` is used; None: transformers'.
    """
    if host is not None:
        load = importlib.import_module(f"{host}.utils.processing_utils").load_tokenizer
        options = {} if chat_template_path is None else {"chat_template_path": chat_template_path}
        return cast(ChatTokenizer, load(checkpoint, trust_remote_code=True, **options))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    if chat_template_path is not None:
        tokenizer.chat_template = Path(chat_template_path).read_text()
    return cast(ChatTokenizer, tokenizer)


def template_options(args: Any, sample: Any, *, evaluation: bool) -> dict[str, Any]:
    """What the chat template takes besides messages: ``apply_chat_template_kwargs`` and the tools of the sample.

    Args:
        args: The host's.
        sample: Its own ``apply_chat_template_kwargs`` come before those of the host.
        evaluation: Those of the sample's evaluation dataset come before those of the host; slime has such.

    Raises:
        ValueError: The sample may be of several datasets, whose options differ.
    """
    options = dict(getattr(sample, "apply_chat_template_kwargs", None) or _host_options(args, sample, evaluation) or {})
    tools = sample.metadata.get("tools")
    return options if tools is None else {**options, "tools": tools}


def _host_options(args: Any, sample: Any, evaluation: bool) -> Mapping[str, Any] | None:
    general: Mapping[str, Any] | None = getattr(args, "apply_chat_template_kwargs", None)
    datasets = getattr(args, "eval_datasets", None) if evaluation else None
    # A sample does not name its dataset, but has what the dataset puts into it.
    found = {dataset.name: _dataset_options(dataset, general) for dataset in datasets or () if _is_of(sample, dataset)}
    for name, options in found.items():
        first, expected = next(iter(found.items()))
        if options != expected:
            raise ValueError(
                f"apply_chat_template_kwargs of the evaluation datasets {first} ({expected}) and {name} ({options}) "
                f"differ, and sample {sample.index} may be of both: give each a metadata_overrides of its own"
            )
    return next(iter(found.values()), general)


def _dataset_options(dataset: Any, general: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    own: Mapping[str, Any] | None = getattr(dataset, "apply_chat_template_kwargs", None)
    return general if own is None else own


def _is_of(sample: Any, dataset: Any) -> bool:
    """Whether the sample has what the host puts into each sample of a dataset."""
    function = getattr(dataset, "custom_generate_function_path", None)
    metadata: bool = dataset.inject_metadata(sample.metadata) == sample.metadata
    return metadata and function == getattr(sample, "generate_function_path", None)


def encode_prompt(
    tokenizer: ChatTokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    template_options: Callable[[], Mapping[str, Any]],
) -> list[int]:
    """Token ids of a sample's prompt: a text as it stands, messages through the chat template.

    Args:
        tokenizer: The model's.
        prompt: A text, to which the host has applied the template, or messages.
        template_options: Says what the chat template takes besides the messages; not asked for a text.
    """
    if not isinstance(prompt, str):
        prompt = _render(tokenizer, prompt, template_options())
    return tokenizer.encode(prompt, add_special_tokens=False)


def observation_text(
    tokenizer: ChatTokenizer,
    observation: str | Sequence[Mapping[str, Any]],
    end_id: int | None,
    template_options: Callable[[], Mapping[str, Any]],
) -> str:
    """What follows a sampled turn up to where the next one begins.

    Messages are rendered behind an assistant's turn that stands for the sampled one. The end of that turn is left out
    where the model sampled it itself.

    Args:
        tokenizer: The model's.
        observation: What the environment returned; a text is returned as it stands.
        end_id: The token with which the model ended the sampled turn; None where it sampled none.
        template_options: Says what the chat template takes besides the messages; not asked for a text.

    Raises:
        ValueError: The template does not render the turn that stands for the sampled one.
    """
    if isinstance(observation, str):
        return observation
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}, *observation]
    rendered = _render(tokenizer, turns, template_options())
    _, mark, behind = rendered.partition(_MARK)
    if not mark:
        raise ValueError(
            "the chat template does not render an assistant's content as it stands: let the environment return the "
            f"text to append, with the template's tokens, in place of messages; it rendered {rendered!r}"
        )
    return behind if end_id is None else behind.removeprefix(tokenizer.decode([end_id], skip_special_tokens=False))


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any]
) -> str:
    rendered = tokenizer.apply_chat_template(
        messages, **{"add_generation_prompt": True, **template_options, "tokenize": False}
    )
    return cast(str, rendered)
