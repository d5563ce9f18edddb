# SPDX-License-Identifier: Apache-2.0
"""``python -m mis_ext``: the ``mis-ext`` command."""

import sys

from mis_ext.tools.cli import main

sys.exit(main())
