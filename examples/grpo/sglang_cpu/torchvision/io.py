"""Names imported by transformers."""

from typing import Any, NoReturn


class ImageReadMode:
    """Never looked into."""


def decode_image(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to run."""
    raise NotImplementedError("torchvision.io.decode_image is not in the CPU stand-in")
