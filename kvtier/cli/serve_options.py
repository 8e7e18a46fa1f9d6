"""The options of ``kvtier serve``, and the configuration block that they stand for."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import Config

Listens = Annotated[
    list[str] | None, typer.Option(help="unix:PATH, tcp:HOST:PORT or tls:HOST:PORT. Repeatable.", show_default=False)
]
Nvmes = Annotated[
    list[str] | None,
    typer.Option(
        help="DIR:SIZE, such as /var/lib/kvtier:200GiB. Repeatable: one per device, of one size.", show_default=False
    ),
]
Http = Annotated[str, typer.Option(help="HOST:PORT of /metrics, /livez and /readyz.", show_default=False)]
HostCapacity = Annotated[str, typer.Option(help="Memory for values, such as 4GiB.", show_default=False)]
PasswordFile = Annotated[Path | None, typer.Option(help="Holds the password that clients need.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file, for tls: listeners.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file, for tls: listeners.")]
TlsClientCa = Annotated[Path | None, typer.Option(help="Clients must show a certificate of this CA.")]
MaxConnections = Annotated[int | None, typer.Option(help="Clients at a time.", show_default="256")]
MaxValue = Annotated[str, typer.Option(help="Largest value.", show_default="512MiB")]


@dataclass(frozen=True, slots=True)
class Given:
    """The options as they came from the command line; empty where not given."""

    listen: list[str] | None
    http: str
    host_capacity: str
    nvme: list[str] | None
    password_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    max_connections: int | None
    max_value: str

    @property
    def any(self) -> bool:
        return any(value not in (None, "", []) for value in astuple(self))

    def block(self) -> Config:
        """The block that says the same. Raises ConfigError."""
        from kvtier.config import parse_config

        if not self.host_capacity:
            raise ConfigError("--host-capacity is missing: say how much memory values may take, such as 4GiB")
        tiers: list[dict[str, Any]] = [{"type": "host", "capacity": self.host_capacity}]
        if self.nvme:
            tiers.append(_nvme(self.nvme))
        names = (
            "listen", "password_file", "tls_cert", "tls_key", "tls_client_ca", "max_connections", "max_value"
        )  # fmt: skip
        server = {name: value for name in names if (value := getattr(self, name)) not in (None, "", [])}
        block: dict[str, Any] = {"tiers": tiers, "server": server or {"listen": ["tcp:127.0.0.1:6380"]}}
        if self.http:
            block["http"] = _http(self.http)
        return parse_config(block)


def _nvme(given: list[str]) -> dict[str, Any]:
    """The tier that ``--nvme DIR:SIZE`` names, given once or several times."""
    from kvtier.config import parse_bytes

    paths, sizes = [], set()
    for text in given:
        path, _, size = text.rpartition(":")
        if not path:
            raise ConfigError(f"--nvme {text} must be DIR:SIZE, such as /var/lib/kvtier:200GiB")
        paths.append(path)
        try:
            sizes.add(parse_bytes(size))
        except ValueError as error:
            raise ConfigError(f"--nvme {text}: the size {error}") from None
    if len(sizes) > 1:
        raise ConfigError(f"--nvme {' --nvme '.join(given)}: directories hold equal shares; give all the same size")
    return {"type": "nvme", "path": paths, "capacity": sizes.pop() * len(paths)}


def _http(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http {text} must be HOST:PORT, such as 127.0.0.1:9404")
    # Naming another address is the permission; the exporter still asks for a token in the environment.
    return {"host": host.strip("[]"), "port": int(port), "allow_remote": True}
