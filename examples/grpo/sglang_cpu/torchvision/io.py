# SPDX-License-Identifier: Apache-2.0
"""Names imported by transformers."""

from typing import Any, NoReturn


class ImageReadMode:
    """Never used."""


def decode_image(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to run."""
    raise NotImplementedError("torchvision.io.decode_image is not in the CPU stand-in")


def decode_jpeg(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to run. SGLang 0.5.17, which slime's CPU run takes, imports the name."""
    raise NotImplementedError("torchvision.io.decode_jpeg is not in the CPU stand-in")
