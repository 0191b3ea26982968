"""Checks the address of process 0, where the processes of a job meet, before JAX uses it. No JAX."""

from __future__ import annotations

import errno
import socket
import time

from tlt_jax.errors import ConfigError

RETRY_S = 0.2  # seconds between two attempts to reach process 0
ANSWER_S = 20.0  # seconds within which a coordination service answers on its port
# An HTTP/2 (gRPC) client starts with this preface and empty settings; a server answers with its settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # type of a settings frame, in its fourth byte


def split(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"the coordinator's address is {address!r}: write HOST:PORT")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """Raises ConfigError when process 0 cannot listen on the port, where JAX's service would abort the process."""
    _, port = split(address)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            trial.bind(("", port))
            trial.listen(1)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # not a question of the port, such as a missing address family: left to JAX
        reason = "is taken by another program" if error.errno == errno.EADDRINUSE else "needs root"
        raise ConfigError(
            f"port {port} of process 0 ({address}) {reason}: name another one for all processes"
        ) from error


def await_service(address: str, seconds: float) -> None:
    """Returns once a coordination service answers at the address; also after `seconds`, when JAX reports the timeout.

    Raises ConfigError when another program answers, or accepts connections without an answer, for ANSWER_S seconds: then
    process 0 did not get its port.
    """
    end, since = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            with socket.create_connection(split(address), timeout=5.0) as connection:
                since = since or time.monotonic()
                connection.sendall(PREFACE)
                if is_settings(connection):
                    return
        except OSError:
            pass  # nothing listens yet, or the connection was closed
        if since and time.monotonic() - since > ANSWER_S:
            raise ConfigError(
                f"another program than process 0 answers at {address}: name another port for all processes"
            )
        time.sleep(RETRY_S)


def is_settings(connection: socket.socket) -> bool:
    """Whether the first received frame is the settings of an HTTP/2 server."""
    head = b""
    while len(head) < 4 and (more := connection.recv(4 - len(head))):
        head += more
    return len(head) == 4 and head[3] == SETTINGS
