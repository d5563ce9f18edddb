"""On-policy tokens: from what the inference server returned to what the trainer may use.

The ``read_*`` functions read one response. :func:`build_samples` joins the calls of a conversation.
:func:`detect_post_processing` says how a text was changed. :func:`define_log_probs` says from which distribution a
log-prob is. :func:`generate` does all of it in slime and Miles.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.rollout.comparable_log_probs import (
        BehaviorLogProbs,
        TrainerLogProbs,
        behavior_log_probs,
        trainer_log_probs,
    )
    from mis_ext.rollout.conversations.boundary import Boundary, BoundaryAction, BoundaryKind, Built, Policy
    from mis_ext.rollout.conversations.builder import build_samples
    from mis_ext.rollout.custom_generate.function import generate
    from mis_ext.rollout.definition import (
        Distribution,
        LogProbDefinition,
        SamplingParameters,
        Speculation,
        Truncation,
        define_log_probs,
        tell_logprobs_mode,
    )
    from mis_ext.rollout.generation import (
        AbortedRequest,
        BoundaryError,
        Contradiction,
        CountMismatch,
        Generation,
        LogProbError,
        MalformedResponse,
        NotASample,
        RolloutError,
        TrainingSample,
        UnprovenTokenIds,
    )
    from mis_ext.rollout.post_processing import PostProcessing, PostProcessingKind, detect_post_processing
    from mis_ext.rollout.readers.server_sent_events import join_stream
    from mis_ext.rollout.readers.servers import (
        read_openai_chat,
        read_openai_completions,
        read_sglang_chat,
        read_sglang_completions,
        read_sglang_generate,
        read_vllm_chat,
        read_vllm_completions,
        read_vllm_generate,
    )
    from mis_ext.rollout.vocabulary import VocabularyReport, check_vocabulary, padded_vocab_size
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "conversations.boundary": ("Boundary", "BoundaryAction", "BoundaryKind", "Built", "Policy"),
            "conversations.builder": ("build_samples",),
            "custom_generate.function": ("generate",),
            "comparable_log_probs": ("BehaviorLogProbs", "TrainerLogProbs", "behavior_log_probs", "trainer_log_probs"),
            "definition": (
                *("Distribution", "LogProbDefinition", "SamplingParameters", "Speculation", "Truncation"),
                *("define_log_probs", "tell_logprobs_mode"),
            ),
            "generation": (
                *("AbortedRequest", "BoundaryError", "Contradiction", "CountMismatch", "Generation", "LogProbError"),
                *("MalformedResponse", "NotASample", "RolloutError", "TrainingSample", "UnprovenTokenIds"),
            ),
            "post_processing": ("PostProcessing", "PostProcessingKind", "detect_post_processing"),
            "readers.server_sent_events": ("join_stream",),
            "readers.servers": (
                *("read_openai_chat", "read_openai_completions", "read_sglang_chat", "read_sglang_completions"),
                *("read_sglang_generate", "read_vllm_chat", "read_vllm_completions", "read_vllm_generate"),
            ),
            "vocabulary": ("VocabularyReport", "check_vocabulary", "padded_vocab_size"),
        },
    )

__all__ = [
    "AbortedRequest",
    "BehaviorLogProbs",
    "Boundary",
    "BoundaryAction",
    "BoundaryError",
    "BoundaryKind",
    "Built",
    "Contradiction",
    "CountMismatch",
    "Distribution",
    "Generation",
    "LogProbDefinition",
    "LogProbError",
    "MalformedResponse",
    "NotASample",
    "Policy",
    "PostProcessing",
    "PostProcessingKind",
    "RolloutError",
    "SamplingParameters",
    "Speculation",
    "TrainerLogProbs",
    "TrainingSample",
    "Truncation",
    "UnprovenTokenIds",
    "VocabularyReport",
    "behavior_log_probs",
    "build_samples",
    "check_vocabulary",
    "define_log_probs",
    "detect_post_processing",
    "generate",
    "join_stream",
    "padded_vocab_size",
    "read_openai_chat",
    "read_openai_completions",
    "read_sglang_chat",
    "read_sglang_completions",
    "read_sglang_generate",
    "read_vllm_chat",
    "read_vllm_completions",
    "read_vllm_generate",
    "tell_logprobs_mode",
    "trainer_log_probs",
]
