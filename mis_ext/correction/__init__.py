"""Streams of log-probs in; weights, keep masks and metrics out. Start reading at :mod:`mis_ext.correction.pipeline`."""
