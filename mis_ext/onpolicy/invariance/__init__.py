"""Does a result depend on what else is in the batch, or on how the sequence was fed?

``batch_invariance`` and ``sequence_invariance`` say what is tried, ``probes`` how it is compared and judged.
"""
