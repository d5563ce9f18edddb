# SPDX-License-Identifier: Apache-2.0
"""What guards, audit and report all ask of log-probs: thresholds, and sums over tokens. No cause has a name here."""
