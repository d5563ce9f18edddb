# SPDX-License-Identifier: Apache-2.0
"""Keys and presets: from what a user writes to configuration objects."""
