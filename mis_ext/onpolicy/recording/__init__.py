# SPDX-License-Identifier: Apache-2.0
"""Record the outputs of every module in both engines, and find the first difference.

``rows`` says which token a row of a tensor is, and ``recordings`` keeps rows by module, from hooks (``recorder``) or
from files of SGLang. ``compare`` walks over two recordings, with ``differences``.
"""
