# SPDX-License-Identifier: Apache-2.0
"""The experts that the rollout engine chose, in the trainer.

``experts`` reads what an engine chose, ``routing_layout`` puts that in the order of a rank's rows, and ``replay`` gives
it to the routers.
"""
