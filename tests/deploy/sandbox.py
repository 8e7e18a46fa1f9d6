"""A pod's network namespace, and containers in it, by the kernel alone. Runs as a process of its own, which `pod.py`
starts below ``unshare --net`` (as root, or with ``--user --map-root-user``): orders come as JSON lines on standard
input, each answered by one.

A container is process 1 of its own process and mount namespace. Its root is a tmpfs with the host's programs and the
named folders bound read-only, and its mounts; it is read-only where that is asked for. The process has the wanted user
and no more capabilities than the wanted ones.
"""

from __future__ import annotations

import ctypes
import fcntl
import http.client
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

NEWNS, NEWUSER, NEWPID = 0x00020000, 0x10000000, 0x20000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, RELATIME = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 1 << 21
)  # fmt: skip
DETACH = 2
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS = 1, 24, 38
CAPABILITIES = {"CHOWN": 0}
DEVICES = ("null", "zero", "full", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = [text.encode() or None for text in (source, str(target), kind)]
    check(libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} on {target}")


def bind(source: Path, target: Path, read_only: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, flags=BIND | REC)
    if read_only:
        kept = os.statvfs(target).f_flag  # a user namespace must keep what the host set
        flags = kept & (NOSUID | NODEV | NOEXEC) | (RELATIME if kept & 4096 else 0)
        mount("", target, flags=BIND | REMOUNT | RDONLY | flags)


def build_root(root: Path, spec: dict[str, Any]) -> None:
    """Make `root` the container's root file system, and this process's."""
    mount("", Path("/"), flags=REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", options="mode=0755")
    for name in ("bin", "lib", "lib64", "sbin", "usr"):
        host = Path("/") / name
        if host.is_symlink():
            (root / name).symlink_to(host.readlink())
        elif host.is_dir():
            bind(host, root / name, True)
    for name in ("ld.so.cache", "localtime", "ssl"):
        if (host := Path("/etc") / name).exists():
            bind(host, root / "etc" / name, True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/:/sbin/nologin\n")
    for device in DEVICES:
        bind(Path("/dev") / device, root / "dev" / device, False)
    (root / "dev" / "shm").mkdir()
    mount("tmpfs", root / "dev" / "shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    (root / "proc").mkdir()
    mount("proc", root / "proc", "proc", NOSUID | NODEV | NOEXEC)
    for source, target, read_only in sorted(spec["mounts"], key=lambda m: m[1]):
        bind(Path(source), root / target.lstrip("/"), read_only)
    for folder in spec["programs"]:  # last: they may lie below /tmp here, which is a volume there
        bind(Path(folder), root / folder.lstrip("/"), True)
    if spec["read_only"]:
        mount("", root, flags=BIND | REMOUNT | RDONLY)
    os.chdir(root)
    check(libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount of the old root")
    os.chdir("/")


_PIVOT_ROOT = 155 if os.uname().machine == "x86_64" else 41


def become(spec: dict[str, Any]) -> None:
    """Take the wanted user, and give up every other right."""
    uid, gid = spec["uid"], spec["gid"]
    check(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if spec["user_namespace"]:
        if uid != 0:  # one user is all that an unprivileged namespace has, so it is given another name
            check(libc.unshare(NEWUSER), "unshare of the user namespace")
            Path("/proc/self/uid_map").write_text(f"{uid} 0 1")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/gid_map").write_text(f"{gid} 0 1")
        return
    kept = {CAPABILITIES[name] for name in spec["capabilities"]}
    for capability in range(64):
        if capability not in kept:
            libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL from the first one that this kernel does not have
    os.setgroups(spec["groups"])
    os.setgid(gid)
    os.setuid(uid)


def run(spec: dict[str, Any]) -> None:
    """The container's process: never returns."""
    try:
        build_root(Path(spec["root"]), spec)
        become(spec)
        libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as error:  # noqa: BLE001 - told on the container's standard error, which the test prints
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(126)


def start(spec: dict[str, Any]) -> int:
    """Start a container; the id of its process outside."""
    reads, writes = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(reads)
        output = os.open(spec["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open("/dev/null", os.O_RDONLY)
        for fd, to in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(fd, to)
        libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            check(libc.unshare(NEWNS | NEWPID), "unshare")
        except OSError as error:
            os.write(2, f"sandbox: {error}\n".encode())
            os._exit(126)
        inner = os.fork()
        if inner == 0:
            os.setsid()
            os.environ["PATH"] = spec["env"].get("PATH", os.defpath)
            run(spec)
        os.write(writes, struct.pack("=i", inner))
        os.close(writes)
        status = os.waitpid(inner, 0)[1]
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
    os.close(writes)
    raw = os.read(reads, 4)
    os.close(reads)
    inner = struct.unpack("=i", raw)[0] if raw else 0
    KEEPERS[inner] = keeper
    return inner


KEEPERS: dict[int, int] = {}
"""The process that waits for a container, by the container's own."""
ENDED: dict[int, int] = {}


def wait(pid: int, timeout_s: float) -> int | None:
    """The container's exit code, 128 and the signal where one ended it; None while it runs."""
    give_up = time.monotonic() + timeout_s
    while pid not in ENDED:
        done, status = os.waitpid(KEEPERS[pid], os.WNOHANG)
        if done:
            ENDED[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > give_up:
            return None
        else:
            time.sleep(0.01)
    return ENDED[pid]


def execute(pid: int, spec: dict[str, Any], argv: list[str], timeout_s: float) -> dict[str, Any]:
    """A command inside a running container, as its user: what exec probes and hooks are."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        try:
            own_user = spec["user_namespace"] and spec["uid"] != 0
            names = (
                ("mnt", "pid", "user") if own_user else ("mnt", "pid")
            )  # the user last: it gives up the right to the rest
            handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
            for handle in handles:
                check(libc.setns(handle, 0), "setns")
            if (inner := os.fork()) == 0:
                become({**spec, "uid": 0} if own_user else spec)
                os.execvpe(argv[0], argv, spec["env"])
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        except BaseException as error:  # noqa: BLE001 - the caller gets it as output
            os.write(2, f"sandbox: {error}\n".encode())
            os._exit(126)
    os.close(writes)
    give_up, code = time.monotonic() + timeout_s, None
    while code is None and time.monotonic() < give_up:
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.01)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    output = os.read(reads, 65536).decode(errors="replace")
    os.close(reads)
    return {"code": code, "output": output}


def ask(host: str, port: int, path: str, timeout_s: float, headers: dict[str, str]) -> dict[str, Any]:
    """A GET from inside the pod's network; its error where there is no answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return {"status": answer.status, "body": answer.read().decode(errors="replace")}
    except OSError as error:
        return {"status": 0, "body": str(error)}
    finally:
        connection.close()


def network_up(address: str) -> None:
    """Loopback, which also gets the pod's own address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.pack("16sH14s", b"lo", 1 | 64, bytes(14))  # up, running
        fcntl.ioctl(control, 0x8914, flags)
        packed = struct.pack("16sHH4s8s", b"lo:1", socket.AF_INET, 0, socket.inet_aton(address), bytes(8))
        fcntl.ioctl(control, 0x8916, packed)
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14s", b"lo:1", 1 | 64, bytes(14)))


def obey(order: dict[str, Any]) -> Any:
    what = order["do"]
    if what == "up":
        return network_up(order["address"])
    if what == "start":
        return start(order["spec"])
    if what == "signal":
        return os.kill(order["pid"], order["signal"])
    if what == "wait":
        return wait(order["pid"], order["timeout_s"])
    if what == "exec":
        return execute(order["pid"], order["spec"], order["argv"], order["timeout_s"])
    return ask(order["host"], order["port"], order["path"], order["timeout_s"], order["headers"])


def main() -> None:
    try:
        for line in sys.stdin:
            try:
                answer = {"ok": obey(json.loads(line))}
            except Exception as error:  # noqa: BLE001 - the test's to judge
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        for inner in KEEPERS:
            if inner and inner not in ENDED:
                os.kill(inner, signal.SIGKILL)
                wait(inner, 10.0)


if __name__ == "__main__":
    main()
