# SPDX-License-Identifier: Apache-2.0
"""Routing replay: the trainer uses the experts of the rollout engine.

``experts`` reads the experts of an engine, ``routing_layout`` arranges them in the order of a rank's rows, and
``replay`` passes them to the routers.
"""
