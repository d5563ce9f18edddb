# SPDX-License-Identifier: Apache-2.0
"""A path of ``mis_ext.log_mismatch`` that launch scripts may have."""

from mis_ext.tools.report.online import log_mismatch

__all__ = ["log_mismatch"]
