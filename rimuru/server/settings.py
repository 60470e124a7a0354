"""How a server was asked to serve."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rimuru.base.errors import BadInputError

LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))
ADMIN_PATHS = frozenset(("/v1/memory/resize",))
"""What changes the server for all its clients."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?")


@dataclass(frozen=True)
class ServerSettings:
    """Limits and doors. Times in seconds; None = no limit.

    api_keys: any of them opens the API; none given, it is open. admin_keys open it too, and may do what concerns all
    clients (ADMIN_PATHS); without any, that may be done only where everybody on this machine, and nobody else, is let
    in. cors_origins: web pages of these origins may use it ("*" = all). allowed_hosts: further names by which a server
    that only this machine can reach may be called (hosts_at). model_name: what /v1/models says (requests may name any
    model). max_priority: the highest that a request may ask for (lower ones always); clients, told apart by key or
    address, share the engine fairly.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    model_name: str | None = None
    max_waiting: int = 512
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    max_priority: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadInputError(f"the port must be from 0 to 65535, got {self.port}")
        if any(not key or not key.isascii() for key in (*self.api_keys, *self.admin_keys)):
            raise BadInputError("an API key must be a text of ASCII characters that is not empty")
        for name in self.allowed_hosts:
            if host_name(name) is None:
                raise BadInputError(f"an allowed host is a name such as chat.example.org or [fd00::1]; got {name!r}")
        if self.max_waiting < 0 or self.max_body_bytes < 1024:
            raise BadInputError("the queue may not be negative, and bodies of 1024 bytes must be allowed")
        for name, limit_s in (("request", self.request_timeout_s), ("queue", self.queue_timeout_s)):
            if limit_s is not None and not limit_s > 0:
                raise BadInputError(f"the {name} time-out must be above 0 seconds, got {limit_s}")

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK

    @property
    def is_everybody_admin(self) -> bool:
        return self.is_local and not self.api_keys and not self.admin_keys

    def hosts_at(self, address: str) -> frozenset[str] | None:
        """The names by which a server bound to this IP address may be called; None = any, as others than this machine
        can reach it. (A foreign page can point a name of its own at this machine, and a browser would let it read.)"""
        ip = ipaddress.ip_address(address)
        if not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback:
            return None
        own = (f"[{name}]" if ":" in name else name.lower() for name in (*LOOPBACK, self.host, address))
        return frozenset(own).union(name for text in self.allowed_hosts if (name := host_name(text)) is not None)


def host_name(text: str) -> str | None:
    """The name, or address, in a Host header, without the port, in small letters; None where it holds none."""
    match = _HOST.fullmatch(text.lower())
    return None if match is None else match[1]


def read_api_keys(files: Iterable[str]) -> tuple[str, ...]:
    """The keys in files, one a line; empty lines and those that begin with # are none. Other users of the machine see
    a command line, but not such a file. Raises BadInputError for one that cannot be read, or holds no key."""
    keys: list[str] = []
    for file in files:
        try:
            lines = Path(file).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise BadInputError(f"cannot read the API keys in {file}: {reason}") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise BadInputError(f"there is no API key in {file}; write one on a line of its own")
        keys += found
    return tuple(keys)
