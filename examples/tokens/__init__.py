# SPDX-License-Identifier: Apache-2.0
"""Modules of the demonstration of on-policy tokens."""
