"""Options of a TCP socket that pages go through, at either end."""

from __future__ import annotations

import contextlib
import socket


def tune(connected: socket.socket) -> None:
    """Small requests leave at once, and a peer that is gone is noticed. Towards this machine itself nothing is paced:
    between two processes there is no bandwidth to find out, and BBR, the default of many servers, spends a timer and
    smaller segments on it. Reno paces nothing and is in every kernel; CUBIC paces nothing either, and stays."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connected.getpeername()[0] == connected.getsockname()[0]:
        with contextlib.suppress(OSError):  # not allowed here: what there is serves as well, at its price
            if _congestion_control(connected).startswith(b"bbr"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _congestion_control(connected: socket.socket) -> bytes:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
