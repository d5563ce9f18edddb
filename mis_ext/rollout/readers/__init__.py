# SPDX-License-Identifier: Apache-2.0
"""Readers: one response of an inference server as a :class:`~mis_ext.rollout.generation.Generation`."""
