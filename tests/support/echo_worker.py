# SPDX-License-Identifier: Apache-2.0
"""A worker of an engine's process with three commands, which imports no engine, and no torch."""

import os

from grpo.engine_process import serve


class EchoWorker:
    def double(self, *, number):
        return 2 * number

    def refuse(self):
        raise ValueError("no such setting")

    def die(self):
        print("the last words", flush=True)
        os._exit(7)

    def shutdown(self):
        print("shut down", flush=True)


def serve_echo(descriptor):
    serve(descriptor, EchoWorker())
