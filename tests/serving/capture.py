"""Every byte that a port sends over the loopback interface, as the kernel shows it to root."""

import socket
import struct
import threading
from collections import defaultdict
from typing import Self

ALL, OUTGOING = 3, 4  # every protocol; a packet is seen when it is sent and when it comes
FORCED, SOL_PACKET, STATISTICS = 33, 263, 6  # SO_RCVBUFFORCE and the counts of a packet socket
SYN = 2


class Capture:
    """Records what some ports send, connection by connection, until it is closed.

    Attributes
    ----------
    ports : set of int
        Of the servers.
    """

    def __init__(self):
        self.ports: set[int] = set()
        self.tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
        self.tap.setsockopt(socket.SOL_SOCKET, FORCED, 2**28)
        self.tap.bind(("lo", 0))
        self.tap.settimeout(0.2)
        self.begins: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.segments: dict[tuple[int, int, int], dict[int, bytes]] = defaultdict(dict)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()
        _, dropped = struct.unpack("II", self.tap.getsockopt(SOL_PACKET, STATISTICS, 8))
        self.tap.close()
        assert not dropped, f"{dropped} packets were not recorded"

    def _read(self) -> None:
        while not self.ended.is_set():
            try:
                packet, (_, _, kind, *_) = self.tap.recvfrom(2**17)
            except TimeoutError:
                continue
            if kind == OUTGOING and packet[12:14] == b"\x08\x00" and packet[23] == socket.SOL_TCP:
                self._keep(packet[14:])

    def _keep(self, packet: bytes) -> None:
        """Keep the bytes of an IPv4 packet."""
        (length,) = struct.unpack_from("!H", packet, 2)
        tcp = packet[4 * (packet[0] & 15) : length or None]  # 0: longer than two bytes can say
        source, target, number, _, offset, flags = struct.unpack_from("!HHIIBB", tcp)
        if source not in self.ports:
            return
        begins = self.begins[source, target]
        if flags & SYN:
            begins.append(number + 1)
        data = tcp[4 * (offset >> 4) :]
        if data and begins:  # else the connection is older than the interest in its port
            begin = begins[-1]
            at = (number - begin) % 2**32
            kept = self.segments[source, target, begin]
            kept[at] = max(kept.get(at, b""), data, key=len)

    def streams(self) -> list[bytes]:
        """Return what was sent in each connection.

        Raises
        ------
        AssertionError
            When a part of it was not recorded.
        """
        found = []
        for segments in self.segments.values():
            sent = b""
            for at, data in sorted(segments.items()):
                assert at <= len(sent), "a part was not recorded"
                sent += data[len(sent) - at :]
            found.append(sent)
        return found
