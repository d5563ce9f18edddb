"""``python -m mis_ext``: the ``mis-ext`` command."""

import sys

from mis_ext.cli import main

sys.exit(main())
