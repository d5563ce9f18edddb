# SPDX-License-Identifier: Apache-2.0
"""Record the outputs of every module in both engines, and find the first difference.

``rows`` maps rows of a tensor to tokens. ``recordings`` stores rows by module, from hooks (``recorder``) or from files
of SGLang. ``compare`` compares two recordings, with ``differences``.
"""
