"""What a request asked of the sampler, as far as it changes the probability of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mis_ext.validation import check_bool, check_choice, check_mapping, check_number

Server = Literal["sglang", "vllm"]
SERVERS = ("sglang", "vllm")

# Below these the servers take the most probable token.
_GREEDY_BELOW = {"sglang": 1e-6, "vllm": 1e-5}

# Key: the value that changes nothing, and the legal range.
_NUMBERS: dict[str, tuple[float, float, float]] = {
    "temperature": (1.0, 0.0, math.inf),
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "repetition_penalty": (1.0, 0.0, math.inf),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "presence_penalty": (0.0, -2.0, 2.0),
}
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

_RETURN_KEPT = "return_top_p_token_ids"

# Each forbids tokens according to what was sampled before, by a grammar, by a list, or by code of the user.
_GRAMMARS = (
    *("json_schema", "regex", "ebnf", "structural_tag", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
)
_PROCESSORS = (
    *("min_new_tokens", "min_tokens", "allowed_token_ids", "bad_words", "thinking_token_budget"),
    *("custom_logit_processor", "logits_processors", "watermark", "beam_width", "use_beam_search"),
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
        *("model", "messages", "prompt", "text", "input_ids", "rid", "request_id", "priority", "tools"),
        *("parallel_tool_calls", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("routed_experts_start_len", "routed_experts_prompt_start", "return_weight_versions"),
        *("continue_final_message", "separate_reasoning", "return_hidden_states", "return_routed_experts"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """What changes the probability of a token; the defaults change nothing.

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

    @classmethod
    def from_request(cls, request: Mapping[str, Any], *, server: Server) -> SamplingParameters:
        """The parameters of a request: SGLang's ``sampling_params``, or the body of an OpenAI-style request.

        A key that is absent or null has its neutral value here. The servers take the model's ``generation_config.json``
        for such keys in OpenAI-style requests (SGLang ``--sampling-defaults openai`` and vLLM ``--generation-config
        vllm`` turn that off): send all of temperature, top_p, top_k and min_p.

        Args:
            request: The decoded JSON.
            server: The server that it was sent to.

        Raises:
            ValueError: A value outside its range.
            TypeError: A value of another type.
        """
        check_choice("server", server, SERVERS)
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
        is_greedy = numbers["temperature"] < _GREEDY_BELOW[server]
        known = {*_NUMBERS, *_GRAMMARS, *_PROCESSORS, *_HARMLESS, "top_k", "logit_bias", "tool_choice", "custom_params"}
        custom = check_mapping("custom_params", given.get("custom_params", {}))
        returns_kept_ids = check_bool(f"custom_params.{_RETURN_KEPT}", custom.pop(_RETURN_KEPT, False))
        unknown = {*map(str, given.keys() - known), *(f"custom_params.{key}" for key in custom)}
        return cls(
            temperature=0.0 if is_greedy else numbers["temperature"],
            top_p=numbers["top_p"],
            top_k=_read_top_k(given.get("top_k", -1)),
            min_p=numbers["min_p"],
            logit_bias=_read_logit_bias(given.get("logit_bias", {})),
            penalties=tuple(f"{key}={numbers[key]:g}" for key in _PENALTIES if numbers[key] != _NUMBERS[key][0]),
            grammars=_read_grammars(given),
            processors=tuple(f"{key}={given[key]!r}" for key in _PROCESSORS if given.get(key)),
            returns_kept_ids=returns_kept_ids and server == "sglang",
            unknown=tuple(sorted(unknown)),
        )


def _read_top_k(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"top_k must be a whole number, at least 1, or 0 or -1 for all tokens, got {value!r}")
    if value < -1:
        raise ValueError(f"top_k must be at least 1, or 0 or -1 for all tokens, got {value!r}")
    return value if value > 0 else None


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    # JSON has no integers as keys.
    largest = 1e30
    biases = {
        int(key): check_number(f"logit_bias[{key}]", bias, low=-largest, high=largest) for key, bias in value.items()
    }
    return tuple(sorted((key, bias) for key, bias in biases.items() if bias != 0.0))


def _read_grammars(given: Mapping[str, Any]) -> tuple[str, ...]:
    plain_text = {"type": "text"}
    names = [f"{key}={given[key]!r}" for key in _GRAMMARS if given.get(key) and given[key] != plain_text]
    # The server makes a grammar from the tools where the call is not left to the model.
    if given.get("tool_choice", "auto") not in ("auto", "none"):
        names.append(f"tool_choice={given['tool_choice']!r}")
    return tuple(names)
