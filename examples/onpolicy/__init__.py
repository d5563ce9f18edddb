# SPDX-License-Identifier: Apache-2.0
"""The demonstration that a trainer and an inference engine can be bitwise equal."""
