"""What a request asked of the sampler; from which distribution tokens were drawn, and of which their log-probs are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mis_ext.rollout.generation import MINUS_INFINITY
from mis_ext.validation import check_bool, check_choice, check_mapping, check_number

Server = Literal["sglang", "vllm"]
SamplingBackend = Literal["flashinfer", "triton", "pytorch"]
LogProbsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Who draws, the default first.
_BACKENDS: dict[Server, tuple[SamplingBackend, ...]] = {
    "sglang": ("flashinfer", "pytorch"),
    "vllm": ("flashinfer", "triton", "pytorch"),
}
# Below these the servers take the most probable token.
_GREEDY_BELOW: dict[Server, float] = {"sglang": 1e-6, "vllm": 1e-5}
# A sum of float32 probabilities may exceed 1 by so much.
_MASS_ERROR = 1e-3

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
_PENALTIES = {
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
        check_choice("server", server, _BACKENDS)
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
        grammars = [f"{key}={given[key]!r}" for key in _GRAMMARS if given.get(key) and given[key] != {"type": "text"}]
        # The server makes a grammar from the tools where the call is not left to the model.
        if given.get("tool_choice", "auto") not in ("auto", "none"):
            grammars.append(f"tool_choice={given['tool_choice']!r}")
        known = {*_NUMBERS, *_GRAMMARS, *_PROCESSORS, *_HARMLESS, "top_k", "logit_bias", "tool_choice", "custom_params"}
        unknown = {*map(str, given.keys() - known), *(f"custom_params.{key}" for key in custom)}
        return cls(
            temperature=0.0 if numbers["temperature"] < _GREEDY_BELOW[server] else numbers["temperature"],
            top_p=numbers["top_p"],
            top_k=top_k if top_k > 0 else None,
            min_p=numbers["min_p"],
            logit_bias=_read_logit_bias(given.get("logit_bias", {})),
            penalties=tuple(f"{key}={numbers[key]:g}" for key in _PENALTIES if numbers[key] != _NUMBERS[key][0]),
            grammars=tuple(grammars),
            processors=tuple(f"{key}={given[key]!r}" for key in _PROCESSORS if given.get(key)),
            returns_kept_ids=returns_kept_ids and server == "sglang",
            unknown=tuple(sorted(unknown)),
        )


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    # JSON has no integers as keys.
    biases = {int(key): check_number(f"logit_bias[{key}]", bias, low=-1e30, high=1e30) for key, bias in value.items()}
    return tuple(sorted((key, bias) for key, bias in biases.items() if bias != 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Which tokens can be drawn; the kept ones are always the most probable.

    Attributes:
        top_k: So many tokens; None: all.
        top_p: The fewest tokens that have this share of the mass.
        min_p: Tokens of at least this share of the largest probability.
        mass_of: The mass that ``top_p`` is a share of: of ``"all"`` tokens, of those within ``"top_k"``, or of those
            within both ``"top_k_and_min_p"``.
        keeps_next: Whether a token is kept before which exactly ``top_p`` of the mass lies.
        keeps_ties: Whether more tokens are kept that are as probable as the last kept one: ``"none"`` of them,
            ``"top_k"``: those as probable as the k-th, ``"all"``: also those as probable as the last within ``top_p``.
            Where only some are kept, it is those with the lowest ids.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    mass_of: Literal["all", "top_k", "top_k_and_min_p"] = "all"
    keeps_next: bool = False
    keeps_ties: Literal["none", "top_k", "all"] = "none"

    def __str__(self) -> str:
        parts = [f"top_k={self.top_k}"] if self.top_k is not None else []
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1.0 else []
        parts += [f"min_p={self.min_p:g}"] if self.min_p > 0.0 else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """The softmax of (logits + ``logit_bias``) / ``temperature``, renormalised over what ``truncation`` keeps.

    Attributes:
        temperature: Above 0.
        logit_bias: What is added to the logits, by token id.
        truncation: None keeps every token.
        unrepeatable: What else changed the logits, and why a trainer that has only logits and token ids cannot do it
            again.
    """

    temperature: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    truncation: Truncation | None = None
    unrepeatable: tuple[str, ...] = ()

    def __str__(self) -> str:
        logits = "changed logits" if self.unrepeatable else "logits"
        logits = f"{logits} + logit_bias" if self.logit_bias else logits
        if self.temperature != 1.0:
            logits = f"({logits}) / {self.temperature:g}" if self.logit_bias else f"{logits} / {self.temperature:g}"
        return f"softmax({logits}), renormalised over {self.truncation}" if self.truncation else f"softmax({logits})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """SGLang's speculative decoding, as its verification draws (EAGLE and its relatives, 0.5).

    A draft token is accepted with ``min(1, p / threshold_acc)``, and surely where ``p`` exceeds ``threshold_single``;
    with both at 1 the tokens follow the model's truncated distribution.

    Attributes:
        threshold_single: ``--speculative-accept-threshold-single``, in (0, 1].
        threshold_acc: ``--speculative-accept-threshold-acc``, in (0, 1].

    Raises:
        TypeError: A threshold is no number.
        ValueError: A threshold is out of range.
    """

    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        for name in ("threshold_single", "threshold_acc"):
            check_number(name, getattr(self, name), low=0.0, high=1.0, open_low=True)

    @property
    def unrepeatable(self) -> tuple[str, ...]:
        """Why a trainer cannot compute the probability of a token; empty if it can."""
        if self.threshold_single == self.threshold_acc == 1.0:
            return ()
        return (
            f"speculative_accept_threshold_single={self.threshold_single:g}, _acc={self.threshold_acc:g}: how likely a "
            "token is depends on what was drafted; set both to 1",
        )

    def explain(self, parameters: SamplingParameters) -> Iterator[str]:
        """What a request asks that verification does otherwise, one line each."""
        yield (
            "speculative decoding: on a CPU, an XPU, and on ROCm without rejection sampling, verification takes the "
            "most probable token: nothing is drawn there"
        )
        if parameters.min_p > 0.0:
            yield f"min_p={parameters.min_p:g}: verification ignores it; only a request's first token is drawn under it"
        if parameters.top_k is not None and parameters.top_p < 1.0:
            yield "top_k and top_p: verification takes top_p of the mass of top_k, also where SGLang else does not"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbDefinition:
    """The truth and what the server says of it; see ``define_log_probs``.

    Attributes:
        sampled: The behavior policy: the distribution that the tokens were drawn from.
        returned: The distribution whose log-probs the server returned.
        is_greedy: No token was drawn: the most probable one was taken.
        returns_logits: The numbers are logits: no log-probs, and no function of them alone gives log-probs.
        doubts: What the request left open.
    """

    sampled: Distribution
    returned: Distribution
    is_greedy: bool = False
    returns_logits: bool = False
    doubts: tuple[str, ...] = ()

    @property
    def is_behavior(self) -> bool:
        """Whether the returned numbers are the log-probs of the distribution that the tokens were drawn from."""
        return self.sampled == self.returned and not self.returns_logits

    @property
    def is_comparable(self) -> bool:
        """Whether ``trainer_log_probs(..., definition.returned)`` has the definition of the server's numbers."""
        return not self.returns_logits and not self.returned.unrepeatable

    @property
    def only_truncation_differs(self) -> bool:
        """Whether the returned log-probs lack the renormalisation over the kept tokens, and nothing else."""
        is_without = self.returned.truncation is None and not self.returns_logits
        return is_without and replace(self.sampled, truncation=None) == self.returned

    def explain(self) -> list[str]:
        """What was sampled, what was returned, and what makes the trainer's log-probs comparable; one line each."""
        sampled, returned = self.sampled, self.returned
        kind = "logits" if self.returns_logits else "log-probs"
        lines = [f"sampled from {sampled}", f"returned: {kind} of {returned}", self._how_to_compare()]
        lines += dict.fromkeys((*returned.unrepeatable, *sampled.unrepeatable))
        if self.is_greedy:
            lines.append(
                "greedy: nothing was drawn, so the ratio of trainer and behavior policy is no importance weight; "
                "sample at a temperature above 0"
            )
        elif not self.is_behavior:
            behavior = (
                "only the server can say those; start vLLM with --logprobs-mode processed_logprobs, SGLang without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
            if self.only_truncation_differs:
                behavior = (
                    f"log(mass that {sampled.truncation} keeps) is missing; have SGLang return it "
                    "(return_sampling_mask: true with a top_k of at most 4096: output_token_sampling_logprobs), or "
                    "enough top log-probs to compute it"
                )
            lines.append(f"the returned numbers are not those of the behavior policy: {behavior}")
        return [*lines, *self.doubts]

    def _how_to_compare(self) -> str:
        returned = self.returned
        if self.returns_logits:
            return (
                "logits cannot be compared: their normaliser is unknown; start vLLM with --logprobs-mode "
                "processed_logprobs"
            )
        if returned.unrepeatable:
            return "the trainer's log-probs cannot be made comparable"
        steps = ["add logit_bias to the trainer's logits"] if returned.logit_bias else []
        if returned.temperature != 1.0:
            steps.append(f"divide the trainer's logits by {returned.temperature:g} before log_softmax")
        if returned.truncation:
            steps.append(f"renormalise over the tokens that {returned.truncation} keeps")
        return (
            f"to compare: {', then '.join(steps)}"
            if steps
            else "the trainer's log_softmax(logits) is comparable as it is"
        )


def define_log_probs(
    parameters: SamplingParameters,
    *,
    server: Server,
    logprobs_mode: LogProbsMode = "raw_logprobs",
    return_original: bool = False,
    sampling_backend: SamplingBackend | None = None,
    speculation: Speculation | None = None,
) -> LogProbDefinition:
    """From which distribution the server drew, and of which one it returned the log-probs.

    SGLang 0.5 changes the logits by penalties, grammar and bias, divides by the temperature, and returns log-probs of
    the softmax of that; then it truncates by top-k, top-p and min-p and draws. vLLM (V1) returns, in its raw modes,
    numbers of the model's logits under the grammar alone, and in its processed modes those of what it drew from.

    Args:
        parameters: Of the request.
        server: ``"sglang"`` or ``"vllm"``.
        logprobs_mode: vLLM's ``--logprobs-mode``.
        return_original: Whether SGLang runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``: log-probs at temperature 1.
        sampling_backend: Who draws, which decides about tokens at the edge. SGLang's ``--sampling-backend``:
            ``"flashinfer"`` (None) or ``"pytorch"``. In vLLM ``"flashinfer"`` (None in the raw modes; with a request
            of its own seed in the batch it is Triton), ``"triton"`` (None in the processed modes) or, where there is no
            Triton and in older versions, ``"pytorch"``.
        speculation: Of SGLang, where it drafts tokens and verifies them; None where it does not.

    Raises:
        ValueError: Another server, mode or backend, or speculation of vLLM.
    """
    check_choice("server", server, _BACKENDS)
    check_choice("logprobs_mode", logprobs_mode, _MODES)
    is_raw = logprobs_mode.startswith("raw")
    # Where vLLM returns processed log-probs, it does not draw with FlashInfer.
    backends = _BACKENDS[server][1:] if server == "vllm" and not is_raw else _BACKENDS[server]
    backend = backends[0] if sampling_backend is None else check_choice("sampling_backend", sampling_backend, backends)
    if speculation is not None and server != "sglang":
        raise ValueError(f"speculation is described for sglang only, got server {server!r}")
    is_greedy = parameters.temperature == 0.0 or parameters.top_k == 1
    grammars = tuple(f"{name}: which tokens it forbids depends on the grammar's state" for name in parameters.grammars)
    counted = "prompt and response" if server == "vllm" else "response"
    penalties = (
        f"{name}: {_PENALTIES[name.partition('=')[0]].format(counted)}, another normaliser at each token, which one "
        "log-prob does not tell"
        for name in parameters.penalties
    )
    processors = (f"{name}: it changes logits inside the server" for name in parameters.processors)
    changed = Distribution(
        # At temperature 0 the servers divide by 1.
        temperature=parameters.temperature or 1.0,
        logit_bias=parameters.logit_bias,
        unrepeatable=(*grammars, *penalties, *processors),
    )
    truncation = Truncation(top_k=1) if is_greedy else _truncation(parameters, server, backend, speculation)
    sampled = replace(changed, truncation=truncation)
    doubts = [f"{key}: unknown, it may change what is sampled" for key in parameters.unknown]
    if server == "vllm":
        # A greedy request is not truncated before its log-probs are taken.
        processed = changed if parameters.temperature == 0.0 else sampled
        returned = Distribution(unrepeatable=grammars) if is_raw else processed
    else:
        # SGLang keeps the logits as they were before the watermark for the log-probs.
        reported = tuple(reason for reason in changed.unrepeatable if not reason.startswith("watermark="))
        temperature = 1.0 if return_original else changed.temperature
        returned = replace(changed, temperature=temperature, unrepeatable=reported)
        if parameters.top_k == 1 and temperature != 1.0:
            doubts.append(
                f"top_k=1: SGLang divides by temperature={temperature:g} only where the batch holds a request that is "
                "not greedy; set the temperature to 0"
            )
        if not is_greedy:
            doubts += _sglang_doubts(parameters, backend, speculation)
            if parameters.returns_kept_ids and not return_original:
                returned = replace(returned, truncation=truncation)
            if speculation is not None:
                sampled = replace(sampled, unrepeatable=(*sampled.unrepeatable, *speculation.unrepeatable))
    return LogProbDefinition(
        sampled=sampled,
        returned=returned,
        is_greedy=is_greedy,
        returns_logits=server == "vllm" and logprobs_mode.endswith("logits"),
        doubts=tuple(doubts),
    )


def _truncation(
    parameters: SamplingParameters, server: Server, backend: SamplingBackend, speculation: Speculation | None
) -> Truncation | None:
    """The set from which tokens are drawn, by top-k, top-p and min-p; None if it is the whole vocabulary."""
    min_p = parameters.min_p if speculation is None else 0.0
    kept = Truncation(top_k=parameters.top_k, top_p=parameters.top_p, min_p=min_p)
    if kept == Truncation():
        return None
    if server == "vllm":
        is_top_p_alone = kept.top_k is None and min_p == 0.0
        ties: dict[SamplingBackend, Literal["none", "top_k", "all"]]
        ties = {"flashinfer": "all", "triton": "none", "pytorch": "top_k"}
        return replace(kept, mass_of="all" if is_top_p_alone else "top_k_and_min_p", keeps_ties=ties[backend])
    if speculation is None and backend == "pytorch":
        return replace(kept, keeps_next=True)
    # FlashInfer's joint kernel knows no min-p: with it, SGLang renormalises after top-k, before top-p. Verification of
    # drafts always does, with FlashInfer's kernels whatever draws elsewhere.
    is_joint = kept.top_k is None or (speculation is None and min_p == 0.0)
    return replace(kept, mass_of="all" if is_joint else "top_k", keeps_ties="all")


def _sglang_doubts(
    parameters: SamplingParameters, backend: SamplingBackend, speculation: Speculation | None
) -> Iterator[str]:
    if speculation is not None:
        yield from speculation.explain(parameters)
    elif backend == "flashinfer" and parameters.min_p == 0.0 and parameters.top_k is not None and parameters.top_p < 1:
        yield "top_k and top_p: SGLang takes top_p of the mass of top_k where the batch holds a request with min_p"
    if parameters.returns_kept_ids:
        yield (
            "return_top_p_token_ids: only slime's SGLang knows it, and renormalises over the ids that it returns and "
            "the sampled one; any other server ignores it, and log(mass of the kept tokens) is missing"
        )


def tell_logprobs_mode(
    parameters: SamplingParameters, top_log_probs: Sequence[Sequence[float]]
) -> Literal["raw_logprobs", "processed_logprobs"] | None:
    """The ``--logprobs-mode`` of vLLM, by what a truncation did to the largest log-probs; None if these prove none.

    Processed log-probs of what is not kept are minus infinity; raw ones never are, and there are more than top-k.
    Without a truncation the modes differ by the temperature alone, which a list of the largest ones does not tell.

    Args:
        parameters: Of the request. Ask for more log-probs than ``top_k``: at least one is then not kept.
        top_log_probs: Per token, the largest log-probs that the server returned, in any order.

    Raises:
        ValueError: The numbers are logits, or some tokens prove one mode and others the other one.
    """
    told: set[Literal["raw_logprobs", "processed_logprobs"]] = set()
    for position, row in enumerate(top_log_probs):
        finite = [value for value in row if value > MINUS_INFINITY]
        if math.fsum(map(math.exp, finite)) > 1.0 + _MASS_ERROR:
            raise ValueError(f"the probabilities of token {position} add up to more than 1: these are logits")
        if len(finite) < len(row):
            told.add("processed_logprobs")
        elif parameters.top_k is not None and len(row) > parameters.top_k:
            told.add("raw_logprobs")
    if len(told) > 1:
        raise ValueError("some tokens have log-probs of a truncated distribution, others of a whole one")
    return next(iter(told), None)
