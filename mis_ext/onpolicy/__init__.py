"""True on-policy: prove that two engines agree bit for bit, find where they do not, and make them agree.

Prove: :func:`audit_logprobs`. Find: :func:`record` and :func:`compare`, :func:`check_batch_invariance`. Make:
:func:`batch_invariant_mode`, :func:`replay_routing`.
"""

from mis_ext.onpolicy.audit import audit_logprobs
from mis_ext.onpolicy.audit_report import AuditReport, Verdict
from mis_ext.onpolicy.batch_invariant import (
    attention,
    batch_invariant_forward,
    batch_invariant_mode,
    is_batch_invariant,
)
from mis_ext.onpolicy.comparison import compare
from mis_ext.onpolicy.comparison_result import Comparison
from mis_ext.onpolicy.hf_routing import record_hf_routing
from mis_ext.onpolicy.invariance import check_batch_invariance
from mis_ext.onpolicy.invariance_report import InvarianceReport
from mis_ext.onpolicy.name_map import NameMap
from mis_ext.onpolicy.recorder import record
from mis_ext.onpolicy.recording import Recording
from mis_ext.onpolicy.routing import RoutedExperts, routing_disagreement
from mis_ext.onpolicy.routing_layout import RoutingLayout
from mis_ext.onpolicy.routing_replay import record_routing, replay_routing
from mis_ext.onpolicy.rows import Rows
from mis_ext.onpolicy.sequence_invariance import check_sequence_invariance
from mis_ext.onpolicy.sglang_dumps import read_sglang_dumps

__all__ = [
    "AuditReport",
    "Comparison",
    "InvarianceReport",
    "NameMap",
    "Recording",
    "RoutedExperts",
    "RoutingLayout",
    "Rows",
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
]
