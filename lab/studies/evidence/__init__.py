# SPDX-License-Identifier: Apache-2.0
"""The effect of corrections on training: many small runs at once, as lists of runs that a study can continue.

``studies.py`` says what runs; ``ensemble.py`` trains all runs of a group in one set of batched operations, with
mis_ext's own correction; ``engines.py`` samples, either with SGLang or with controlled noise; ``verdicts.py`` draws the
conclusions. Start with ``lab/studies/evidence.sh``.
"""

import sys
from pathlib import Path

# What a study shares with the examples, and with the runs of hosts: decoders, engines, tasks, the pretrained model.
sys.path += [str(Path(__file__).parents[3] / folder) for folder in ("examples", "lab/hosts")]
