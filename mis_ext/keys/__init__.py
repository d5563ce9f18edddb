# SPDX-License-Identifier: Apache-2.0
"""Keys and presets: from user files to configuration objects."""
