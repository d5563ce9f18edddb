# SPDX-License-Identifier: Apache-2.0
"""Samples from files: the public path of :mod:`mis_ext.tools.dumps`."""

from mis_ext.tools.dumps import DumpedSample, Dumps, Skipped, num_usable_tokens

__all__ = ["DumpedSample", "Dumps", "Skipped", "num_usable_tokens"]
