# SPDX-License-Identifier: Apache-2.0
"""The custom generate function of slime and Miles."""
