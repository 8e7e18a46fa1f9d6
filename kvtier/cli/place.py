"""Where pages are that people look at and delete: in a running process, asked over HTTP, or in a directory that nobody
has open."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from kvtier.cli.options import is_there
from kvtier.errors import ConfigError, KVTierError, TierPathError

if TYPE_CHECKING:
    from kvtier.inventory import Group

_TIMEOUT_S = 300.0
"""Every page of every tier is looked at."""

Where = Annotated[
    str,
    typer.Argument(
        metavar="PLACE", help="URL of a connector's HTTP port or of kvtier serve's, or a directory of pages."
    ),
]
Named = Annotated[
    str,
    typer.Argument(metavar="NAMESPACE", help="Its id as kvtier ls prints it, model=NAME, or all.", show_default=False),
]
TokenFile = Annotated[Path | None, typer.Option(help="Holds the token, where one is needed.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def printable(text: str) -> str:
    """For a terminal: names are others' and may hold what would drive it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Place(Protocol):
    name: str

    def rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows as of `kvtier.inventory.row`, and tiers that cannot be listed."""
        ...

    def act(self, action: str, namespace: str, *, dry_run: bool) -> dict[str, Any]:
        """purge, pin or unpin what `namespace` means."""
        ...


def place_of(where: str, token_file: Path | None) -> Place:
    """What `where` names. Raises ConfigError."""
    if where.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(
            f"{where!r}: pages in Redis are not listed by namespace, a server's own tools do that by prefix: "
            "redis-cli --scan --pattern 'kvtier:1:*' | xargs redis-cli unlink"
        )
    if "://" in where:
        from kvtier.cli.top import token_of

        return _Process(where, token_of(token_file))
    path = Path(where).expanduser()
    if not is_there(path) or not path.is_dir():
        raise ConfigError(
            f"{where!r} is no directory, or none that this user may look at: give one, or a URL such as "
            "http://127.0.0.1:9404"
        )
    return _Directory(path)


class _Process:
    """A running one, behind its HTTP port."""

    def __init__(self, url: str, token: str) -> None:
        from kvtier.cli.top import Client

        self._client = Client(url, token, timeout_s=_TIMEOUT_S)
        self.name = self._client.url

    def rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        answer = self._checked(*self._client.get("/api/namespaces"))
        return answer["namespaces"], answer["not_listed"]

    def act(self, action: str, namespace: str, *, dry_run: bool) -> dict[str, Any]:
        ask = {"action": action, "namespace": namespace, "dry_run": dry_run}
        return self._checked(*self._client.post("/api/namespaces", ask))

    def _checked(self, status: int, answer: Any) -> dict[str, Any]:
        if status == 200 and isinstance(answer, dict):
            return answer
        if isinstance(answer, dict) and "error" in answer:
            raise KVTierError(f"{self.name}: {printable(str(answer['error']))}")
        raise KVTierError(f"{self.name} answered with status {status}: is there a kvtier behind it, of this version?")


class _Directory:
    """Directories of a tier that nobody has open; all of them are locked before the first is changed."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        from kvtier.inventory import row

        with ExitStack() as stack:
            return [row(name, group) for name, group in self._groups(self._opened(stack))], []

    def act(self, action: str, namespace: str, *, dry_run: bool) -> dict[str, Any]:
        from kvtier.inventory import chosen

        if action != "purge":
            raise ConfigError(
                f"{self.name!r}: pages are pinned by the process that has them open; start it, and give the URL of its "
                "HTTP port"
            )
        with ExitStack() as stack:
            opened = self._opened(stack)
            groups = chosen([group for _, group in self._groups(opened)], namespace)
            pages = [page for group in groups for page in group.pages]
            if not dry_run:
                gone, deleted = {key for key, _ in pages}, 0
                for tier in opened.values():
                    mine = [key for key, _ in tier.pages if key in gone]
                    try:
                        tier.delete(mine)
                    except TierPathError as error:
                        raise KVTierError(f"{error}; {deleted} of {len(pages)} pages were deleted before") from error
                    deleted += len(mine)
        return {
            "namespaces": sorted({group.id for group in groups}),
            "pages": len(pages),
            "cold_bytes": sum(meta.nbytes for _, meta in pages),
        }

    def _opened(self, stack: ExitStack) -> dict[str, Any]:
        from kvtier.storage_backends.nvme.closed import directories_below, open_closed

        found = directories_below(self._path)
        return {str(path): stack.enter_context(open_closed(path)) for path in found}

    def _groups(self, opened: dict[str, Any]) -> list[tuple[str, Group]]:
        from kvtier.inventory import decode_all, group
        from kvtier.server.keyspace import label_of

        return [
            (name, one)
            for name, tier in opened.items()
            for one in group(tier.pages, decode_all(tier.notes()), label_of)
        ]
