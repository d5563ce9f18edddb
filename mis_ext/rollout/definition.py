# SPDX-License-Identifier: Apache-2.0
"""Distributions of a server: that of the sampled tokens, and that of the returned log-probs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mis_ext.rollout.generation import MINUS_INFINITY
from mis_ext.rollout.sampling_parameters import PENALTIES, SamplingParameters, Server
from mis_ext.validation import check_choice

SamplingBackend = Literal["flashinfer", "triton", "pytorch"]
LogProbsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
ToldMode = Literal["raw_logprobs", "processed_logprobs"]
# Tolerance of a sum of probabilities above 1. The dtype of the log-probs is unknown, and a bfloat16 value between -4
# and -8 is rounded by up to 2**-6. In float32 the error is 1e-3.
_MASS_ERROR = 2e-2
# The sampling backends, the default first.
_BACKENDS: dict[Server, tuple[SamplingBackend, ...]] = {
    "sglang": ("flashinfer", "pytorch"),
    "vllm": ("flashinfer", "triton", "pytorch"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Truncation of the sampling support to the most probable tokens.

    Attributes:
        top_k: The number of tokens; None: all.
        top_p: The smallest set of tokens with this share of the mass.
        min_p: Tokens of at least this share of the largest probability.
        mass_of: The reference mass of ``top_p``: of ``"all"`` tokens, of tokens within ``"top_k"``, or of tokens within
            ``"top_k_and_min_p"``.
        keeps_next: Whether a token is kept if the tokens before it have exactly ``top_p`` of the mass.
        keeps_ties: Whether tokens with the same probability as the last kept token are kept too. ``"none"``: no.
            ``"top_k"``: ties with the k-th token. ``"all"``: also ties with the last token within ``top_p``. If only
            some of the ties are kept, they are those with the lowest ids.
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
    """The softmax of (logits + ``logit_bias``) / ``temperature``, renormalized over the tokens of ``truncation``.

    Attributes:
        temperature: Above 0.
        logit_bias: Values that are added to the logits, by token id.
        truncation: None keeps every token.
        unrepeatable: Other changes of the logits, and why a trainer with only logits and token ids cannot repeat them.
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
        return f"softmax({logits}), renormalized over {self.truncation}" if self.truncation else f"softmax({logits})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbDefinition:
    """The sampled distribution and that of the returned log-probs; see ``define_log_probs``.

    Attributes:
        sampled: The behavior policy: the distribution that the tokens were drawn from.
        returned: The distribution whose log-probs the server returned.
        is_greedy: Tokens were not sampled; the most probable token was used.
        returns_logits: The returned values are logits, which cannot be converted to log-probs.
        doubts: Settings that the request does not determine.
    """

    sampled: Distribution
    returned: Distribution
    is_greedy: bool = False
    returns_logits: bool = False
    doubts: tuple[str, ...] = ()

    @property
    def is_behavior(self) -> bool:
        """True if the returned values are log-probs of the sampled distribution."""
        return self.sampled == self.returned and not self.returns_logits

    @property
    def is_comparable(self) -> bool:
        """True if ``trainer_log_probs(..., definition.returned)`` has the definition of the server's values."""
        return not self.returns_logits and not self.returned.unrepeatable

    def explain(self) -> list[str]:
        """Describe both distributions and the fix for the trainer's log-probs, one line each."""
        sampled, returned = self.sampled, self.returned
        kind = "logits" if self.returns_logits else "log-probs"
        lines = [f"sampled from {sampled}", f"returned: {kind} of {returned}", self._how_to_compare()]
        lines += dict.fromkeys((*returned.unrepeatable, *sampled.unrepeatable))
        if self.is_greedy:
            lines.append(
                "greedy: tokens were not sampled, so the ratio of trainer and behavior policy is not an importance "
                "weight; sample at a temperature above 0"
            )
        elif not self.is_behavior:
            behavior = (
                "only the server has those; start vLLM with --logprobs-mode processed_logprobs, SGLang without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
            if not self.returns_logits and replace(sampled, truncation=None) == returned:
                behavior = (
                    f"log(mass that {sampled.truncation} keeps) is missing; have SGLang return it "
                    "(return_sampling_mask: true with a top_k of at most 4096: output_token_sampling_logprobs)"
                )
            lines.append(f"the returned values are not those of the behavior policy: {behavior}")
        return [*lines, *self.doubts]

    def _how_to_compare(self) -> str:
        returned = self.returned
        if self.returns_logits:
            return (
                "logits cannot be compared: their normalizer is unknown; start vLLM with --logprobs-mode "
                "processed_logprobs"
            )
        if returned.unrepeatable:
            return "the trainer's log-probs cannot be made comparable"
        steps = ["add logit_bias to the trainer's logits"] if returned.logit_bias else []
        if returned.temperature != 1.0:
            steps.append(f"divide the trainer's logits by {returned.temperature:g} before log_softmax")
        if returned.truncation:
            steps.append(f"renormalize over the tokens that {returned.truncation} keeps")
        return (
            f"to compare: {', then '.join(steps)}"
            if steps
            else "the trainer's log_softmax(logits) is directly comparable"
        )


def define_log_probs(
    parameters: SamplingParameters,
    *,
    server: Server,
    logprobs_mode: LogProbsMode = "raw_logprobs",
    return_original: bool = False,
    sampling_backend: SamplingBackend | None = None,
) -> LogProbDefinition:
    """Determine the distribution that the server sampled from, and that of its returned log-probs.

    SGLang 0.5 changes the logits by penalties, grammar and bias, divides them by the temperature, and returns log-probs
    of their softmax. Then it truncates by top-k, top-p and min-p, and samples. vLLM (V1) returns, in its raw modes,
    values of the model's logits with only the grammar applied; in its processed modes, values of the distribution that
    it samples from.

    Args:
        parameters: The parameters of the request.
        server: ``"sglang"`` or ``"vllm"``.
        logprobs_mode: vLLM's ``--logprobs-mode``.
        return_original: Whether SGLang runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``: log-probs at temperature 1.
        sampling_backend: The sampling backend, which decides about tokens at the boundary. SGLang's
            ``--sampling-backend``: ``"flashinfer"`` (None) or ``"pytorch"``. In vLLM ``"flashinfer"`` (None in the raw
            modes; Triton if a request in the batch has its own seed), ``"triton"`` (None in the processed modes), or
            ``"pytorch"`` without Triton and in older versions.

    Raises:
        ValueError: The server, mode or backend is unknown.
    """
    check_choice("server", server, _BACKENDS)
    check_choice("logprobs_mode", logprobs_mode, get_args(LogProbsMode))
    is_raw = logprobs_mode.startswith("raw")
    # If vLLM returns processed log-probs, it does not sample with FlashInfer.
    backends = _BACKENDS[server][1:] if server == "vllm" and not is_raw else _BACKENDS[server]
    backend = backends[0] if sampling_backend is None else check_choice("sampling_backend", sampling_backend, backends)
    is_greedy = parameters.temperature == 0.0 or parameters.top_k == 1
    grammars = tuple(f"{name}: the forbidden tokens depend on the grammar's state" for name in parameters.grammars)
    counted = "prompt and response" if server == "vllm" else "response"
    penalties = (
        f"{name}: {PENALTIES[name.partition('=')[0]].format(counted)}, a different normalizer at each token, which "
        "one log-prob does not show"
        for name in parameters.penalties
    )
    processors = (f"{name}: it changes logits inside the server" for name in parameters.processors)
    changed = Distribution(
        # At temperature 0 the servers divide by 1.
        temperature=parameters.temperature or 1.0,
        logit_bias=parameters.logit_bias,
        unrepeatable=(*grammars, *penalties, *processors),
    )
    truncation = Truncation(top_k=1) if is_greedy else _truncation(parameters, server, backend)
    sampled = replace(changed, truncation=truncation)
    doubts = [f"{key}: unknown, it may change the sampled distribution" for key in parameters.unknown]
    doubts += parameters.doubts
    if server == "vllm":
        # A greedy request is not truncated before its log-probs are taken.
        processed = changed if parameters.temperature == 0.0 else sampled
        returned = Distribution(unrepeatable=grammars) if is_raw else processed
    else:
        # SGLang computes the log-probs from the logits before the watermark.
        reported = tuple(reason for reason in changed.unrepeatable if not reason.startswith("watermark="))
        temperature = 1.0 if return_original else changed.temperature
        returned = replace(changed, temperature=temperature, unrepeatable=reported)
        if parameters.top_k == 1 and temperature != 1.0:
            doubts.append(
                f"top_k=1: SGLang divides by temperature={temperature:g} only if the batch has a request that is not "
                "greedy; set the temperature to 0"
            )
        if not is_greedy:
            doubts += _sglang_doubts(parameters, backend)
            if parameters.returns_kept_ids and not return_original:
                returned = replace(returned, truncation=truncation)
    return LogProbDefinition(
        sampled=sampled,
        returned=returned,
        is_greedy=is_greedy,
        returns_logits=server == "vllm" and logprobs_mode.endswith("logits"),
        doubts=tuple(doubts),
    )


def _truncation(parameters: SamplingParameters, server: Server, backend: SamplingBackend) -> Truncation | None:
    """The sampling support by top-k, top-p and min-p; None if it is the whole vocabulary."""
    kept = Truncation(top_k=parameters.top_k, top_p=parameters.top_p, min_p=parameters.min_p)
    if kept == Truncation():
        return None
    if server == "vllm":
        is_top_p_alone = kept.top_k is None and kept.min_p == 0.0
        ties: dict[SamplingBackend, Literal["none", "top_k", "all"]]
        ties = {"flashinfer": "all", "triton": "none", "pytorch": "top_k"}
        return replace(kept, mass_of="all" if is_top_p_alone else "top_k_and_min_p", keeps_ties=ties[backend])
    if backend == "pytorch":
        return replace(kept, keeps_next=True)
    # FlashInfer's joint kernel does not support min-p: with min-p, SGLang renormalizes after top-k, before top-p.
    is_joint = kept.top_k is None or kept.min_p == 0.0
    return replace(kept, mass_of="all" if is_joint else "top_k", keeps_ties="all")


def _sglang_doubts(parameters: SamplingParameters, backend: SamplingBackend) -> Iterator[str]:
    if backend == "flashinfer" and parameters.min_p == 0.0 and parameters.top_k is not None and parameters.top_p < 1:
        yield "top_k and top_p: SGLang applies top_p to the mass of top_k if the batch has a request with min_p"
    if parameters.returns_kept_ids:
        yield (
            "return_top_p_token_ids: only slime's SGLang supports it, and renormalizes over the returned ids and "
            "the sampled id; any other server ignores it, and log(mass of the kept tokens) is missing"
        )


def tell_logprobs_mode(parameters: SamplingParameters, top_log_probs: Sequence[Sequence[float]]) -> ToldMode | None:
    """The ``--logprobs-mode`` of vLLM, from the effect of a truncation on the largest log-probs; None if undecided.

    In the processed mode, tokens that are not kept have a log-prob of minus infinity. In the raw mode this happens only
    with a grammar, and more than top-k log-probs are finite. Without a truncation, and in a greedy request, the modes
    differ only by the temperature, which a list of the largest log-probs does not show.

    Args:
        parameters: Those of the request, which needs more log-probs than ``top_k``, so that at least one is not kept.
        top_log_probs: Per token, the largest log-probs that the server returned, in any order.

    Raises:
        ValueError: The values are logits, or different tokens prove different modes.
    """
    told: set[ToldMode] = set()
    # A greedy request is not truncated.
    k = None if parameters.temperature == 0.0 else parameters.top_k
    may_have_grammar = bool(parameters.grammars) or parameters.offers_tools
    for position, row in enumerate(top_log_probs):
        # A log-prob above 1 is sufficient, and larger values would overflow. The placeholder for minus infinity adds
        # nothing.
        if max(row, default=0.0) > 1.0 or math.fsum(map(math.exp, row)) > 1.0 + _MASS_ERROR:
            raise ValueError(f"the probabilities of token {position} add up to more than 1: these are logits")
        if min(row, default=0.0) <= MINUS_INFINITY:
            if not may_have_grammar:
                told.add("processed_logprobs")
        elif k is not None and len(row) > k:
            ordered = sorted(row, reverse=True)
            # Tokens as probable as the k-th may be kept with it.
            if ordered[k] < ordered[k - 1]:
                told.add("raw_logprobs")
    if len(told) > 1:
        raise ValueError("some tokens have log-probs of a truncated distribution, and others of the whole distribution")
    return next(iter(told), None)
