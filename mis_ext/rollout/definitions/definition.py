"""Of which distribution the server's log-probs are, and from which distribution it drew the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mis_ext.checks import check_choice
from mis_ext.rollout.definitions.distribution import Distribution
from mis_ext.rollout.definitions.sampling_parameters import SERVERS, SamplingParameters, Server
from mis_ext.rollout.definitions.servers import SamplingBackend, Speculation, choose_backend, truncation_of

LogProbsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


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
        lines = [f"sampled from {self.sampled}", f"returned: {self._kind} of {self.returned}", self._correction()]
        lines += self.returned.unrepeatable
        lines += [reason for reason in self.sampled.unrepeatable if reason not in self.returned.unrepeatable]
        if self.is_greedy:
            lines.append(
                "greedy: nothing was drawn, so the ratio of trainer and behavior policy is no importance weight; "
                "sample at a temperature above 0"
            )
        elif not self.is_behavior:
            lines.append(f"the returned numbers are not those of the behavior policy: {self._behavior()}")
        return [*lines, *self.doubts]

    @property
    def _kind(self) -> str:
        return "logits" if self.returns_logits else "log-probs"

    def _correction(self) -> str:
        if self.returns_logits:
            return (
                "logits cannot be compared: their normaliser is unknown; start vLLM with --logprobs-mode "
                "processed_logprobs"
            )
        if self.returned.unrepeatable:
            return "the trainer's log-probs cannot be made comparable"
        if self.returned == Distribution():
            return "the trainer's log_softmax(logits) is comparable as it is"
        steps = ["add logit_bias to the trainer's logits"] if self.returned.logit_bias else []
        if self.returned.temperature != 1.0:
            steps.append(f"divide the trainer's logits by {self.returned.temperature:g} before log_softmax")
        if self.returned.truncation:
            steps.append(f"renormalise over the tokens that {self.returned.truncation} keeps")
        return "to compare: " + ", then ".join(steps)

    def _behavior(self) -> str:
        if self.only_truncation_differs:
            return (
                f"log(mass that {self.sampled.truncation} keeps) is missing; have SGLang return it "
                "(return_sampling_mask: true with a top_k of at most 4096: output_token_sampling_logprobs), or enough "
                "top log-probs to compute it"
            )
        return (
            "only the server can say those; start vLLM with --logprobs-mode processed_logprobs, SGLang without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
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
    check_choice("server", server, SERVERS)
    check_choice("logprobs_mode", logprobs_mode, _MODES)
    is_raw = logprobs_mode.startswith("raw")
    backend = choose_backend(sampling_backend, server, returns_processed=server == "vllm" and not is_raw)
    if speculation is not None and server != "sglang":
        raise ValueError(f"speculation is described for sglang only, got server {server!r}")
    is_greedy = parameters.temperature == 0.0 or parameters.top_k == 1
    grammars = tuple(f"{name}: which tokens it forbids depends on the grammar's state" for name in parameters.grammars)
    processors = tuple(f"{name}: it changes logits inside the server" for name in parameters.processors)
    changed = Distribution(
        # At temperature 0 the servers divide by 1.
        temperature=parameters.temperature or 1.0,
        logit_bias=parameters.logit_bias,
        unrepeatable=(*grammars, *_explain_penalties(parameters.penalties, server), *processors),
    )
    truncation = truncation_of(parameters, is_greedy, server, backend, speculation)
    sampled = replace(changed, truncation=truncation)
    doubts = tuple(f"{key}: unknown, it may change what is sampled" for key in parameters.unknown)
    if server == "vllm":
        # A greedy request is not truncated before its log-probs are taken.
        processed = changed if parameters.temperature == 0.0 else sampled
        returned = Distribution(unrepeatable=grammars) if is_raw else processed
    else:
        # SGLang keeps the logits as they were before the watermark for the log-probs.
        reported = tuple(reason for reason in changed.unrepeatable if not reason.startswith("watermark="))
        temperature = 1.0 if return_original else changed.temperature
        returned = replace(changed, temperature=temperature, unrepeatable=reported)
        doubts += _doubts_of_sglang(parameters, is_greedy, temperature, backend, speculation)
        if parameters.returns_kept_ids and not (is_greedy or return_original):
            returned = replace(returned, truncation=truncation)
        if speculation is not None and not is_greedy:
            sampled = replace(sampled, unrepeatable=(*sampled.unrepeatable, *speculation.unrepeatable))
    return LogProbDefinition(
        sampled=sampled,
        returned=returned,
        is_greedy=is_greedy,
        returns_logits=server == "vllm" and logprobs_mode.endswith("logits"),
        doubts=doubts,
    )


def _doubts_of_sglang(
    parameters: SamplingParameters,
    is_greedy: bool,
    temperature: float,
    backend: SamplingBackend,
    speculation: Speculation | None,
) -> tuple[str, ...]:
    doubts = []
    if parameters.top_k == 1 and temperature != 1.0:
        doubts.append(
            f"top_k=1: SGLang divides by temperature={temperature:g} only where the batch holds a request that is not "
            "greedy; set the temperature to 0"
        )
    if is_greedy:
        return tuple(doubts)
    if speculation is not None:
        doubts += speculation.explain(parameters)
    elif backend == "flashinfer" and parameters.min_p == 0.0 and parameters.top_k is not None and parameters.top_p < 1:
        doubts.append(
            "top_k and top_p: SGLang takes top_p of the mass of top_k where the batch holds a request with min_p"
        )
    if parameters.returns_kept_ids:
        doubts.append(
            "return_top_p_token_ids: only slime's SGLang knows it, and renormalises over the ids that it returns and "
            "the sampled one; any other server ignores it, and log(mass of the kept tokens) is missing"
        )
    return tuple(doubts)


def _explain_penalties(penalties: tuple[str, ...], server: Server) -> tuple[str, ...]:
    counted = "prompt and response" if server == "vllm" else "response"
    reasons = {
        "repetition_penalty": f"it scales the logits of tokens that occur in the {counted} by their sign",
        "frequency_penalty": "it lowers logits by the count of each token sampled so far",
        "presence_penalty": "it lowers the logits of tokens sampled so far",
    }
    return tuple(
        f"{name}: {reasons[name.partition('=')[0]]}, another normaliser at each token, which one log-prob does not tell"
        for name in penalties
    )
