# SPDX-License-Identifier: Apache-2.0
"""On-policy tokens: from responses of the inference server to training samples.

The ``read_*`` functions read one response. :func:`build_samples` joins the calls of a conversation.
:func:`detect_post_processing` finds how a text was changed. :func:`define_log_probs` finds the distribution of a
log-prob. :class:`Canary` checks whether new weights arrived, and :func:`compare_weights` finds tensors that did not.
:func:`generate` is the custom generate function of slime, vime, and Miles.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.rollout.builder import build_samples as build_samples
    from mis_ext.rollout.canary import Canary as Canary
    from mis_ext.rollout.canary import CanaryResult as CanaryResult
    from mis_ext.rollout.canary import StaleWeightsError as StaleWeightsError
    from mis_ext.rollout.canary import StaleWeightsWarning as StaleWeightsWarning
    from mis_ext.rollout.comparable_log_probs import TrainerLogProbs as TrainerLogProbs
    from mis_ext.rollout.comparable_log_probs import trainer_log_probs as trainer_log_probs
    from mis_ext.rollout.custom_generate.function import generate as generate
    from mis_ext.rollout.definition import Distribution as Distribution
    from mis_ext.rollout.definition import LogProbDefinition as LogProbDefinition
    from mis_ext.rollout.definition import Truncation as Truncation
    from mis_ext.rollout.definition import define_log_probs as define_log_probs
    from mis_ext.rollout.definition import tell_logprobs_mode as tell_logprobs_mode
    from mis_ext.rollout.generation import AbortedRequest as AbortedRequest
    from mis_ext.rollout.generation import Boundary as Boundary
    from mis_ext.rollout.generation import BoundaryAction as BoundaryAction
    from mis_ext.rollout.generation import BoundaryError as BoundaryError
    from mis_ext.rollout.generation import BoundaryKind as BoundaryKind
    from mis_ext.rollout.generation import Built as Built
    from mis_ext.rollout.generation import Contradiction as Contradiction
    from mis_ext.rollout.generation import CountMismatch as CountMismatch
    from mis_ext.rollout.generation import Generation as Generation
    from mis_ext.rollout.generation import LogProbError as LogProbError
    from mis_ext.rollout.generation import MalformedResponse as MalformedResponse
    from mis_ext.rollout.generation import NotASample as NotASample
    from mis_ext.rollout.generation import Policy as Policy
    from mis_ext.rollout.generation import RolloutError as RolloutError
    from mis_ext.rollout.generation import TrainingSample as TrainingSample
    from mis_ext.rollout.generation import UnprovenTokenIds as UnprovenTokenIds
    from mis_ext.rollout.post_processing import PostProcessing as PostProcessing
    from mis_ext.rollout.post_processing import PostProcessingKind as PostProcessingKind
    from mis_ext.rollout.post_processing import detect_post_processing as detect_post_processing
    from mis_ext.rollout.readers.server_sent_events import join_stream as join_stream
    from mis_ext.rollout.readers.servers import read_sglang_chat as read_sglang_chat
    from mis_ext.rollout.readers.servers import read_sglang_completions as read_sglang_completions
    from mis_ext.rollout.readers.servers import read_sglang_generate as read_sglang_generate
    from mis_ext.rollout.readers.servers import read_vllm_chat as read_vllm_chat
    from mis_ext.rollout.readers.servers import read_vllm_completions as read_vllm_completions
    from mis_ext.rollout.readers.servers import read_vllm_generate as read_vllm_generate
    from mis_ext.rollout.sampling_parameters import SamplingParameters as SamplingParameters
    from mis_ext.rollout.weights import WeightDifference as WeightDifference
    from mis_ext.rollout.weights import compare_weights as compare_weights
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
