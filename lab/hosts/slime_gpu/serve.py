# SPDX-License-Identifier: Apache-2.0
"""SGLang's server for Miles: ``python -m slime_gpu.serve`` and the command line of ``sglang.launch_server``.

Before and after new weights Miles calls two endpoints that SGLang has since 0.5.21 or later. They restore and pack
quantised weights. Where they are missing, they do nothing here, which is right for weights that are not quantised.
"""

import runpy

CALLED = ("/begin_weight_update", "/end_weight_update")


def main() -> None:
    """Add what is missing, and serve."""
    from sglang.srt.entrypoints.http_server import app

    async def nothing() -> dict[str, bool]:
        return {"success": True}

    known = {getattr(route, "path", None) for route in app.routes}
    for path in CALLED:
        if path not in known:
            app.post(path)(nothing)
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
