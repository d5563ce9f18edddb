"""The one table of causes, in the order in which they are looked for.

What is in the data itself comes first, then what the log-probs are of, then how they were computed, then what a
mismatch of this size usually is. Guards, the report and the audit ask :func:`diagnose`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mis_ext.checks.limits import KERNEL_K3, PRETRAINED_K3, QUANTISED_K3
from mis_ext.correction.tables import Table
from mis_ext.tools.diagnosis.cause import Cause, Diagnosis, percent
from mis_ext.tools.diagnosis.engines import bf16, decoding, experts, few_tokens, formula, late, prefix
from mis_ext.tools.diagnosis.measuring import Measured
from mis_ext.tools.diagnosis.missing import (
    broken_engine,
    broken_trainer,
    negated,
    other_context,
    other_ids,
    placeholders,
    positive,
    shifted,
    shifted_by_many,
)
from mis_ext.tools.diagnosis.sampling import other_base, padding, temperature, truncation
from mis_ext.tools.diagnosis.size import MAX_EXPLAINED, equal, kernels, kernels_or_low_precision, large, low_precision
from mis_ext.tools.diagnosis.staleness import stale

MIN_HIDING = 0.5
"""Share of k3 from which on a cause hides those that it would be taken for."""

_TAILS = ("few_tokens", "expert_routing")


def _left(k3: str) -> str:
    return f"other causes explain at most {percent(MAX_EXPLAINED)} of k3, and the rest is {k3} (SmolLM2-135M's sizes)"


CAUSES: dict[str, Cause] = {
    cause.name: cause
    for cause in (
        Cause(
            name="placeholder_log_probs",
            title="placeholders in place of log-probs",
            looks_like="log-probs below -1000 on one side; 0 where the other is below -1, unless the other finds zeros "
            "more probable than the rest; all equal, in a response or everywhere; 8 that are lowest in a response, "
            "as of a clamp",
            needs=("tokens",),
            rule=placeholders,
            advice="Ask the side that has them for log-probs (the engine: return_logprob in SGLang, logprobs in vLLM), "
            "or set the loss_masks of those tokens to 0. Engines return 0 for tokens that they sampled greedily.",
            is_fault=True,
            guard="degenerate_behavior",
            takes_out=True,
        ),
        Cause(
            name="negated_log_probs",
            title="log-probs with the wrong sign: negative log-likelihoods in place of log-probs",
            looks_like="the streams fit at least twice as well when the sign of one is flipped",
            needs=("tokens",),
            rule=negated,
            advice="Store log-probs, which are below 0, on both sides.",
            is_fault=True,
            guard="degenerate_behavior",
        ),
        Cause(
            name="shifted_by_one_token",
            title="log-probs shifted by one token",
            looks_like="the streams, or those of some responses, fit at least twice as well when one is shifted by a "
            "token",
            needs=("tokens",),
            rule=shifted,
            advice="Score position p with the logits of position p - 1, on both sides.",
            is_fault=True,
            guard="shifted_log_probs",
            takes_out=True,
        ),
        Cause(
            name="shifted_by_many_tokens",
            title="log-probs shifted by more than one token",
            looks_like="probabilities of a sample fit at least twice as well when one stream is shifted by 2 tokens or "
            "more",
            needs=("samples",),
            rule=shifted_by_many,
            advice="Take the last of the engine's log-probs, as many as there are ids: after a retraction or an abort "
            "those of a dropped attempt may stand before them.",
            is_fault=True,
            takes_out=True,
        ),
        Cause(
            name="positive_log_probs",
            title="numbers above 0, which are no log-probs",
            looks_like="log-probs above 0.1: they are probabilities, or something was added to them; all of a response "
            "where none is below 0",
            needs=("tokens",),
            rule=positive,
            advice="Store logarithms of probabilities, without a reward or a bonus in them.",
            is_fault=True,
            guard="degenerate_behavior",
            takes_out=True,
        ),
        Cause(
            name="retokenised_samples",
            title="samples whose text is not the one that the trainer scored, for example a text tokenised again",
            looks_like="ids that differ; or less than 40 % of the samples differ 5 times as much as the others, by "
            "more than 0.3 nats, with few between, and have most of k3",
            needs=("samples",),
            rule=other_ids,
            advice="Train on the ids that the engine returned: do not decode and encode again.",
            is_fault=True,
            takes_out=True,
        ),
        Cause(
            name="other_context",
            title="samples behind another prompt or context, or with log-probs of other samples: their ids are right",
            looks_like="samples differ as where a text is tokenised again, and their ids are equal",
            needs=("samples",),
            rule=other_context,
            advice="Compare what stands before these responses on both sides (prompt, template, images, tools), and "
            "whether each has the log-probs of its own request.",
            is_fault=True,
            takes_out=True,
        ),
        Cause(
            name="log_prob_formula",
            title="another formula for the same log-prob, such as log(softmax) for log_softmax",
            looks_like="no difference exceeds 1.5 float32 steps of a log-prob, or of 1 where it is above -1",
            needs=("signals",),
            rule=formula,
            advice="Nothing to correct. For equal bits use the same formula on both sides.",
        ),
        Cause(
            name="log_base",
            title="logarithms to base 2 or 10 on one side",
            looks_like="one log-prob is 0.69, 1.44, 0.43 or 2.30 times the other: that explains half of the variance "
            "of the differences and makes the mean ratio 1, which it was not to either side; or it explains 90 %",
            needs=("tokens",),
            rule=other_base,
            advice="Multiply log-probs to base 2 by 0.693, to base 10 by 2.303.",
            is_fault=True,
        ),
        Cause(
            name="stale_prefix_cache",
            title="a prefix in the cache that was computed with old weights",
            looks_like="the first 8 or 32 tokens of a turn differ twice as much as the 65th to 256th, or have 5 times "
            "their k3; or turns after the first do",
            needs=("signals",),
            rule=prefix,
            advice="Flush the engine's prefix cache at every weight update.",
            hides=_TAILS,
        ),
        Cause(
            name="late_positions",
            title="positions that one side treats differently, as with RoPE scaling, a window or a length limit",
            looks_like="tokens after a position (from the 32nd on) differ twice as much as those before, have 5 times "
            "their k3, or differ more by a step that is no part of a steady rise; and that is a tenth of k3",
            needs=("signals",),
            rule=late,
            advice="Compare rope_scaling, max_position_embeddings and sliding_window of both sides.",
            hides=_TAILS,
        ),
        Cause(
            name="temperature",
            title="another temperature in one of the log-probs",
            looks_like="the difference falls or rises with the log-prob, by a line that explains more than 6 % of its "
            "variance, or 45 % where a cut is seen beside it; and `ratio - 1` says that one distribution is a power of "
            "the other",
            needs=("tokens",),
            rule=temperature,
            advice="Divide the trainer's logits by the sampling temperature, or ask the engine for log-probs of what "
            "it sampled from.",
            is_fault=True,
            hides=("broken_trainer", "broken_engine", "vocabulary_padding", *_TAILS),
        ),
        Cause(
            name="broken_trainer",
            title="a broken trainer: it finds the sampled tokens less probable than a uniform guess would",
            looks_like="the trainer's mean log-prob is below that of a uniform guess among the ids up to the largest "
            "(32,000 if more, or not known), and 0.3 nats below the engine's",
            needs=("tokens",),
            rule=broken_trainer,
            advice="Check that its weights were loaded, with the scales of 8-bit weights, and that it scores the "
            "sampled ids behind the same prompt.",
            is_fault=True,
        ),
        Cause(
            name="broken_engine",
            title="a broken engine: it finds the tokens that it sampled less probable than a uniform guess would",
            looks_like="the same of the engine",
            needs=("tokens",),
            rule=broken_engine,
            advice="Check that its last update has loaded all weights, with the scales of 8-bit weights, and that it "
            "returns the log-probs of the sampled tokens.",
            is_fault=True,
        ),
        Cause(
            name="vocabulary_padding",
            title="the trainer's vocabulary has padding, which takes a part of the probability",
            looks_like="the mean ratio is below 1, larger differences are below 0, and none is above 0.05 nats",
            needs=("signals",),
            rule=padding,
            advice="Set the logits of the padding to minus infinity before the log-softmax.",
            is_fault=True,
            hides=("top_p_or_top_k", *_TAILS),
        ),
        Cause(
            name="top_p_or_top_k",
            title="top-p, top-k or min-p in the sampling, not in the trainer's log-probs",
            looks_like="the mean ratio is below 1 by more than 0.001, and larger differences are below 0; or by more "
            "than 0.03 and 20 standard errors; or by 0.005 and 12, and no token loses 3 nats",
            needs=("signals",),
            rule=truncation,
            advice="Sample with top_p 1 and no top_k, or give the trainer the kept tokens "
            "(mis_ext.rollout.define_log_probs).",
            is_fault=True,
            hides=_TAILS,
        ),
        Cause(
            name="bf16_log_probs",
            title="log-probs rounded to bfloat16",
            looks_like="99 % of the log-probs of one side are bfloat16 numbers",
            needs=("signals",),
            rule=bf16,
            advice="Keep log-probs in float32 from the log-softmax to the dump.",
        ),
        Cause(
            name="stale_weights",
            title="stale weights: tokens that were sampled with weights of another step",
            looks_like="k3 grows with the recorded versions, or over steps (steadily, or back to its floor), or the "
            "mean difference exceeds 0.3 nats",
            needs=("samples",),
            rule=stale,
            advice="Sync the weights before sampling, and in the trainer's dtype: in bf16 an engine stays behind a "
            "trainer in fp16. Or correct: token TIS gained 0.06 of reward with weights 4 steps old in a pretrained "
            "model, 0.13 with 8, and 0.34 in a tiny one (lab/evidence/README.md).",
            hides=("decode_dependence", "stale_prefix_cache", "late_positions", *_TAILS),
        ),
        Cause(
            name="decode_dependence",
            title="decode or prefix dependence (attention, KV cache)",
            looks_like="first tokens of responses are equal, later ones differ",
            needs=("signals",),
            rule=decoding,
            advice="Compare prefill and decode of the engine (mis-ext diff).",
            hides=("late_positions",),
        ),
        Cause(
            name="few_tokens",
            title="a few tokens only",
            looks_like="less than 0.2 % of the uncertain tokens carry at least 60 % of k3",
            needs=("signals",),
            rule=few_tokens,
            advice="Look at the worst tokens. Truncated token weights (yaml/mis.yaml) limit the effect of each.",
        ),
        Cause(
            name="expert_routing",
            title="most tokens agree and a few differ much, as with other experts in a mixture of experts",
            looks_like="at most 3 % of the uncertain tokens differ 12 times as much as is typical, and carry at "
            "least 60 % of k3",
            needs=("signals",),
            rule=experts,
            advice="In a mixture of experts replay the engine's routing (R3): it took k3 from 4e-4 to 5e-5 "
            "(lab/evidence/moe_mismatch.md). In a pretrained model it took it from 2.4e-3 to 1.1e-3, and the "
            "reward was the same (lab/evidence/pretrained_moe.md).",
        ),
        Cause(
            name="equal",
            title="no difference",
            looks_like="every log-prob is the same number on both sides",
            needs=("signals",),
            rule=equal,
            advice="Nothing to correct. A copy of one side looks the same: mis-ext audit tells them apart.",
        ),
        Cause(
            name="bf16_kernels",
            title="other kernels or rounding, no larger than that of bfloat16",
            looks_like=f"no other cause, and k3 is below {KERNEL_K3:g}",
            needs=("signals",),
            rule=kernels,
            advice="No correction is needed for this alone. To find the first module that differs: mis-ext diff.",
        ),
        Cause(
            name="bf16_or_low_precision",
            title="kernels in bfloat16 of a pretrained model (usual, no fault), or lower precision on one side",
            looks_like=_left(f"{KERNEL_K3:g} to {PRETRAINED_K3:g}"),
            needs=("signals",),
            rule=kernels_or_low_precision,
            advice="Nothing is wrong if the model is pretrained and both sides compute in bfloat16. With float16 on "
            "both k3 was a 65th, and training learned in about half the steps (lab/evidence/normal.md). In small "
            "models an fp8 cache or fp8 weights have this size. Token TIS (yaml/mis.yaml) rejects nothing, and made no "
            "difference there (docs/presets.md).",
        ),
        Cause(
            name="low_precision",
            title="lower precision on one side (fp8 or int8 weights or cache)",
            looks_like=_left(f"{PRETRAINED_K3:g} to {QUANTISED_K3:g}"),
            needs=("signals",),
            rule=low_precision,
            advice="Token TIS (yaml/mis.yaml) is a precaution with a price: at a k3 of 0.06 our runs learned without a "
            "correction, and 8 of 105 steps later with it (docs/presets.md). A k3 far above that of the same engine in "
            "bfloat16 is for repair: scales of an 8-bit cache, another dtype.",
        ),
        Cause(
            name="large_mismatch",
            title="a large mismatch, which low precision gave in some models only",
            looks_like=_left(f"above {QUANTISED_K3:g}"),
            needs=("signals",),
            rule=large,
            advice="Check weight syncs first, then correct with token TIS (yaml/mis.yaml).",
        ),
    )
}
"""All causes by name, in the order of the search."""


def diagnose(measured: Measured) -> list[Diagnosis]:
    """Causes that what was measured points to, the surest first."""
    return search(measured)[0]


def search(measured: Measured) -> tuple[list[Diagnosis], Measured]:
    """:func:`diagnose`, and what is left to explain then.

    The search goes on when a cause is found: tokens that a fault spoils are taken out, and a cause that explains a
    share of k3 leaves the rest to others. What a found cause would be mistaken for is not looked for.
    """
    found: list[Diagnosis] = []
    hidden: set[str] = set()
    for cause in CAUSES.values():
        if cause.name in hidden or any(getattr(measured, need) is None for need in cause.needs):
            continue
        finding = cause.rule(measured)
        if finding is None:
            continue
        if not cause.takes_out:
            # Not more than is left; what is not known stays so.
            finding = replace(finding, k3_share=min(finding.k3_share, 1.0 - measured.explained))
        found.append(Diagnosis.of(cause, finding))
        hidden |= {*finding.hides}
        measured = replace(measured, found=(*measured.found, cause.name))
        if finding.is_all:
            measured = replace(measured, explained=1.0)
            break
        # A small cause must not hide a large one.
        if cause.takes_out or not finding.k3_share < MIN_HIDING:
            hidden |= {*cause.hides}
            measured = replace(measured, has_main=True)
        if finding.takes_out is not None:
            measured = measured.without(finding.takes_out)
        elif not cause.takes_out and not math.isnan(finding.k3_share):
            measured = replace(measured, explained=min(measured.explained + finding.k3_share, 1.0))
    order = ("certain", "likely", "possible")
    return sorted(found, key=lambda diagnosis: order.index(diagnosis.confidence)), measured


def causes_table() -> Table:
    """The causes: title, what shows them, and who can judge."""
    askers = {"tokens": "guards, report, audit", "signals": "report, audit", "samples": "report, audit"}
    rows = (
        (f"`{cause.name}`", cause.title, cause.looks_like, askers[cause.needs[-1]], cause.advice)
        for cause in CAUSES.values()
    )
    return Table(("cause", "what it is", "what shows it", "who can judge", "what to do"), tuple(rows))
