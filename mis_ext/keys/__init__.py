# SPDX-License-Identifier: Apache-2.0
"""How people spell a configuration: flat keys, the native mapping, presets, and what is nearly one of them."""
