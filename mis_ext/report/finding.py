"""What a diagnosis is, and what its rules look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mis_ext.report.sequences import Sequences
from mis_ext.report.signals import Signals
from mis_ext.report.summary import Summary

Confidence = Literal["certain", "likely", "possible"]

MIN_TOKENS = 64
"""Fewer uncertain tokens say too little."""


@dataclass(frozen=True)
class Diagnosis:
    """A likely cause.

    Attributes:
        cause: Its name, stable for programs.
        confidence: How sure the evidence makes it.
        title: What it is.
        evidence: What was measured.
        advice: What to do.
        is_fault: Whether it is a mistake to repair first, which no configuration corrects.
    """

    cause: str
    confidence: Confidence
    title: str
    evidence: str
    advice: str
    is_fault: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """What the rules of causes look at: evidence, numbers of the run, and numbers of each sequence."""

    signals: Signals
    summary: Summary
    sequences: Sequences
