# SPDX-License-Identifier: Apache-2.0
"""What every module computed in both engines, and where they differ.

``rows`` says which token a row of a tensor is, and ``recordings`` keeps rows by module, from hooks (``recorder``) or
from files of SGLang. ``compare`` walks over two recordings, with ``differences``.
"""
