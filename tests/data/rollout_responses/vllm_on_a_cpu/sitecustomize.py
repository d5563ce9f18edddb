# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's processes run their Triton kernels in Triton's interpreter: no Triton for CPUs is in a package index.

vLLM's newer runner, which alone returns routed experts and sampling masks, wants a Triton with a driver for CPUs. The
kernels are vLLM's own; only who executes them stands in for the compiler.
"""

import os
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang_core

    def patch_with_tensors(language, scope):
        """Compiled, the index of a loop over ``tl.range`` is a tensor; the interpreter has an int, without ``.to``."""
        patch_language(language, scope)
        integers = language.range
        scope.set_attr(language, "range", lambda *a, **k: map(interpreter._implicit_cvt, integers(*a, **k)))

    interpreter._patch_lang_core = patch_with_tensors
    triton.backends.backends["cpu"] = SimpleNamespace(
        compiler=None, driver=type("Driver", (), {"is_active": staticmethod(bool)})
    )
