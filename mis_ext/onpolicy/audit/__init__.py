# SPDX-License-Identifier: Apache-2.0
"""Audit: are the log-probs of both engines bitwise equal? Read ``audit_report``, ``examination``, ``log_probs``."""
