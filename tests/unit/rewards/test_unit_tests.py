"""Programs in answers, the tests that they pass, and what they can't do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_td.config.reward_settings import SandboxLimits
from roll_td.rewards.extract import last_fenced_block
from roll_td.rewards.sandbox import run_programs, run_tests
from roll_td.rewards.unit_tests import check_sandbox, code, have_meaning, read_tests
from tests.unit.rewards.namespaces import needs_namespaces

pytestmark = needs_namespaces
LIMITS = SandboxLimits(time_s=2.0, total_s=10.0, memory_mb=512)
SQUARE = ["assert square(2) == 4", "assert square(-3) == 9"]
PAIRS = {"inputs": ["2\n", "-3\n"], "outputs": ["4\n", "9\n"]}


def score_of(
    program: str, tests: Any, score: str = "all", limits: SandboxLimits = LIMITS
) -> float | None:
    return code(f"```python\n{program}\n```", tests, part="last_block", score=score, limits=limits)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```\nor\n```\nb\n```", "b\n"),
        ("```py\na\n```\n```python\nb", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("``` a ```", None),
        ("a", None),
        ("", None),
    ],
)
def test_the_last_fenced_block(text: str, block: str | None) -> None:
    assert last_fenced_block(text) == block


def test_the_share_or_all_of_the_asserts() -> None:
    program = "def square(x): return x + x"
    assert score_of(program, SQUARE) == 0
    assert score_of(program, SQUARE, "share") == 0.5
    assert score_of("def square(x): return x * x", SQUARE) == 1
    assert score_of("def square(x): return x * x", "\n".join(SQUARE)) == 1
    assert score_of("def square(x) return x", SQUARE, "share") == 0
    whole = "def square(x): return x * x"
    assert code(whole, SQUARE, part="text", score="all", limits=LIMITS) == 1
    assert code(whole, SQUARE, part="last_block", score="all", limits=LIMITS) == 0
    assert code(f"<think>{whole}", SQUARE, part="text", score="all", limits=LIMITS) == 0


def test_pairs_of_input_and_output() -> None:
    program = "if __name__ == '__main__':\n    x = int(input())\n    print(x * x, ' ')\n    print()"
    assert score_of(program, PAIRS) == 1
    listed = [{"input": "2", "output": "4"}, {"input": "3", "output": "10"}]
    assert score_of(program, listed, "share") == 0.5
    assert score_of("print(4)", json.dumps(PAIRS), "share") == 0.5
    assert score_of("print(4); raise SystemExit(3)", [listed[0]]) == 0, "a status that isn't 0"
    assert score_of("import sys; print(4); sys.exit()", [listed[0]]) == 1


@pytest.mark.parametrize("tests", [None, "", [], {"inputs": [], "outputs": []}, "[]"])
def test_without_tests_there_is_no_score(tests: Any) -> None:
    assert score_of("a = 1", tests) is None
    assert have_meaning(tests, part="text", score="all", limits=LIMITS) is None


def test_tests_that_are_no_python_have_no_meaning() -> None:
    for tests, meaning in ((SQUARE, 1), (["assert ("], None), ("[x for x in ()]", 1)):
        assert have_meaning(tests, part="text", score="all", limits=LIMITS) == meaning
    for bad in (3, [1], {"inputs": ["1"], "outputs": []}, [{"input": 1, "output": "1"}]):
        with pytest.raises(TypeError, match="want"):
            read_tests(bad)


TESTS = ["assert f() == 1"]
RIGHT = "def f(): return 1\n"
HARMLESS = {
    "a file of its own": "open('own', 'w').write('abc'); assert open('own').read() == 'abc'",
    "a process of its own": "import subprocess; subprocess.run(['true'], check=True)",
    "a thread": "import threading; t = threading.Thread(target=f); t.start(); t.join()",
}
LIBC = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10020000)\n"
HARMFUL = {
    "ends before the asserts": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "ends when it is tested": "def f(): import sys; sys.exit(0)",
    "ends at once when it is tested": "import os\ndef f(): os._exit(0)",
    "replaces what runs the tests": "import builtins, __main__, os\n"
    "for name in ('exec', 'compile', 'bytes', 'vars'):\n"
    "  for module in (builtins, __main__): setattr(module, name, lambda *a: '')\n"
    "write = os.write\nos.write = lambda fd, b: write(fd, bytes(b[:-1]) + b'\\x01')\n"
    "def f(): return 2",
    "prints what passing looks like": "print('1 passed'); print('[true]'); raise SystemExit",
    "writes to all files it has": "import os\nfor fd in range(64):\n"
    "  try: os.write(fd, b'1' * 17)\n  except OSError: pass\nos._exit(0)",
    "writes outside": "open('{outside}/written', 'w')",
    "writes to the interpreter": "import os; open(os.path.dirname(os.__file__) + '/x', 'w')",
    "reads the data of others": "open('{outside}/secret').read()",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "finds the secret": "import os; os.environ['SECRET_KEY']",
    "finds it in a parent": "open('/proc/{parent}/environ').read()",
    "signals the parent": "import os; os.kill({parent}, 9)",
    "interrupts what runs it": "import os; os.kill(os.getppid(), 2); raise SystemExit",
    "takes 8 GB": "a = bytearray(8 << 30)",
    "forks without end": "import os\nwhile True: os.fork()",
    "fills the disk": "a = open('own', 'wb')\nwhile True: a.write(bytes(1 << 20))",
    "fills it with many files": "for n in range(99): open(f'own{{n}}', 'wb').write(bytes(1 << 20))",
    "opens many files": "a = [open('/dev/null') for _ in range(100)]",
    "takes for ever": "while True: pass",
    "sleeps": "import time; time.sleep(60)",
    "makes the system writable": LIBC + "assert libc.mount(None, b'/usr', None, 0x1020, None) == 0",
    "takes the system off": LIBC + "assert libc.umount2(b'/usr', 2) == 0",
    "makes itself root of a namespace": LIBC + "assert libc.unshare(0x10000000) == 0",
    "does so by a process": LIBC + "assert libc.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
    "shares memory that no limit counts": LIBC + "assert libc.shmget(0, 4096, 0o1600) >= 0",
    "looks for keys": LIBC + "assert libc.syscall({keyctl}, 0, -3, 0) >= 0",
    "calls the machine's own host": "import socket; socket.socket(40, 1)",
    "fills memory with empty files": "for n in range(20_000): open(f'own{{n}}', 'w')",
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_a_program_may_do(what: str) -> None:
    assert score_of(RIGHT + HARMLESS[what], TESTS) == 1


@pytest.mark.parametrize("what", HARMFUL)
def test_g13_what_a_program_can_not_do(  # G13
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hush")
    (tmp_path / "secret").write_text("hush")
    tmp_path.chmod(0o777)
    (tmp_path / "secret").chmod(0o666)
    began, before = time.monotonic(), set(psutil.Process().children(recursive=True))
    with socket.create_server(("127.0.0.1", 0)) as server:
        keyctl, clone = (250, 56) if os.uname().machine == "x86_64" else (219, 220)
        facts = {"outside": tmp_path, "port": server.getsockname()[1], "parent": os.getpid()}
        facts |= {"keyctl": keyctl, "clone": clone}
        assert score_of(RIGHT + HARMFUL[what].format(**facts), TESTS) == 0
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert time.monotonic() - began < LIMITS.time_s + 6
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert set(psutil.Process().children(recursive=True)) <= before


def test_g13_a_hidden_output_is_not_found_by_printing_one() -> None:  # G13
    hidden = {"inputs": ["1", "2", "3"], "outputs": ["1", "4", "9"]}
    assert score_of("print(4)", hidden) == 0
    seen = "import gc\nprint([x for x in gc.get_objects() if type(x) is dict and 'outputs' in x])"
    (ran,) = run_programs(seen, ["1"], LIMITS, 100)
    assert ran.output.strip() == "[]", "what is expected is compared outside"


def test_g13_nothing_that_a_program_starts_outlives_it() -> None:  # G13
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        again = [sys.executable, '-c', 'import time; time.sleep(77.25)']\n"
        "        os.execv(sys.executable, again)\n"
        "    os._exit(0)\n"
        "time.sleep(0.5)\n"
        "print('out')"
    )
    (ran,) = run_programs(program, [""], LIMITS, 100)
    assert ran.output == "out\n" and ran.status == 0
    wait_until(lambda: not sleeping("77.25"))


def test_g13_it_ends_with_the_process_that_asked(tmp_path: Path) -> None:  # G13
    asking = (
        "from roll_td.config.reward_settings import SandboxLimits\n"
        "from roll_td.rewards.sandbox import run_programs\n"
        "limits = SandboxLimits(time_s=60, total_s=60)\n"
        'program = \'import os, sys; os.execv(sys.executable, [sys.executable, "-c", '
        '"import time; time.sleep(78.25)"])\'\n'
        "run_programs(program, [''], limits, 10)"
    )
    with subprocess.Popen([sys.executable, "-c", asking]) as process:
        wait_until(lambda: bool(sleeping("78.25")))
        process.kill()
    wait_until(lambda: not sleeping("78.25"))


def test_of_what_is_printed_the_beginning_is_kept() -> None:
    (ran,) = run_programs("print('ä' * 10**6)", [""], LIMITS, 7)
    assert (ran.status, ran.output) == (0, "äää\ufffd")


def test_what_is_printed_is_a_file_with_a_limit() -> None:
    limits = SandboxLimits(time_s=5.0, file_mb=1)
    program = "import os\nn = 0\nwhile n < 3: n += os.write(1, b'a' * 1000) / 1e6"
    (ran,) = run_programs(program, [""], limits, 10**7)
    assert ran.status != 0 and len(ran.output) == 1 << 20


def test_a_box_that_is_full_fails_the_program_and_not_the_sandbox() -> None:
    program = (
        "print(input())\n"
        "try:\n"
        "    for n in range(10**6): open(f'{n}', 'wb').write(bytes(1 << 20))\n"
        "except OSError: print('full')\n"
    )
    limits = SandboxLimits(time_s=5.0, box_mb=4)
    ran = run_programs(program, ["1", "2"], limits, 100)
    assert [one.output.split() for one in ran] == [["1", "full"], ["2", "full"]]


def test_runs_that_do_not_begin_in_time_have_not_passed() -> None:
    limits = SandboxLimits(time_s=1.0, total_s=1.5)
    program = "n = input()\nwhile n == '2': pass\nprint(n)"
    ran = run_programs(program, ["1", "2", "2", "1"], limits, 100)
    assert [one.status for one in ran] == [0, None, None, None]


def test_a_sandbox_that_can_not_be_made_is_an_error_and_no_zero() -> None:
    little = SandboxLimits(memory_mb=1)
    with pytest.raises(RuntimeError, match="can't import Python's modules in the sandbox"):
        check_sandbox(part="text", score="all", limits=little)
    assert check_sandbox(part="text", score="all", limits=LIMITS) is None


def test_where_the_kernel_permits_no_namespaces_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "import sys\nsys.stdin.read()\nraise PermissionError(1, 'unshare: not permitted')"
    (tmp_path / "jail.py").write_text(refusing)
    monkeypatch.setattr("roll_td.rewards.jail.__file__", str(tmp_path / "jail.py"))
    with pytest.raises(RuntimeError, match=r"no sandbox of namespaces here: .*unshare: not perm"):
        score_of(RIGHT, TESTS)


def sleeping(seconds: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if f"time.sleep({seconds})" in (process.info["cmdline"] or [""])[-1]:
            found.append(process.pid)
    return found


def wait_until(holds: Any) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


AS_OTHERS = """
from dataclasses import replace
from roll_td.config.reward_settings import SandboxLimits
from roll_td.rewards.sandbox import run_programs, run_tests
limits = SandboxLimits(isolation="ISOLATION", time_s=1.0, total_s=20, memory_mb=512)
assert run_tests("def f(): return 1", ["assert f() == 1", "assert f() == 2"], limits).passed == (
    True, False)
