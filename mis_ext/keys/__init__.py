# SPDX-License-Identifier: Apache-2.0
"""How people spell a configuration: keys, presets, and what is nearly one of them."""
