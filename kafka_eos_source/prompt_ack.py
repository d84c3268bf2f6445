"""40 ms less for each micro-batch: what the JVM has sent to this Python worker is acknowledged at once.

The JVM sends a reading task in two small pieces, what to run and what to read, over TCP on the loopback
device and without ``TCP_NODELAY``. The second piece waits until the first is acknowledged (Nagle, RFC 896),
and Linux puts an acknowledgement off by 40 ms (RFC 1122 4.2.3.2) in a connection whose sides took turns
before, as that of a worker has that is used again. The first code of ours in a task is what unpickles the
reader, and it runs between the two. With ``spark.python.unix.domain.socket.enabled`` nothing is to be
acknowledged.
"""

from __future__ import annotations

import ctypes
import os
import socket

_DESCRIPTORS = "/proc/self/fd"


def acknowledge() -> int:
    """Acknowledges on every TCP connection of this process, and says on how many; on Linux alone."""
    option = getattr(socket, "TCP_QUICKACK", None)
    if option is None or not os.path.isdir(_DESCRIPTORS):
        return 0
    yes = ctypes.c_int(1)
    # by the C library: a Python socket of a descriptor that is another's may change how that one waits
    call = ctypes.CDLL(None).setsockopt
    done = [
        call(int(fd), socket.IPPROTO_TCP, option, ctypes.byref(yes), ctypes.sizeof(yes))
        for fd in os.listdir(_DESCRIPTORS)
    ]
    return done.count(0)  # the others are no sockets, or not TCP's
