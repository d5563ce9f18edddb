"""Definitions: of which distribution a log-prob is, and how the trainer's becomes comparable."""
