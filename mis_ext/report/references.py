"""What is normal: values to hold the numbers of a report against."""

from __future__ import annotations

from typing import NamedTuple

from mis_ext.diagnosis.limits import KERNEL_K3, PRETRAINED_K3, QUANTISED_K3


class Reference(NamedTuple):
    """A k3 per token that was seen, and where."""

    low: float
    high: float
    what: str
    source: str


REFERENCES = (
    Reference(
        1e-5,
        PRETRAINED_K3,
        "dense models in bfloat16",
        "5e-5 in a toy (bf16.md), 6e-4 with 4B (published.md), 2e-3 with 135M (slime_gpu.md)",
    ),
    Reference(
        KERNEL_K3,
        QUANTISED_K3,
        "fp8 weights or cache",
        "1e-3 to 8e-3 in a toy (fp8_*.md), 7e-3 to 7e-2 pretrained (published.md, pretrained_stories.md). "
        "Qwen2.5 has 0.3 with an e4m3 cache, which no correction saved (README.md)",
    ),
    Reference(4e-4, 1e-1, "mixtures of experts", "4e-4 in a tiny one (moe_mismatch.md), more of slime and Miles users"),
    Reference(
        4e-3,
        3.0,
        "weights 1 to 16 steps old",
        "with 135M 4e-3 at 1 step, up to 5e-2 at 4, 5e-1 at 8 (pretrained_stale.md); 8e-2 and more in a toy",
    ),
)
"""All of fresh weights but the last; files are those of ``lab/evidence``, ``slime_gpu.md`` of ``real_stack``."""

MEANING = {
    "k3": "KL(behavior, proximal) per token. Worry if it grows, or is far above what your model has when healthy. With "
    "fresh weights of SmolLM2: above 1e-2 (fp8: 7e-2, experts: 1e-1).",
    "reverse_k3": "KL(proximal, behavior) per token. Far from k3: a heavy tail on one side.",
    "k1": "-mean d: a noisy KL of any sign. Far above k3: the trainer scores what cannot have been sampled.",
    "abs_mean": "Mean |d| in nats. Above 0.3 it is a mistake or stale weights, not kernels.",
    "abs_p99": "One token in a hundred differs by more.",
    "abs_max": "The largest |d|. A single token above 20 is a sentinel or another text.",
    "total_variation": "Share of probability that trainer and engine give to different tokens.",
    "chi_square": "Variance of token ratios.",
    "ratio_mean": "1 if both score the distribution that was sampled. Below 1: top-p, top-k or padding.",
    "ess_token": "Effective share of tokens if each is weighted by its ratio. Below 0.9 weights add variance.",
    "ess_sequence": "The same for products over responses. Below 0.2 a tenth of them has half of all weight.",
    "ess_geometric": "The same for geometric means.",
    "k_hat": "Tail of the products: below 0.5 it is fine, above 0.7 their mean is unreliable.",
    "perplexity_ratio": "Proximal over behavior perplexity; 1 + k1 where they are close.",
    "zero_share": "Tokens with equal log-probs on both sides. All: true on-policy, or a copy.",
    "above_2_share": "Tokens that an upper bound of 2 truncates.",
    "below_half_share": "Tokens whose ratio is below 1/2.",
}
"""Numbers of the summary that are explained on the page, in this order."""
