# SPDX-License-Identifier: Apache-2.0
"""The same questions asked of a pretrained model: Megatron-Core in bf16 trains it, a program checks its answers.

A group is one run, which a slice of a few minutes on a GPU finishes. Processes that share a GPU take turns in the runs;
each has one engine, which it keeps from run to run.
"""
