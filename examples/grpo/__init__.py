# SPDX-License-Identifier: Apache-2.0
"""A small GRPO run with a Megatron-Core trainer and a separate inference engine.

Import it before Megatron-Core and transformers: it sets their environment variables and hides their notices.
"""

import logging
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# This process was not started by torchrun.
os.environ.setdefault("LOCAL_RANK", "0")
# Megatron-Core reports at import which optional kernels are missing.
warnings.filterwarnings("ignore", module="megatron")
for name in ("megatron", "transformers"):
    logging.getLogger(name).setLevel(logging.ERROR)
