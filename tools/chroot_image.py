"""Build a Dockerfile's steps in plain chroots, where no container engine is, and say what the result weighs.

    python tools/chroot_image.py deploy/Dockerfile --work DIR [--bind PATH ...] [--env NAME ...]

As root on Debian with mmdebstrap. FROM debian:... becomes a minimal installation of that release, without manuals, as
the slim images are. Known are FROM, RUN (with SHELL), COPY (--from a stage), ENV, WORKDIR, USER; the rest is for
whoever runs the image. --bind: paths of this machine that steps can read, such as pip's configuration; --env:
variables that they get. DIR/STAGE is left behind; sizes are of files, as in the uncompressed layers of an image.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASES = {"12": "bookworm", "13": "trixie"}
_PRIVATE = "KVTIER_CHROOT_IMAGE_PRIVATE"
SLIM = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale", "info", "lintian")]


@dataclass(slots=True)
class Stage:
    """One FROM: where its root lies, and what its steps run with."""

    root: Path
    name: str
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    env: dict[str, str] = field(default_factory=lambda: {"PATH": os.defpath})
    workdir: str = "/"
    user: str = "0:0"
    base_bytes: int = 0


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Every instruction with what follows it; continued lines are one, comments are left out."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*#", line)]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def size_of(root: Path) -> int:
    """Bytes of the regular files below `root`, a file with several names once, as layers have them."""
    seen, total = set(), 0
    for folder, _, names in os.walk(root):
        for name in names:
            status = (Path(folder) / name).lstat()
            if status.st_ino not in seen and (status.st_mode & 0o170000) == 0o100000:
                seen.add(status.st_ino)
                total += status.st_size
    return total


class Builder:
    def __init__(self, work: Path, bind: list[Path], env: list[str]) -> None:
        self.work, self.bind, self.env = work, bind, {n: os.environ[n] for n in env if n in os.environ}
        self.stages: list[Stage] = []

    def build(self, dockerfile: Path) -> Stage:
        for word, rest in instructions(dockerfile.read_text()):
            if word == "FROM":
                self._from(rest)
                continue
            stage = self.stages[-1]
            print(f"[{stage.name}] {word} {rest[:100]}", flush=True)
            if word == "RUN":
                self.run(stage, [*stage.shell, rest])
            elif word == "COPY":
                self._copy(stage, rest)
            elif word == "ENV":
                stage.env |= dict(part.split("=", 1) for part in shlex.split(rest))
            elif word == "SHELL":
                stage.shell = json.loads(rest)
            elif word == "WORKDIR":
                stage.workdir = rest
                (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif word == "USER":
                stage.user = rest
        return self.stages[-1]

    def run(self, stage: Stage, command: list[str]) -> None:
        """Raises CalledProcessError where it fails."""
        user, _, group = stage.user.partition(":")
        with self._mounted(stage.root):
            inside = ["env", "-i", *(f"{k}={v}" for k, v in {**self.env, **stage.env}.items())]
            inside += ["env", "-C", stage.workdir, *command]
            subprocess.run(["chroot", f"--userspec={user}:{group or user}", str(stage.root), *inside], check=True)

    def _from(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        match = re.match(r"debian:(\d+)", image)
        if match is None:
            raise SystemExit(f"FROM {image}: only debian:NUMBER can be made here")
        stage = Stage(self.work / (name or "final"), name or "final")
        shutil.rmtree(stage.root, ignore_errors=True)
        base = self.work / f"base-{match[1]}"
        if not base.exists():
            print(f"[{stage.name}] FROM {image}: mmdebstrap", flush=True)
            made = ["mmdebstrap", "--quiet", "--variant=minbase", *SLIM, RELEASES[match[1]], str(base)]
            subprocess.run(made, check=True)
        subprocess.run(["cp", "-a", str(base), str(stage.root)], check=True)
        stage.base_bytes = size_of(stage.root)
        self.stages.append(stage)

    def _copy(self, stage: Stage, rest: str) -> None:
        source = ROOT
        words = rest.split()
        if words[0].startswith("--from="):
            name = words.pop(0).partition("=")[2]
            source = next(s.root for s in self.stages if s.name == name)
        *paths, target = words
        into = stage.root / (stage.workdir + "/" if not target.startswith("/") else "").lstrip("/") / target.lstrip("/")
        for path in paths:
            found = source / path.lstrip("/")
            if found.is_dir():  # its content, as Docker does
                into.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", f"{found}/.", str(into)], check=True)
            else:
                into.mkdir(parents=True, exist_ok=True) if target.endswith("/") else None
                shutil.copy2(found, into)
        if source == ROOT:  # what .dockerignore keeps out
            for leftover in [*into.rglob("*.so"), *into.rglob("__pycache__")]:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @contextmanager
    def _mounted(self, root: Path) -> Iterator[None]:
        shared = [Path("/etc/resolv.conf"), *self.bind]
        with ExitStack() as stack:
            for path in [Path("/proc"), Path("/dev"), *shared]:
                inside = root / str(path).lstrip("/")
                made = not inside.exists()
                if path.is_dir():
                    inside.mkdir(parents=True, exist_ok=True)
                elif made:
                    inside.parent.mkdir(parents=True, exist_ok=True)
                    inside.touch()
                subprocess.run(["mount", "--bind", str(path), str(inside)], check=True)
                stack.callback(self._unmount, inside, made)
                if path in shared:  # packages that are installed in there must not write to this machine's files
                    subprocess.run(["mount", "-o", "remount,bind,ro", str(inside)], check=True)
            yield

    @staticmethod
    def _unmount(inside: Path, made: bool) -> None:
        subprocess.run(["umount", str(inside)], check=True)
        if made:
            inside.rmdir() if inside.is_dir() else inside.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the stages")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="a path that steps can read")
    parser.add_argument("--env", action="append", default=[], help="a variable that steps get")
    given = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        print("needs root, and mmdebstrap: apt-get install mmdebstrap", file=sys.stderr)
        return 2
    if os.environ.get(_PRIVATE) != "1":  # mounts of our own end with us, whatever happens: nothing of theirs is deleted
        again = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe(again[0], again, {**os.environ, _PRIVATE: "1"})
    given.work.mkdir(parents=True, exist_ok=True)
    final = Builder(given.work.resolve(), given.bind, given.env).build(given.dockerfile)
    whole = size_of(final.root)
    print(f"base {final.base_bytes / 1e6:.1f} MB, image {whole / 1e6:.1f} MB, in {final.root}")
    for path in sorted((final.root / "opt/kvtier").glob("lib/python*/site-packages/*"), key=size_of)[-8:]:
        print(f"  {size_of(path) / 1e6:6.1f} MB  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
