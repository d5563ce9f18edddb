# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes on one machine, each with its own processes, shared memory, network and name.

Linux alone, as root. What `SecondNode` hides or edits is so on the disk of the second node alone.
"""

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

import mis_ext

FIRST, SECOND = "node-a", "node-b"
ADDRESSES = {FIRST: "10.77.0.1", SECOND: "10.77.0.2"}
LINK, PORT = "mis0", 6399
# gloo uses the address of the hostname unless a device is given.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": LINK, "RAY_ADDRESS": f"{ADDRESSES[FIRST]}:{PORT}"}
# Nobody else is on this cable.
ENVIRONMENT["RAY_AUTH_MODE"] = "disabled"
_APART = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


@dataclass(frozen=True, kw_only=True)
class SecondNode:
    """What is otherwise on the second node.

    Attributes:
        hidden: Folders that are empty there, relative to the repository, or to the folder of the runs.
        edits: File of the repository, a text in it, and its replacement.
    """

    hidden: tuple[str, ...] = ()
    edits: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))


@contextmanager
def two_nodes(
    command: list[str],
    second: SecondNode,
    *,
    root: Path,
    folder: Path,
    scratch: Path,
    environment: Mapping[str, str],
) -> Iterator[list[str]]:
    """Start the second node; yields what starts the first one, and then ``command`` on it.

    Args:
        command: Its Ray must be that at ``RAY_ADDRESS``.
        second: What is otherwise on the second node.
        root: Root of the repository.
        folder: Folder of the runs.
        scratch: For Ray; its sockets lie there, whose paths must be short.
        environment: Environment of the processes of the second node, with `ENVIRONMENT`.

    Raises:
        FileNotFoundError: There is no ``ip``, with which the nodes get their network.
        ChildProcessError: A node ended before it had one.
    """
    if shutil.which("ip") is None:
        raise FileNotFoundError("no ip on this machine, which makes the network of the nodes: install iproute2")
    mounts = [
        f"mount -t tmpfs none {_quoted(root if (root / each).exists() else folder, each)}" for each in second.hidden
    ]
    for number, (path, (old, new)) in enumerate(second.edits.items()):
        text = (root / path).read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r}"
        edited = scratch / f"edited{number}"
        edited.write_text(text.replace(old, new), encoding="utf-8")
        mounts.append(f"mount --bind {edited} {_quoted(root, path)}")
    ready = f"until echo > /dev/tcp/{ADDRESSES[FIRST]}/{PORT}; do sleep 1; done 2>&-"
    ray_folder = scratch / "ray"
    ray_folder.mkdir()
    # Not the first node's sockets.
    mounts.append(f"mount -t tmpfs none {ray_folder}")
    join = _ray(SECOND, f"--address={ENVIRONMENT['RAY_ADDRESS']}", "--block")
    with ExitStack() as stack:
        log = stack.enter_context((folder / f"{SECOND}.log").open("w"))
        started = [
            subprocess.Popen(words, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            for words in (
                ["unshare", "--net", "sleep", "infinity"],
                [*_APART, "--net", "bash", "-ec", "; ".join([_named(SECOND), *mounts, ready, f"exec {join}"])],
            )
        ]
        for process in started:
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
        _link(started, Path(log.name))
        first = started[0].pid
        head = _ray(FIRST, "--head", f"--port={PORT}", f"--temp-dir={ray_folder}", "--include-dashboard=false")
        # Not `exec`: the first process of a node takes in those that have lost their parent.
        work = f"{_named(FIRST)}; {head}; {shlex.join(command)}"
        yield ["nsenter", f"--net=/proc/{first}/ns/net", *_APART, "bash", "-ec", work]


def _link(processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    """A cable between the networks of two processes. It goes when they end.

    Raises:
        ChildProcessError: One ended, as where a process may not have a network of its own; with the log.
    """
    for process in processes:
        try:
            while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.1)
        except FileNotFoundError:
            raise ChildProcessError(f"a node ended: {log.read_text(encoding='utf-8')}") from None
    ends = [f"{LINK} netns {process.pid}" for process in processes]
    subprocess.run(f"ip link add {ends[0]} type veth peer name {ends[1]}".split(), check=True)


def _named(node: str) -> str:
    up = f"ip link set lo up; until ip link set {LINK} up 2>&-; do sleep 0.1; done"
    return f"hostname {node}; mount -t tmpfs none /dev/shm; {up}; ip addr add {ADDRESSES[node]}/24 dev {LINK}"


def _ray(node: str, *words: str) -> str:
    fixed = [f"--node-ip-address={ADDRESSES[node]}", "--num-gpus=1", "--num-cpus=8", "--disable-usage-stats"]
    return shlex.join([sys.executable, "-m", "ray.scripts.scripts", "start", *fixed, *words])


def _quoted(folder: Path, path: str) -> str:
    return shlex.quote(str(folder / path))


@functools.wraps(mis_ext.compute_mis_weights_with_cp)
def dies(**given: Any) -> Any:
    """The hook, but the last rank is killed when it is called, while the other ranks wait for it in their call."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return mis_ext.compute_mis_weights_with_cp(**given)
