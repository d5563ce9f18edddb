# SPDX-License-Identifier: Apache-2.0
"""Does a result depend on what else is in the batch, or on how the sequence was fed?

``checks`` says what is tried, ``probes`` how it is compared and judged.
"""
