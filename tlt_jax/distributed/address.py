"""The address of process 0, at which the processes of a job find each other: tried before JAX uses it. No JAX."""

from __future__ import annotations

import errno
import socket
import time

from tlt_jax.errors import ConfigError

LOOK_S = 0.2  # from one attempt to reach process 0 to the next
ANSWER_S = 20.0  # seconds within which a coordination service that has the port answers
# A client of HTTP/2, which gRPC speaks, begins with this and empty settings; a server answers with its settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # the type of such a frame, in its fourth byte


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"the coordinator's address is {address!r}: write HOST:PORT")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """Raises ConfigError when process 0 cannot listen on the port; JAX's service would end the process with a signal."""
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
            return  # no such family here: JAX says what it finds
        reason = "is taken by another program" if error.errno == errno.EADDRINUSE else "needs root"
        raise ConfigError(
            f"port {port} of process 0 ({address}) {reason}: name another one for all processes"
        ) from error


def await_service(address: str, seconds: float) -> None:
    """Returns once a coordination service answers at the address, or after so many seconds, for JAX to say so.

    Raises ConfigError when something else has answered, or taken the connection and been silent, for ANSWER_S seconds:
    then process 0 did not get its port, and will not come.
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
            pass  # nobody is there yet, or what was there closed the connection
        if since and time.monotonic() - since > ANSWER_S:
            raise ConfigError(
                f"another program than process 0 answers at {address}: name another port for all processes"
            )
        time.sleep(LOOK_S)


def is_settings(connection: socket.socket) -> bool:
    """Whether the first frame that comes is the settings of an HTTP/2 server."""
    head = b""
    while len(head) < 4 and (more := connection.recv(4 - len(head))):
        head += more
    return len(head) == 4 and head[3] == SETTINGS
