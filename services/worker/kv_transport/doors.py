"""Guard of the ports on which UCX listens on tcp: who may come in there.

UCX believes whoever speaks its language: a few bytes that begin like a message of a peer end the process. So the kernel is
told to drop what comes from hosts that are not peers' (a socket filter on the listening socket; most kernels take one from
anybody, some only with CAP_NET_ADMIN). From the others, UCX closes a connection that does not begin with its magic number,
within milliseconds, but waits for ever for one that says nothing, or half of what begins a conversation. Its sockets are
this process's: they are found among the open files by their port, and one on which UCX has answered nothing for
`HANDSHAKE_S` is shut down, which UCX takes for its peer's doing.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
MAX_WAITING = 64
"""Connections that UCX has not answered yet; of more, the oldest are closed at once."""
_SIOCGIFADDR = 0x8915
_DATA_SEGMENTS_OUT = struct.Struct("@156xI")
"""In Linux's `struct tcp_info`."""
MAX_HOSTS = 1000
"""Most hosts from which connections are let in; the one that was named longest ago is forgotten first."""
_SO_ATTACH_FILTER = 26
_SO_MEMINFO = 55
_NUM_MEMINFO, _DROPS = 9, 8
_SOURCE = -0x100000 + 12
"""Offset at which a socket filter reads an IPv4 packet's source."""
_INSTRUCTION = struct.Struct("=HBBI")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class PortRange:
    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.last < 1 << 16:
            raise ValueError(f"no range of ports: {self.text}")

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """`FIRST-LAST`. Raises `ValueError`."""
        first, _, last = text.partition("-")
        return cls(int(first), int(last))

    @property
    def text(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last


KV_PORTS = PortRange(20100, 20355)


class Doors:
    """The tcp sockets of this process that listen on one of `ports`, and those that came in there. Its methods read
    `/proc`, in about a millisecond for a hundred open files."""

    def __init__(self, ports: PortRange) -> None:
        self._ports = ports
        self._listening: dict[int, int] = {}
        """UCX's descriptors that listen, and their inodes. Copies live for one call only: UCX closes its own when it cannot
        take a connection for want of descriptors, and would try again for ever on a socket that a copy keeps open."""
        self._hosts: dict[str, None] = {}
        self._is_filtered = False
        self._num_dropped = 0
        self._since: dict[int, float] = {}
        """Times at which connections that UCX has not answered were first seen, by inode."""

    def find(self) -> list[tuple[str, int]]:
        """Finds where this process listens. To be called first, when it does."""
        found: dict[tuple[str, int], None] = {}
        for number, inode, one in self._sockets():
            with one:
                if _listens(one):
                    self._listening[number] = inode
                    found[one.getsockname()[:2]] = None
        return list(found)

    def are_open(self) -> bool:
        """Whether UCX has closed none of those that `find` found."""
        return all(_inode(number) == inode for number, inode in self._listening.items())

    def admit(self, host: str) -> None:
        """Lets connections from this IPv4 address in, and none from those that were not named here. Raises `OSError` for
        what is no such address."""
        socket.inet_aton(host)
        is_new = host not in self._hosts
        self._hosts.pop(host, None)
        self._hosts[host] = None
        if len(self._hosts) > MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        if not is_new:
            return
        program = filter_of(list(self._hosts))
        code = ctypes.create_string_buffer(program, len(program))
        num_instructions = len(program) // _INSTRUCTION.size
        for door in self._open_doors():
            try:
                fprog = struct.pack("@HP", num_instructions, ctypes.addressof(code))
                door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
                self._is_filtered = True
            except OSError as error:
                effect = f"does not let {host} in" if self._is_filtered else "takes connections of any host"
                logger.warning("the KV port %s: the kernel takes no filter: %s", effect, error)

    def num_dropped(self) -> int:
        """What the kernel has dropped since the last call, in packets: an attempt to connect is repeated by its maker."""
        total = 0
        for door in self._open_doors():
            memory = door.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * _NUM_MEMINFO)
            total += struct.unpack(f"@{len(memory) // 4}I", memory)[_DROPS] if len(memory) == 4 * _NUM_MEMINFO else 0
        since = max(0, total - self._num_dropped)
        self._num_dropped += since
        return since

    def sweep(self, now: float) -> list[str]:
        """Closes what waits for too long; returns the hosts it came from. Raises `OSError` where there is no descriptor
        left to look."""
        waiting = {inode: link for _, inode, link in self._sockets() if not (_listens(link) or _is_answered(link))}
        self._since = {inode: self._since.get(inode, now) for inode in waiting}
        closed = []
        for inode in overdue(self._since, now):
            try:
                closed.append(str(waiting[inode].getpeername()[0]))
                waiting[inode].shutdown(socket.SHUT_RDWR)
            except OSError:  # it has gone by itself
                continue
        return closed

    def _open_doors(self) -> Iterator[socket.socket]:
        for number, inode in self._listening.items():
            if (copy := _copy(number)) is not None:
                with copy:
                    if _inode(copy.fileno()) == inode:
                        yield copy

    def _sockets(self) -> Iterator[tuple[int, int, socket.socket]]:
        """Their descriptors and inodes, and each on a descriptor of our own, which stays that socket's whatever UCX closes
        meanwhile."""
        for name in os.listdir("/proc/self/fd"):
            if (copy := _copy(int(name))) is None:
                continue
            is_inet = copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_inet and copy.getsockname()[1] in self._ports:
                yield int(name), _inode(copy.fileno()), copy
            else:
                copy.close()


def _inode(number: int) -> int:
    """0: it is not open."""
    try:
        return os.fstat(number).st_ino
    except OSError:
        return 0


def _copy(number: int) -> socket.socket | None:
    """A socket on a descriptor of our own; None for what is no socket, and where there is no descriptor left."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        own = os.dup(number)
    except OSError:  # closed since
        return None
    try:
        return socket.socket(fileno=own)
    except OSError:  # another file has its number since
        os.close(own)
        return None


def filter_of(hosts: Sequence[str]) -> bytes:
    """The socket filter (classic BPF) that passes what comes from one of these IPv4 addresses."""
    load, jump_equal, leave = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, _SOURCE & 0xFFFFFFFF)]
    for host in hosts:
        lines += [(jump_equal, 0, 1, int.from_bytes(socket.inet_aton(host))), (leave, 0, 0, 0xFFFFFFFF)]
    return b"".join(_INSTRUCTION.pack(*line) for line in [*lines, (leave, 0, 0, 0)])


def overdue(since: Mapping[int, float], now: float) -> list[int]:
    """Which of those that wait are to be closed, oldest first."""
    oldest = sorted(since, key=since.__getitem__)
    surplus = len(oldest) - MAX_WAITING
    return [one for i, one in enumerate(oldest) if i < surplus or now - since[one] >= HANDSHAKE_S]


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_answered(link: socket.socket) -> bool:
    size = _DATA_SEGMENTS_OUT.size
    (num_segments,) = _DATA_SEGMENTS_OUT.unpack(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size))
    return bool(num_segments)


def devices_at(address: str) -> str:
    """What UCX may use here so that it listens on tcp at one IPv4 address only: that address's interface, and RDMA
    devices, which do not listen. Raises `OSError` where no interface has it as its first address."""
    interface = "lo" if address.startswith("127.") else ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                interface = name
                break
    if not interface:
        raise OSError(f"no interface of this machine has the address {address}")
    rdma = sorted(f"{port.parent.parent.name}:{port.name}" for port in _INFINIBAND.glob("*/ports/*"))
    return ",".join([interface, *rdma])
