"""70 ms less for each micro-batch: what the JVM has sent to a Python worker is acknowledged at once.

The JVM sends a task in small pieces, what to run, what to read, Arrow's schema, a batch, over TCP on the
loopback device and without ``TCP_NODELAY``. A piece waits until the one before it is acknowledged (Nagle, RFC
896), and Linux puts an acknowledgement off by 40 ms (RFC 1122 4.2.3.2) in a connection whose sides took turns
before, as that of a worker has that is used again. Asked for once, prompt acknowledgements go on until this
side sends, which a sink does when it has all of its rows. The first code of ours in a reading task is what
unpickles the reader, before its ranges have come; in others what is called with their rows. With
``spark.python.unix.domain.socket.enabled`` nothing is to be acknowledged.
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
