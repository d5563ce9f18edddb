"""Logs of calls: what is in them, checked conversation by conversation."""
