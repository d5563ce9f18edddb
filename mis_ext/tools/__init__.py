# SPDX-License-Identifier: Apache-2.0
"""What nobody needs while training: report, diagnosis, explanations, readers of dumps, and the command line."""
