# SPDX-License-Identifier: Apache-2.0
"""slime and Miles: their arguments, their keys, and their calls."""
