"""The program that runs other programs in a sandbox: `python -I -B jail.py`, a job on standard
input, a report on standard output. See `sandbox`, which starts it. Standard library only.

It leaves the machine step by step: new namespaces; a fork, whose child is the first process in
them; there a root file system in memory with the system's programs, read-only; no capability, no
way to get one. That process then forks one child a program, and none of that child's own children
outlives it: to end the first process, or to have it kill all others, ends them all.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import resource
import runpy
import secrets
import select
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BOX = "/box"
"""Where a program may write, and begins."""
READY = "ready\n"
"""Said before the first program: what goes wrong afterwards is a program's doing."""
_NEW_ROOT = "/sys"
"""Built over this folder: no program lies in it."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# of <sched.h>, <sys/mount.h> and <sys/prctl.h>
_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_NOSUID, _NODEV = 0x2, 0x4
_DETACH = 0x2
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _SET_CHILD_SUBREAPER = 1, 4, 22, 24, 36
_SET_NO_NEW_PRIVS = 38
_SYS_MOUNT_SETATTR = 442  # on all architectures
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_CALLS = ("shmget", "msgget", "semget", "add_key", "request_key", "keyctl", "unshare", "setns",
          "mount", "ptrace", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup",
          "clone3", "clone", "socket")  # fmt: skip
"""What no program may call: memory that no limit counts, what is kept by the machine's kernel and
not by a namespace, and namespaces in which it had rights; of the last two only some."""
_X86_64 = (29, 68, 64, 248, 249, 250, 272, 308, 165, 101, 321, 298, 323, 425, 435, 56, 41)
_GENERIC = (194, 186, 190, 217, 218, 219, 97, 268, 40, 117, 280, 241, 282, 425, 435, 220, 198)
_NUMBERS = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _GENERIC),
    "riscv64": (0xC00000F3, _GENERIC),
}
"""By machine: how <linux/audit.h> calls it, and its numbers of _CALLS."""
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read a job, leave the machine, run its programs, write what came of each."""
    job = json.loads(sys.stdin.buffer.read())
    if job["box"] is not None:
        _prctl(_SET_CHILD_SUBREAPER, 1)
        _give_up_root(job["box"])
        _end_with(job["parent"])
        _serve(job, job["box"], kill=_kill_children)
        return
    _leave()
    _end_with(job["parent"])
    first = os.fork()
    if first:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    _build_root(job["paths"], job["box_mb"])
    _drop_rights()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    _serve(job, BOX, kill=_kill_all)


def _serve(job: dict[str, Any], box: str, kill: Callable[[int], None]) -> None:
    """Run the programs of a job, each in a child of this process."""
    os.chdir(box)
    Path("solution.py").write_text(job["code"], encoding="utf-8", errors="replace")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler would let a program end this
    sys.stdout.write(READY)
    sys.stdout.flush()
    deadline = time.monotonic() + job["total_s"]
    report: list[dict[str, Any]] = []
    for case in job["cases"]:
        limit_s = min(job["time_s"], deadline - time.monotonic())
        if limit_s <= 0:
            report.append({"status": None})
            continue
        output, results = _new_file(b""), os.pipe()
        nonce = secrets.token_bytes(16)
        child = os.fork()
        if child == 0:
            _become(job, case, output, results[1])
            _run(job["code"], case, results[1], nonce)
            return
        os.close(results[1])
        status = _wait(child, limit_s)
        kill(child)
        report.append({"status": status, **_found(job, case, output, results[0], nonce)})
    sys.stdout.write(json.dumps(report))


def _found(
    job: dict[str, Any], case: dict[str, Any], output: int, results: int, nonce: bytes
) -> dict[str, Any]:
    """What a program that has ended left behind: its output, or which of its tests passed."""
    with os.fdopen(results, "rb") as told, os.fdopen(output, "rb") as printed:
        os.set_blocking(results, False)
        if "tests" not in case:
            printed.seek(0)
            return {"output": printed.read(job["keep_bytes"]).decode("latin-1")}
        said = told.read(len(nonce) + len(case["tests"]) + 1) or b""
    is_whole = len(said) == len(nonce) + len(case["tests"])
    return {"passed": list(said[len(nonce) :]) if is_whole and said.startswith(nonce) else []}


def _new_file(content: bytes) -> int:
    """The descriptor of a file in memory, at its beginning. Not in the box, which may be full."""
    descriptor = os.memfd_create("file")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _become(job: dict[str, Any], case: dict[str, Any], output: int, results: int) -> None:
    """Make of this process the one that runs a program: its limits and its files."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(_new_file(case.get("input", "").encode("utf-8", "replace")), 0)
    os.dup2(output, 1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.closerange(3, results)
    os.closerange(results + 1, 1 << 16)
    megabyte = 1 << 20
    for name, limit in (
        (resource.RLIMIT_CPU, max(1, round(job["time_s"] + 0.5))),
        (resource.RLIMIT_AS, job["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, job["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, job["files"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(name)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(name, (limit, limit))
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), "utf-8", "replace")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace")


def _run(code: str, case: dict[str, Any], results: int, nonce: bytes) -> None:
    """The program alone; or with tests, of which it tells which hold."""
    if "tests" not in case:
        os.close(results)
        runpy.run_path("solution.py", run_name="__main__")
        sys.stdout.flush()
        return
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = vars(module)
    # as they are now: a program may put others in the place of what is looked up later
    run, read, tell, raised, told = exec, compile, os.write, BaseException, bytearray(nonce)
    run(read(code, "solution.py", "exec"), names)
    for test in case["tests"]:
        try:
            run(read(test, "test", "exec"), names)
            told.append(1)
        except raised:  # sys.exit among them: a test that ends the program has not passed
            told.append(0)
    tell(results, told)


def _wait(child: int, limit_s: float) -> int | None:
    """The exit status of a child, below 0 for a signal; None if it takes longer."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], limit_s)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(handle)


