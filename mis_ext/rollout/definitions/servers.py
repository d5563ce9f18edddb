"""Which tokens a server can draw: each has its own order of the filters, and its own edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mis_ext.checks import check_choice, check_number
from mis_ext.rollout.definitions.distribution import Truncation
from mis_ext.rollout.definitions.sampling_parameters import SamplingParameters, Server

SamplingBackend = Literal["flashinfer", "triton", "pytorch"]

_BACKENDS: dict[Server, tuple[SamplingBackend, ...]] = {
    "sglang": ("flashinfer", "pytorch"),
    "vllm": ("flashinfer", "triton", "pytorch"),
}


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


def choose_backend(backend: SamplingBackend | None, server: Server, *, returns_processed: bool) -> SamplingBackend:
    """The sampling backend that draws the tokens; the server's default where ``backend`` is None.

    Raises:
        ValueError: The server has no such backend, or not for processed log-probs.
    """
    known = _BACKENDS[server][1:] if returns_processed else _BACKENDS[server]
    return known[0] if backend is None else check_choice("sampling_backend", backend, known)


def truncation_of(
    parameters: SamplingParameters,
    is_greedy: bool,
    server: Server,
    backend: SamplingBackend,
    speculation: Speculation | None,
) -> Truncation | None:
    """The set from which tokens are drawn, by top-k, top-p and min-p; None if it is the whole vocabulary."""
    if is_greedy:
        return Truncation(top_k=1)
    kept = Truncation(top_k=parameters.top_k, top_p=parameters.top_p, min_p=parameters.min_p)
    if speculation is not None:
        kept = replace(kept, min_p=0.0)
    if kept == Truncation():
        return None
    if server == "vllm":
        is_top_p_alone = kept.top_k is None and kept.min_p == 0.0
        ties: dict[SamplingBackend, Literal["none", "top_k", "all"]]
        ties = {"flashinfer": "all", "triton": "none", "pytorch": "top_k"}
        return replace(kept, mass_of="all" if is_top_p_alone else "top_k_and_min_p", keeps_ties=ties[backend])
    if speculation is not None:
        # Verification renormalises after top-k, then after top-p, with FlashInfer's kernels whatever draws elsewhere.
        return replace(kept, mass_of="all" if kept.top_k is None else "top_k", keeps_ties="all")
    if backend == "pytorch":
        return replace(kept, keeps_next=True)
    # FlashInfer's joint kernel knows no min-p: with it, SGLang renormalises after top-k, before top-p.
    is_joint = kept.top_k is None or kept.min_p == 0.0
    return replace(kept, mass_of="all" if is_joint else "top_k", keeps_ties="all")
