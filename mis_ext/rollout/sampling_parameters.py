# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request, and the changes that a server makes to them before it samples.

The changes are those in the sources of SGLang 0.5.23 and vLLM 0.32.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mis_ext.validation import check_bool, check_choice, check_instance, check_mapping, check_number

Server = Literal["sglang", "vllm"]

# Key: the value that changes nothing, and the legal range.
_NUMBERS: dict[str, tuple[float, float, float]] = {
    "temperature": (1.0, 0.0, math.inf),
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "repetition_penalty": (1.0, 0.0, math.inf),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "presence_penalty": (0.0, -2.0, 2.0),
}
# The effect of each penalty on the logits of tokens in the text so far.
PENALTIES = {
    "repetition_penalty": "it scales the logits of tokens that occur in the {} by their sign",
    "frequency_penalty": "it lowers logits by the count of each token sampled so far",
    "presence_penalty": "it lowers the logits of tokens sampled so far",
}
_RETURN_KEPT = "return_top_p_token_ids"

# These keys forbid tokens depending on earlier tokens, by a grammar, a list, or code of the user.
_GRAMMARS = (
    *("json_schema", "regex", "ebnf", "structural_tag", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
)
# For these keys an empty object is a grammar too: it allows any JSON, and nothing but JSON.
_SCHEMAS = ("json_schema", "guided_json")
_PROCESSORS = (
    *("min_new_tokens", "min_tokens", "allowed_token_ids", "bad_words", "thinking_token_budget"),
    *("custom_logit_processor", "logits_processors", "watermark", "watermarking", "beam_width", "use_beam_search"),
    "trace_decode_token_ids",
)

# These keys define when to stop, what to return, or the prompt. They do not change probabilities.
_HARMLESS = frozenset(
    (
        *("n", "seed", "sampling_seed", "max_new_tokens", "max_tokens", "max_completion_tokens", "stop"),
        *("stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
        *("no_stop_trim", "include_stop_str_in_output", "detokenize", "truncate_prompt_tokens", "stream"),
        *("stream_interval", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "user"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_token_ids"),
        *("return_tokens_as_token_ids", "return_meta_info", "return_sampling_mask", "sampling_logprobs_mode"),
        *("model", "messages", "prompt", "text", "input_ids", "token_ids", "rid", "request_id", "priority", "tools"),
        *("image_data", "audio_data", "video_data", "features", "return_prompt_token_ids", "return_text_in_logprobs"),
        *("return_input_ids_in_sglext", "return_output_ids_in_sglext"),
        *("parallel_tool_calls", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("add_special_tokens", "logprob_token_ids", "cache_salt", "session_id", "repetition_detection"),
        *("routed_experts_start_len", "routed_experts_prompt_start", "return_weight_versions"),
        *("continue_final_message", "separate_reasoning", "return_hidden_states", "return_routed_experts"),
    )
)
# Conditions under which these tools may become a grammar.
_DOUBTFUL_TOOLS: dict[Server, str] = {
    "sglang": "tools: they become a grammar if SGLANG_TOOL_STRICT_LEVEL is above 0",
    "vllm": "tools: they become a grammar with --tool-strict-level, or if the tool parser requires it",
}
# Keys that chat and completions read from the model's generation_config.json (get_default_sampling_params of SGLang
# 0.5.23, get_diff_sampling_param of vLLM 0.32.0), and the flag that disables this.
_DEFAULTS: dict[Server, tuple[tuple[str, ...], str]] = {
    "sglang": (("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), "--sampling-defaults openai"),
    "vllm": (
        (*("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), "presence_penalty", "frequency_penalty"),
        "--generation-config vllm",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """Parameters that change the probability of a token; the defaults change nothing.

    Attributes:
        temperature: Divides the logits; 0 selects the most probable token.
        top_p: Keep the most probable tokens up to this mass, in (0, 1].
        top_k: Keep this number of most probable tokens; None keeps all.
        min_p: Keep tokens of at least this share of the largest probability, in [0, 1].
        logit_bias: Values that are added to the logits, by token id.
        penalties: ``name=value`` of each penalty for repeating tokens.
        grammars: ``name=value`` of each grammar or schema that the text must follow.
        processors: ``name=value`` of all other keys that forbid tokens or change logits.
        returns_kept_ids: slime's ``custom_params.return_top_p_token_ids``: its SGLang then returns the kept ids, and
            log-probs renormalized over them.
        unknown: Unknown keys of the request.
        offers_tools: The model may call a tool, and the server may create a grammar from the tools.
        doubts: Settings that depend on flags of the server, one line each.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    penalties: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    returns_kept_ids: bool = False
    unknown: tuple[str, ...] = ()
    offers_tools: bool = False
    doubts: tuple[str, ...] = ()

    @classmethod
    def from_request(cls, request: Mapping[str, Any], *, server: Server) -> SamplingParameters:
        """Return the parameters that the server uses for this request.

        An absent or null key has its neutral value here. In an OpenAI-style request it is also a doubt: send all of
        temperature, top_p, top_k, min_p and repetition_penalty, or disable the model's defaults (SGLang
        ``--sampling-defaults openai``, vLLM ``--generation-config vllm``).

        Args:
            request: The decoded JSON: a body of any endpoint, or only its ``sampling_params``.
            server: The server of the request.

        Raises:
            ValueError: A value is outside its range.
            TypeError: A value has a wrong type.
        """
        check_choice("server", server, get_args(Server))
        # None: only the sampling parameters are given, without the body.
        api = "openai" if "messages" in request or "prompt" in request else None
        around: dict[str, Any] = {}
        # A chat has its parameters in the body itself, where this key is unknown.
        if "sampling_params" in request and "messages" not in request:
            around = {key: value for key, value in request.items() if key != "sampling_params" and value is not None}
            api, request = "generate", check_mapping("sampling_params", request["sampling_params"] or {})
        given = {key: value for key, value in request.items() if value is not None}
        numbers, top_k = _read_numbers(given), _read_top_k(given)
        custom = check_mapping("custom_params", given.get("custom_params", {}))
        returns_kept_ids = check_bool(f"custom_params.{_RETURN_KEPT}", custom.pop(_RETURN_KEPT, False))
        grammars = _asked_grammars(given)
        known = {*_NUMBERS, *_GRAMMARS, *_PROCESSORS, *_HARMLESS, "top_k", "logit_bias", "tool_choice", "custom_params"}
        unknown = {*map(str, given.keys() - known), *(f"custom_params.{key}" for key in custom)}
        # SGLang's processors and adapters are in the body, outside of the parameters. Other keys in the body may be
        # ignored by the server. So they are unknown unless the parameters have the same value.
        elsewhere = around.keys() - _HARMLESS - {*_PROCESSORS}
        unknown |= {str(key) for key in elsewhere if given.get(key) != around[key]}
        doubts: list[str] = []
        logit_bias = _read_logit_bias(given.get("logit_bias", {}))
        if server == "vllm" and api == "openai":
            # SamplingParams.from_optional; /inference/v1/generate does not.
            logit_bias = {key: max(-100.0, min(100.0, bias)) for key, bias in logit_bias.items()}
        elif server == "vllm" and api is None and any(abs(bias) > 100.0 for bias in logit_bias.values()):
            doubts.append("logit_bias beyond 100: read as in /inference/v1/generate; pass the whole request")
        tools = check_instance("tools", given.get("tools", []), (list, tuple))
        offers_tools = bool(tools) and given.get("tool_choice") != "none"
        if offers_tools:
            grammars += _tool_grammars(given, server)
            if not grammars:
                doubts.append(_DOUBTFUL_TOOLS[server])
        keys, flag = _DEFAULTS[server]
        absent = [key for key in keys if key not in given]
        if api == "openai" and absent:
            doubts.append(
                f"{', '.join(absent)}: not in the request, so the server reads them from the model's "
                f"generation_config.json, unless it was started with {flag}"
            )
        return cls(
            temperature=_temperature(numbers["temperature"], server),
            top_p=numbers["top_p"],
            top_k=top_k,
            min_p=numbers["min_p"],
            logit_bias=tuple(sorted((key, bias) for key, bias in logit_bias.items() if bias != 0.0)),
            penalties=tuple(f"{key}={numbers[key]:g}" for key in PENALTIES if numbers[key] != _NUMBERS[key][0]),
            grammars=tuple(grammars),
            processors=tuple(
                f"{key}={each[key]!r}" for key in _PROCESSORS for each in (given, around) if each.get(key)
            ),
            returns_kept_ids=returns_kept_ids and server == "sglang",
            unknown=tuple(sorted(unknown)),
            offers_tools=offers_tools,
            doubts=tuple(doubts),
        )


def _read_numbers(given: Mapping[str, Any]) -> dict[str, float]:
    numbers = {
        key: check_number(key, given.get(key, neutral), low=low, high=high)
        for key, (neutral, low, high) in _NUMBERS.items()
    }
    if not math.isfinite(numbers["temperature"]):
        raise ValueError("temperature must be finite, got inf")
    for key in ("top_p", "repetition_penalty"):
        if numbers[key] == 0.0:
            raise ValueError(f"{key} must be above 0, got 0")
    return numbers


def _read_top_k(given: Mapping[str, Any]) -> int | None:
    top_k = given.get("top_k", -1)
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"top_k must be a whole number, at least 1, or 0 or -1 for all tokens, got {top_k!r}")
    if top_k < -1:
        raise ValueError(f"top_k must be at least 1, or 0 or -1 for all tokens, got {top_k!r}")
    return top_k if top_k > 0 else None


def _asked_grammars(given: Mapping[str, Any]) -> list[str]:
    """The grammars that the request itself names, ``tool_choice`` among them."""
    grammars = [
        f"{key}={given[key]!r}"
        for key in _GRAMMARS
        if (given.get(key) or (key in _SCHEMAS and given.get(key) == {})) and given[key] != {"type": "text"}
    ]
    # The server creates a grammar from the tools if the request forces a call.
    if given.get("tool_choice", "auto") not in ("auto", "none"):
        grammars.append(f"tool_choice={given['tool_choice']!r}")
    return grammars


def _read_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    # Keys in JSON are strings.
    for key in value:
        if not str(key).isdecimal():
            raise ValueError(f"keys of logit_bias must be token ids, integers of at least 0, got {key!r}")
    return {int(key): check_number(f"logit_bias[{key}]", bias, low=-1e30, high=1e30) for key, bias in value.items()}


def _tool_grammars(given: Mapping[str, Any], server: Server) -> list[str]:
    """The grammars that a server creates from the offered tools, as with ``tool_choice: required``.

    Sources: vLLM 0.32.0 (``DelegatingParser.adjust_request``) and SGLang 0.5.23
    (``FunctionCallParser.get_structure_constraint``).
    """
    functions = (tool.get("function") for tool in given["tools"] if isinstance(tool, Mapping))
    is_strict = any(isinstance(function, Mapping) and function.get("strict") is True for function in functions)
    found = ["tools with strict=True"] if is_strict else []
    if server == "vllm" and given.get("parallel_tool_calls") is False:
        found.append("tools with parallel_tool_calls=False")
    return found


def _temperature(value: float, server: Server) -> float:
    """The temperature that the server uses (``SamplingParams.__post_init__`` of both): at 0 it is greedy."""
    if server == "sglang":
        return 0.0 if value < 1e-6 else value
    return 0.01 if 0.0 < value < 0.01 else value
