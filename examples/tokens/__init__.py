# SPDX-License-Identifier: Apache-2.0
"""What the demonstration of on-policy tokens consists of."""
