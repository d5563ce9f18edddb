# SPDX-License-Identifier: Apache-2.0
"""What several studies set: SGLang in bfloat16, and token TIS with a cap."""

from __future__ import annotations

from evidence.engines import EngineSpec
from evidence.group import Method
from evidence.study import TOKEN_TIS

BF16 = EngineSpec(kind="sglang")


def token_tis(cap: float) -> Method:
    """Token ratios, truncated."""
    return Method(name=f"token_tis {cap:g}", keys=TOKEN_TIS.keys | {"tis_upper_bound": cap})
