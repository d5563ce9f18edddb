# SPDX-License-Identifier: Apache-2.0
"""True on-policy: prove that two engines are bitwise equal, find where they differ, and make them equal.

Prove: :func:`audit_logprobs`. Find: :func:`record` and :func:`compare`, :func:`check_batch_invariance`,
:func:`check_packing`. Make:
:func:`batch_invariant_mode`, :func:`replay_routing`, :func:`simulate_kv_cache`.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.onpolicy.audit.audit_report import AuditReport as AuditReport
    from mis_ext.onpolicy.audit.audit_report import Verdict as Verdict
    from mis_ext.onpolicy.audit.log_probs import audit_logprobs as audit_logprobs
    from mis_ext.onpolicy.batch_invariant import attention as attention
    from mis_ext.onpolicy.batch_invariant import batch_invariant_forward as batch_invariant_forward
    from mis_ext.onpolicy.batch_invariant import batch_invariant_mode as batch_invariant_mode
    from mis_ext.onpolicy.batch_invariant import is_batch_invariant as is_batch_invariant
    from mis_ext.onpolicy.invariance import InvarianceReport as InvarianceReport
    from mis_ext.onpolicy.invariance import check_batch_invariance as check_batch_invariance
    from mis_ext.onpolicy.invariance import check_sequence_invariance as check_sequence_invariance
    from mis_ext.onpolicy.kv_cache import simulate_kv_cache as simulate_kv_cache
    from mis_ext.onpolicy.packing import PackingReport as PackingReport
    from mis_ext.onpolicy.packing import check_packing as check_packing
    from mis_ext.onpolicy.packing import packed_megatron as packed_megatron
    from mis_ext.onpolicy.packing import packed_transformers as packed_transformers
    from mis_ext.onpolicy.recording.compare import Comparison as Comparison
    from mis_ext.onpolicy.recording.compare import NameMap as NameMap
    from mis_ext.onpolicy.recording.compare import compare as compare
    from mis_ext.onpolicy.recording.recorder import record as record
    from mis_ext.onpolicy.recording.recordings import Recording as Recording
    from mis_ext.onpolicy.recording.recordings import read_sglang_dumps as read_sglang_dumps
    from mis_ext.onpolicy.recording.rows import Rows as Rows
    from mis_ext.onpolicy.routing.experts import RoutedExperts as RoutedExperts
    from mis_ext.onpolicy.routing.replay import replay_routing as replay_routing
    from mis_ext.onpolicy.routing.routing_layout import RoutingLayout as RoutingLayout
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
