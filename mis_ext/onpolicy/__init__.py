"""True on-policy: prove that two engines agree bit for bit, find where they do not, and make them agree.

Prove: :func:`audit_logprobs`. Find: :func:`record` and :func:`compare`, :func:`check_batch_invariance`. Make:
:func:`batch_invariant_mode`, :func:`replay_routing`, :func:`simulate_kv_cache`.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.onpolicy.audit.audit_report import AuditReport, Evidence, Verdict
    from mis_ext.onpolicy.audit.log_probs import audit_logprobs
    from mis_ext.onpolicy.batch_invariant import (
        attention,
        batch_invariant_forward,
        batch_invariant_mode,
        is_batch_invariant,
    )
    from mis_ext.onpolicy.invariance.checks import check_batch_invariance, check_sequence_invariance
    from mis_ext.onpolicy.invariance.probes import InvarianceReport
    from mis_ext.onpolicy.kv_cache import SimulatedKVCache, simulate_kv_cache
    from mis_ext.onpolicy.recording.compare import Comparison, NameMap, compare
    from mis_ext.onpolicy.recording.recorder import record
    from mis_ext.onpolicy.recording.recordings import Recording
    from mis_ext.onpolicy.recording.rows import Rows
    from mis_ext.onpolicy.recording.sglang_dumps import read_sglang_dumps
    from mis_ext.onpolicy.routing.experts import RoutedExperts, record_hf_routing, routing_disagreement
    from mis_ext.onpolicy.routing.replay import record_routing, replay_routing
    from mis_ext.onpolicy.routing.routing_layout import RoutingLayout
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "audit.log_probs": ("audit_logprobs",),
            "audit.audit_report": ("AuditReport", "Evidence", "Verdict"),
            "batch_invariant": ("attention", "batch_invariant_forward", "batch_invariant_mode", "is_batch_invariant"),
            "invariance.checks": ("check_batch_invariance", "check_sequence_invariance"),
            "invariance.probes": ("InvarianceReport",),
            "kv_cache": ("SimulatedKVCache", "simulate_kv_cache"),
            "recording.compare": ("Comparison", "NameMap", "compare"),
            "recording.recorder": ("record",),
            "recording.recordings": ("Recording",),
            "recording.rows": ("Rows",),
            "recording.sglang_dumps": ("read_sglang_dumps",),
            "routing.experts": ("RoutedExperts", "record_hf_routing", "routing_disagreement"),
            "routing.replay": ("record_routing", "replay_routing"),
            "routing.routing_layout": ("RoutingLayout",),
        },
    )

__all__ = [
    "AuditReport",
    "Comparison",
    "Evidence",
    "InvarianceReport",
    "NameMap",
    "Recording",
    "RoutedExperts",
    "RoutingLayout",
    "Rows",
    "SimulatedKVCache",
    "Verdict",
    "attention",
    "audit_logprobs",
    "batch_invariant_forward",
    "batch_invariant_mode",
    "check_batch_invariance",
    "check_sequence_invariance",
    "compare",
    "is_batch_invariant",
    "read_sglang_dumps",
    "record",
    "record_hf_routing",
    "record_routing",
    "replay_routing",
    "routing_disagreement",
    "simulate_kv_cache",
]
