# SPDX-License-Identifier: Apache-2.0
"""Conversations: the calls of one, its turn boundaries, and the training samples that come of it."""
