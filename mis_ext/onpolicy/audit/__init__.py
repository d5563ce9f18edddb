# SPDX-License-Identifier: Apache-2.0
"""Are the log-probs of both engines the same bits? Read ``audit_report``, ``examination``, ``log_probs``."""
