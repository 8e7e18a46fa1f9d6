"""Who may use the cache server, and which keys are theirs."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError

PASSWORD_VARIABLE = "KVTIER_SERVER_PASSWORD"
DEFAULT_USER = "default"


@dataclass(frozen=True, slots=True)
class User:
    """prefixes: of the keys that the user sees and can touch; none: all keys. quota_bytes 0: no limit. priority: of
    the values under its keys (`PageMeta.priority`)."""

    name: str
    secret: bytes | None = field(repr=False)
    prefixes: tuple[bytes, ...] = ()
    read_only: bool = False
    quota_bytes: int = 0
    priority: int = 0

    def owns(self, key: bytes) -> bool:
        return not self.prefixes or key.startswith(self.prefixes)


class Users:
    """Without a password and without users, everybody is the default user, who sees all keys. With a password, the
    default user has it; with users alone, there is no default user. Immutable, so thread-safe."""

    def __init__(self, users: Sequence[User] = (), password: str = "") -> None:
        self._users: dict[str, User] = {}
        for user in users:
            if user.name in self._users:
                raise ConfigError(f"server users: {user.name!r} is there twice; give every user a name of its own")
            if user.name == DEFAULT_USER:
                raise ConfigError(
                    "server users: the default user gets its password by password_file; take another name"
                )
            self._users[user.name] = user
        if password:
            self._users[DEFAULT_USER] = User(DEFAULT_USER, digest(password))
        self.open_to_all = not self._users
        self._quotas = tuple(u for u in self._users.values() if u.quota_bytes)
        self._ranked = tuple(u for u in self._users.values() if u.priority)
        self.have_quotas = bool(self._quotas)
        self.rank_values = bool(self._ranked)
        """Whether not all values have priority 0."""

    @property
    def first(self) -> User | None:
        """Who a new connection is before it says a name; None: nobody."""
        return User(DEFAULT_USER, None) if self.open_to_all else None

    def authenticate(self, name: str, password: bytes) -> User | None:
        """The user, or None where name or password are wrong. Takes equally long for both."""
        user = self._users.get(name)
        secret = user.secret if user is not None and user.secret is not None else b"\0" * 32
        right = hmac.compare_digest(secret, hashlib.sha256(password).digest())
        return user if right else None

    def owner(self, key: bytes) -> str:
        """The name of the user with a quota whose keys include `key`; empty for nobody."""
        return next((u.name for u in self._quotas if u.owns(key)), "") if self._quotas else ""

    def priority(self, key: bytes) -> int:
        """Of a value under `key`: that of the first user who has one and whose keys include it."""
        return next((u.priority for u in self._ranked if u.owns(key)), 0)

    def quota(self, name: str) -> int:
        """Bytes that the keys of `name` may have; 0: no limit."""
        user = self._users.get(name)
        return 0 if user is None else user.quota_bytes


def digest(password: str) -> bytes:
    return hashlib.sha256(password.encode()).digest()


def read_password(option: str, path: Path | None, variable: str = "") -> str:
    """The password in the file `path`, or else in the environment variable; empty where there is none."""
    if path is None:
        return os.environ.get(variable, "") if variable else ""
    try:
        password = path.expanduser().read_text().strip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"{option} = {str(path)!r} cannot be read: {reason}; name a file that this user can read"
        ) from e
    if not password:
        raise ConfigError(f"{option} = {str(path)!r} is empty: put the password into it")
    return password
