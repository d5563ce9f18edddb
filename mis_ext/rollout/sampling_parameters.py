# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request, and the changes that a server makes to them.

The keys that change the probability of a token, those that do not, and one table of what servers change in a request
before they sample: a row each, with the release in whose source it was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mis_ext.validation import check_bool, check_choice, check_mapping, check_number

Server = Literal["sglang", "vllm"]
SERVERS = ("sglang", "vllm")

# Key: the value that changes nothing, and the legal range.
_NUMBERS: dict[str, tuple[float, float, float]] = {
    "temperature": (1.0, 0.0, math.inf),
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "repetition_penalty": (1.0, 0.0, math.inf),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "presence_penalty": (0.0, -2.0, 2.0),
}
# What each penalty does to the logits of tokens that are in the text so far.
PENALTIES = {
    "repetition_penalty": "it scales the logits of tokens that occur in the {} by their sign",
    "frequency_penalty": "it lowers logits by the count of each token sampled so far",
    "presence_penalty": "it lowers the logits of tokens sampled so far",
}
_RETURN_KEPT = "return_top_p_token_ids"

# Each forbids tokens according to what was sampled before, by a grammar, by a list, or by code of the user.
_GRAMMARS = (
    *("json_schema", "regex", "ebnf", "structural_tag", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
)
# An empty object is one of these too: it asks for any JSON, and for nothing but JSON.
_SCHEMAS = ("json_schema", "guided_json")
_PROCESSORS = (
    *("min_new_tokens", "min_tokens", "allowed_token_ids", "bad_words", "thinking_token_budget"),
    *("custom_logit_processor", "logits_processors", "watermark", "watermarking", "beam_width", "use_beam_search"),
    "trace_decode_token_ids",
)

# Say when to stop, what to return, or what the prompt is: no token becomes more or less probable.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """Parameters that change the probability of a token; the defaults change nothing.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Keep the most probable tokens up to this mass, in (0, 1].
        top_k: Keep so many of the most probable tokens; None keeps all.
        min_p: Keep tokens of at least this share of the largest probability, in [0, 1].
        logit_bias: What is added to the logits, by token id.
        penalties: ``name=value`` of each penalty for repeating tokens.
        grammars: ``name=value`` of each grammar or schema that the text must follow.
        processors: ``name=value`` of everything else that forbids tokens or changes logits.
        returns_kept_ids: slime's ``custom_params.return_top_p_token_ids``: its SGLang then returns the kept ids, and
            log-probs that are renormalised over them.
        unknown: Keys of the request of which nothing is known here.
        offers_tools: The model may call a tool, and the server may make a grammar of the tools.
        doubts: What the request leaves to flags of the server, a line each.
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
        """Return the parameters of the server after all :data:`CHANGES` that apply to this request.

        An absent or null key has its neutral value here, and in an OpenAI-style request it is a doubt: send all of
        temperature, top_p, top_k, min_p and repetition_penalty, or turn the model's defaults off (SGLang
        ``--sampling-defaults openai``, vLLM ``--generation-config vllm``).

        Args:
            request: The decoded JSON: a body of any endpoint, or the ``sampling_params`` of one alone.
            server: The server that it was sent to.

        Raises:
            ValueError: A value outside its range.
            TypeError: A value of another type.
        """
        check_choice("server", server, SERVERS)
        api: _Api = "openai" if "messages" in request or "prompt" in request else None
        around: dict[str, Any] = {}
        # A chat has its parameters in the body itself: there the key is an unknown one.
        if "sampling_params" in request and "messages" not in request:
            around = {key: value for key, value in request.items() if key != "sampling_params" and value is not None}
            api, request = "generate", check_mapping("sampling_params", request["sampling_params"] or {})
        given = {key: value for key, value in request.items() if value is not None}
        numbers = {
            key: check_number(key, given.get(key, neutral), low=low, high=high)
            for key, (neutral, low, high) in _NUMBERS.items()
        }
        if not math.isfinite(numbers["temperature"]):
            raise ValueError("temperature must be finite, got inf")
        for key in ("top_p", "repetition_penalty"):
            if numbers[key] == 0.0:
                raise ValueError(f"{key} must be above 0, got 0")
        custom = check_mapping("custom_params", given.get("custom_params", {}))
        returns_kept_ids = check_bool(f"custom_params.{_RETURN_KEPT}", custom.pop(_RETURN_KEPT, False))
        top_k = given.get("top_k", -1)
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise TypeError(f"top_k must be a whole number, at least 1, or 0 or -1 for all tokens, got {top_k!r}")
        if top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 for all tokens, got {top_k!r}")
        grammars = [
            f"{key}={given[key]!r}"
            for key in _GRAMMARS
            if (given.get(key) or (key in _SCHEMAS and given.get(key) == {})) and given[key] != {"type": "text"}
        ]
        # The server makes a grammar from the tools where the call is not left to the model.
        if given.get("tool_choice", "auto") not in ("auto", "none"):
            grammars.append(f"tool_choice={given['tool_choice']!r}")
        known = {*_NUMBERS, *_GRAMMARS, *_PROCESSORS, *_HARMLESS, "top_k", "logit_bias", "tool_choice", "custom_params"}
        unknown = {*map(str, given.keys() - known), *(f"custom_params.{key}" for key in custom)}
        # SGLang's processors and adapters stand around the parameters. Whatever else stands there and not among these
        # may be ignored, or may not: unless it says the same, it is as good as unknown.
        elsewhere = around.keys() - _HARMLESS - {*_PROCESSORS}
        unknown |= {str(key) for key in elsewhere if given.get(key) != around[key]}
        on_its_way = _OnItsWay(
            given=given,
            api=api,
            temperature=numbers["temperature"],
            logit_bias=_read_logit_bias(given.get("logit_bias", {})),
            grammars=grammars,
            doubts=[],
        )
        for change in CHANGES:
            if change.server == server:
                change.make(on_its_way)
        return cls(
            temperature=on_its_way.temperature,
            top_p=numbers["top_p"],
            top_k=top_k if top_k > 0 else None,
            min_p=numbers["min_p"],
            logit_bias=tuple(sorted((key, bias) for key, bias in on_its_way.logit_bias.items() if bias != 0.0)),
            penalties=tuple(f"{key}={numbers[key]:g}" for key in PENALTIES if numbers[key] != _NUMBERS[key][0]),
            grammars=tuple(grammars),
            processors=tuple(
                f"{key}={each[key]!r}" for key in _PROCESSORS for each in (given, around) if each.get(key)
            ),
            returns_kept_ids=returns_kept_ids and server == "sglang",
            unknown=tuple(sorted(unknown)),
            offers_tools=on_its_way.offers_tools,
            doubts=tuple(on_its_way.doubts),
        )


def _read_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    # JSON has no integers as keys.
    return {int(key): check_number(f"logit_bias[{key}]", bias, low=-1e30, high=1e30) for key, bias in value.items()}


# "openai": chat and completions; None: the sampling parameters came without the body around them.
_Api = Literal["openai", "generate", None]


@dataclass(kw_only=True, slots=True)
class _OnItsWay:
    """A request between its arrival and the sampler: ``given`` is as it came, the rest is what the changes write."""

    given: Mapping[str, Any]
    api: _Api
    temperature: float
    logit_bias: dict[int, float]
    grammars: list[str]
    doubts: list[str]

    @property
    def offers_tools(self) -> bool:
        return bool(self.given.get("tools")) and self.given.get("tool_choice") != "none"

    def doubt_absent(self, keys: Sequence[str], flag: str) -> None:
        absent = [key for key in keys if key not in self.given]
        if self.api == "openai" and absent:
            self.doubts.append(
                f"{', '.join(absent)}: not in the request, so the server reads them from the model's "
                f"generation_config.json, unless it was started with {flag}"
            )

    def doubt_tools(self, why: str) -> None:
        if self.offers_tools and not self.grammars:
            self.doubts.append(f"tools: {why}")

    def has_strict_tool(self) -> bool:
        functions = (tool.get("function") for tool in self.given["tools"] if isinstance(tool, Mapping))
        return any(isinstance(function, Mapping) and function.get("strict") is True for function in functions)


_Make = Callable[[_OnItsWay], None]


class Change(NamedTuple):
    """Change of a request by a server before it samples.

    Attributes:
        server: Which one.
        release: In whose source this was read.
        source: Where in its source.
        says: What it does, one sentence.
        make: Does it.
    """

    server: Server
    release: str
    source: str
    says: str
    make: _Make


CHANGES: list[Change] = []
"""All that is known of this kind, in the order in which it is made. ``docs/reference/rollout.md`` has it as a table."""
_RELEASES: dict[Server, str] = {"sglang": "0.5.23", "vllm": "0.32.0"}


def _change(server: Server, source: str, says: str) -> Callable[[_Make], _Make]:
    def register(make: _Make) -> _Make:
        CHANGES.append(Change(server, _RELEASES[server], source, says, make))
        return make

    return register


@_change("sglang", "SamplingParams.__post_init__", "A temperature below 1e-6 selects the most probable token.")
def _greedy_where_cold(request: _OnItsWay) -> None:
    if request.temperature < 1e-6:
        request.temperature = 0.0


@_change(
    "vllm",
    "SamplingParams.__post_init__",
    "A temperature above 0 and below 0.01 becomes 0.01; only 0 selects the most probable token.",
)
def _warm_where_cold(request: _OnItsWay) -> None:
    if 0.0 < request.temperature < 0.01:
        request.temperature = 0.01


@_change(
    "vllm",
    "SamplingParams.from_optional",
    "Chat and completions clamp `logit_bias` to -100 and 100; `/inference/v1/generate` does not.",
)
def _clamp_bias(request: _OnItsWay) -> None:
    if request.api == "openai":
        request.logit_bias = {key: max(-100.0, min(100.0, bias)) for key, bias in request.logit_bias.items()}
    elif request.api is None and any(abs(bias) > 100.0 for bias in request.logit_bias.values()):
        request.doubts.append("logit_bias beyond 100: read as in /inference/v1/generate; pass the whole request")


@_change(
    "vllm",
    "DelegatingParser.adjust_request",
    "Tools become a grammar where one has `strict: true` or `parallel_tool_calls` is false, as with `required`.",
)
def _grammar_of_tools(request: _OnItsWay) -> None:
    if not request.offers_tools:
        return
    if request.has_strict_tool():
        request.grammars.append("tools with strict=True")
    if request.given.get("parallel_tool_calls") is False:
        request.grammars.append("tools with parallel_tool_calls=False")
    request.doubt_tools("a grammar is made of them under --tool-strict-level, or if the tool parser wants one")


@_change(
    "sglang",
    "FunctionCallParser.get_structure_constraint",
    "Tools become a grammar where one has `strict: true`, as with `required`.",
)
def _grammar_of_strict_tools(request: _OnItsWay) -> None:
    if request.offers_tools and request.has_strict_tool():
        request.grammars.append("tools with strict=True")
    request.doubt_tools("a grammar is made of them where SGLANG_TOOL_STRICT_LEVEL is above 0")


@_change(
    "vllm",
    "ModelConfig.get_diff_sampling_param",
    "Chat and completions read absent keys from the model's `generation_config.json`: a doubt with their names.",
)
def _defaults_of_vllm(request: _OnItsWay) -> None:
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    request.doubt_absent(keys, "--generation-config vllm")


@_change(
    "sglang",
    "ModelConfig.get_default_sampling_params",
    "Chat and completions read absent keys from the model's `generation_config.json`: a doubt with their names.",
)
def _defaults_of_sglang(request: _OnItsWay) -> None:
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    request.doubt_absent(keys, "--sampling-defaults openai")
