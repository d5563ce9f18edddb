# SPDX-License-Identifier: Apache-2.0
"""Tools outside of training: report, diagnosis, explanations, readers of dumps, and the command line."""