for program in (
    "import sys; sys.exit(0)",
    "a = bytearray(8 << 30)",
    "import os\\nwhile True: os.fork()",
    "a = open('own', 'wb')\\nwhile True: a.write(bytes(1 << 20))",
    "import os; os.environ['SECRET_KEY']",
    "import os; os.kill(os.getppid(), 9); raise SystemExit",
    "while True: pass",
    *OUTSIDE,
):
    ran = run_tests(program + "\\ndef f(): return 1", ["assert f() == 1"], limits)
    assert ran.passed == (), (program, ran)
left = '''
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(79.25)'])
    os._exit(0)
print(len(os.listdir('.')))
'''
assert [ran.output for ran in run_programs(left, ["", ""], limits, 10)] == ["1\\n", "1\\n"]
"""
OUTSIDE = [
    "open('/tmp/roll-td-outside', 'w')",
    "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "open('/proc/self/environ')",
]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_g13_it_needs_no_root(isolation: str, tmp_path: Path) -> None:  # G13
    python = next(
        (path for path in ("/usr/local/bin/python3", "/usr/bin/python3") if Path(path).exists()),
        None,
    )
    if python is None:
        pytest.skip("no Python that all users may run")
    script = AS_OTHERS.replace("ISOLATION", isolation)
    outside = OUTSIDE if isolation == "namespaces" else []
    done = subprocess.run(
        [python, "-c", f"OUTSIDE = {outside!r}\n{script}"],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "SECRET_KEY": "hush",
            "PATH": "/usr/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # others on this machine may run this test, too: theirs is gone in a moment, what is left stays
    wait_until(lambda: not sleeping("79.25"))
    assert not Path("/tmp/roll-td-outside").exists()


def test_tests_are_told_by_a_number_that_is_made_anew() -> None:
    forged = "import os\nos.write(3, b'1' * 17)\ndef f(): return 2"
    assert run_tests(forged, TESTS, LIMITS).passed in ((), (False,))
