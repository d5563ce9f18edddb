# SPDX-License-Identifier: Apache-2.0
"""Integrations of the correction into frameworks. Only the module of a framework depends on it."""