def _kill_all(_: int) -> None:
    """Kill all there are: of the first process in a namespace, all but itself."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _kill_children(child: int) -> None:
    """Kill the children of this process until there are none: those whose parent has ended become
    its own."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for one in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(one), signal.SIGKILL)
            os.waitpid(-1, 0)


def _leave() -> None:
    """New namespaces for what comes next. Root needs no user namespace, and would be root there."""
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        flags |= _NEW_USER
    _check("unshare", _libc.unshare(flags))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _build_root(paths: list[str], box_mb: int) -> None:
    """A root with what Python needs of the machine, read-only, and an empty folder in memory."""
    _mount("none", "/", None, _REC | _PRIVATE)
    root = Path(_NEW_ROOT)
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _NOSUID, "mode=755,size=1m")
    for path in (*_SYSTEM, *_DEVICES, *paths):
        inside = root / path.removeprefix("/")
        if not os.path.lexists(path) or os.path.lexists(inside):
            continue
        inside.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(path):
            inside.symlink_to(os.readlink(path))
            continue
        inside.mkdir() if os.path.isdir(path) else inside.touch()
        _mount(path, str(inside), None, _BIND | _REC)
    box = root / BOX.removeprefix("/")
    box.mkdir()
    attributes = (ctypes.c_uint64 * 4)(0x1 | 0x2)  # read-only, no set-user-ID; of all beneath
    size = ctypes.sizeof(attributes)
    arguments = (-100, _NEW_ROOT.encode(), 0x8000, attributes, ctypes.c_size_t(size))
    _check("mount_setattr", _libc.syscall(_SYS_MOUNT_SETATTR, *arguments))
    # empty files take memory too, which `size` does not count
    options = f"mode=1777,size={box_mb}m,nr_inodes={box_mb * 256}"
    _mount("tmpfs", str(box), "tmpfs", _NOSUID | _NODEV, options)
    os.chdir(root)
    machine = os.uname().machine
    if machine not in _SYS_PIVOT_ROOT:
        raise OSError(f"on {machine} the number of pivot_root is not known")
    _check("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[machine], b".", b"."))
    _check("umount", _libc.umount2(b".", _DETACH))  # the old root, which lay beneath
    os.chdir("/")


def _new_user() -> int:
    """One who has no other process: the limit of processes counts all of a user's."""
    return 20_000 + int(secrets.randbelow(40_000))


def _drop_rights() -> None:
    """Become a user with no right at all, for good."""
    if os.geteuid() == 0:
        for capability in range(64):
            if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
        _become_user(_new_user())
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of capset
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _prctl(_SET_DUMPABLE, 0)  # a program may not look into this process
    _forbid_calls()


def _forbid_calls() -> None:
    """Have the kernel refuse _CALLS to this process and all that it starts: a filter of seccomp(2),
    which is a program of <linux/bpf_common.h>."""
    architecture, numbers = _NUMBERS[os.uname().machine]
    load, equal, at_least, has_bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    number_at, architecture_at, first_argument_at = 0, 4, 16
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x50000 | errno.EPERM)
    absent, kill = (end, 0, 0, 0x50000 | errno.ENOSYS), (end, 0, 0, 0x80000000)
    *never, clone3, clone, new_socket = numbers
    # each: what is done, the steps to skip if it holds and if it doesn't, and with what
    steps = [
        (load, 0, 0, architecture_at),
        (equal, 1, 0, architecture),
        kill,
        (load, 0, 0, number_at),
        (at_least, 0, 1, 1 << 30),  # the same calls by their numbers of x32
        refuse,
    ]
    for number in never:
        steps += [(equal, 0, 1, number), refuse]
    steps += [(equal, 0, 1, clone3), absent]  # its flags can't be seen; the C library has clone
    steps += [(equal, 0, 4, clone), (load, 0, 0, first_argument_at)]
    steps += [(has_bits, 0, 1, _NEW_USER), refuse, allow]
    # vsock reaches the host of a virtual machine from any network namespace
    steps += [(equal, 0, 3, new_socket), (load, 0, 0, first_argument_at)]
    steps += [(equal, 1, 0, socket.AF_UNIX), refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    filtering = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    _check("seccomp", _libc.prctl(_SET_SECCOMP, 2, filtering, 0, 0))


def _become_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _give_up_root(box: str) -> None:
    """Without namespaces root at least becomes a user who owns nothing but the box."""
    if os.geteuid() == 0:
        user = _new_user()
        os.chown(box, user, user)
        _become_user(user)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _prctl(_SET_DUMPABLE, 0)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process with the one that has started it, however that ends. A
    change of user would undo it."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that asked has ended")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    of_kind = None if kind is None else kind.encode()
    arguments = (source.encode(), target.encode(), of_kind, flags, options.encode())
    _check(f"mount of {source} at {target}", _libc.mount(*arguments))


def _prctl(option: int, value: int) -> None:
    _check("prctl", _libc.prctl(option, value, 0, 0, 0))


def _check(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
