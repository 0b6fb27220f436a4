"""Loopback ports: whether one is free, and who holds it if the kernel tells."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

#: The ports that may be asked for.
FIRST, LAST = 1024, 65535
_LISTEN = "0A"


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1 at this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def next_free(port: int, *without: int) -> int:
    """The nearest free port above one, or below it at the end of the range."""
    others = itertools.chain(range(port + 1, LAST + 1), range(port - 1, FIRST - 1, -1))
    return next(other for other in others if other not in without and is_free(other))


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holder(port: int) -> str:
    """A word on the process that listens on a port, or an empty string when the kernel does not tell."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            inodes |= listening_inodes(Path(table).read_text(), port)
        except OSError:
            continue
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(descriptor.readlink()) in wanted for descriptor in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()}, process {process.name}"
        except OSError:
            continue  # another user's process, or one that has just ended
    return ""


def listening_inodes(table: str, port: int) -> set[str]:
    """The sockets that listen on a port, in the text of /proc/net/tcp."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found
