# SPDX-License-Identifier: Apache-2.0
"""What frameworks need from the correction. A host adapter knows its framework; nothing else does."""
