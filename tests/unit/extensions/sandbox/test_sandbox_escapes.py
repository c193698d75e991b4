"""Programs that try to get out of the sandbox, each run for real, in every isolation that this machine has.

A program says `escaped: ...` where something worked that must not, and each test also looks from outside at
what it was after: the secret, the file, the process, the port. The programs stop by themselves where nothing
stops them, so that a sandbox that leaks fails a test and harms no machine.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from swarmnode.extensions.sandbox.isolation import Isolation, candidates
from swarmnode.extensions.sandbox.sandbox import Limits, ProgramEnd, holds, run

ROOT = Path(__file__).parents[4]
SHORT = Limits(wall_s=120.0, cpu_s=1, memory_bytes=256 << 20, output_bytes=1 << 16, disk_bytes=1 << 20)
FOUND = [isolation for isolation in candidates() if holds(isolation)]

pytestmark = pytest.mark.skipif(not FOUND, reason="this machine has nothing to make a sandbox of")


@pytest.fixture(params=FOUND, ids=lambda isolation: isolation.describe().partition("sandbox of ")[2])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return request.param


@dataclass
class Outside:
    """What belongs to the node, and what a program must not touch."""

    secret: Path
    folder: Path
    port: int
    listener: socket.socket
    isolation: Isolation

    def attacked_by(self, program: str, limits: Limits = SHORT) -> ProgramEnd:
        """Run a program that knows where everything is."""
        known = {
            "secret": str(self.secret),
            "folder": str(self.folder),
            "port": self.port,
            "node": os.getpid(),
        }
        prelude = "".join(f"{name} = {value!r}\n" for name, value in known.items())
        return run(prelude + HELPERS + textwrap.dedent(program), limits=limits, isolation=self.isolation)

    def refuses(self, program: str, limits: Limits = SHORT) -> ProgramEnd:
        """Run a program to its end: nothing of what it tried worked."""
        end = self.attacked_by(program, limits)
        assert end.stdout.splitlines()[-1:] == ["all refused"], end
        return end


HELPERS = '''
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
escaped = []

def attempt(what, *arguments, **keywords):
    """Whatever comes back without an error is an escape."""
    try:
        result = what(*arguments, **keywords)
    except (OSError, RuntimeError, MemoryError, ValueError):
        return
    escaped.append((getattr(what, "__name__", "call"), arguments, result))

def syscall(number, *arguments):
    """A call of the kernel that Python has no function for."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), "refused")
    return result

def done():
    print("escaped:", escaped) if escaped else print("all refused")
'''


@pytest.fixture
def outside(tmp_path: Path, isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    folder = tmp_path / "home"
    folder.mkdir()
    secret = folder / "id_ed25519"
    secret.write_text("PRIVATE KEY")
    # As open as can be: that they cannot be reached must not be for want of permissions.
    for path, mode in ((secret, 0o777), (folder, 0o777), (tmp_path, 0o777), (tmp_path.parent, 0o755)):
        path.chmod(mode)
    before = set(psutil.Process().children(recursive=True))
    places = tmp_path / "places"
    places.mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Outside(secret, folder, listener.getsockname()[1], listener, isolation)
    # The node is alive, and nothing of the program is.
    assert set(psutil.Process().children(recursive=True)) <= before
    assert secret.read_text() == "PRIVATE KEY" and os.listdir(folder) == [secret.name]
    assert secret.stat().st_mode & 0o777 == 0o777
    assert os.listdir(places) == []


def test_nothing_can_be_connected_to(outside: Outside) -> None:
    outside.refuses(
        """
        import socket
        for family in range(1, 46):
            for kind in (1, 2, 3, 5):
                attempt(socket.socket, family, kind)
        attempt(socket.create_connection, ("127.0.0.1", port), timeout=2)
        attempt(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
        done()
        """
    )
    with pytest.raises(BlockingIOError):
        outside.listener.accept()


def test_files_of_the_user_cannot_be_read_by_any_name(outside: Outside) -> None:
    end = outside.attacked_by(
        """
        os.symlink(secret, "innocent")
        attempt(os.link, secret, "hard")
        around = ("/proc/self/root", "/proc/1/root", "../..")
        for path in (secret, "innocent", *(way + secret for way in around)):
            attempt(open, path)
            attempt(os.listdir, os.path.dirname(path) or "nowhere")
        for path in ("/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/cpuinfo", "/root", "/home"):
            attempt(open, path)
            attempt(os.listdir, path)
        try:
            place = os.open(secret, os.O_PATH)
        except OSError:
            pass
        else:
            attempt(os.read, place, 100)
            attempt(open, f"/proc/self/fd/{place}")
        os.chdir("/")
        attempt(open, secret.lstrip("/"))
        escaped = [one for one in escaped if one[1] != ("nowhere",)]
        done()
        """
    )
    assert end.stdout == "all refused\n" and "PRIVATE KEY" not in end.stdout + end.stderr


def test_nothing_outside_can_be_written_or_changed(outside: Outside) -> None:
    outside.refuses(
        """
        import sysconfig
        library = sysconfig.get_path("stdlib")
        for path in (folder + "/new", secret, "/new", "/dev/shm/new", "/var/tmp/new", library + "/new.py"):
            attempt(open, path, "w")
            attempt(open, path, "a")
            attempt(os.open, path, os.O_RDONLY | os.O_CREAT)
            attempt(os.open, path, os.O_RDONLY | os.O_TRUNC)
            attempt(os.open, path, 3 | os.O_TRUNC)
            attempt(os.mkdir, path + "-folder")
            attempt(os.symlink, "x", path + "-link")
            attempt(os.mkfifo, path + "-fifo")
        for path in (secret, os.__file__):
            attempt(os.truncate, path, 0)
            attempt(os.unlink, path)
            attempt(os.rename, path, "mine")
            attempt(os.rename, path, path + "-moved")
            attempt(os.chmod, path, 0)
            attempt(os.chown, path, os.getuid(), os.getgid())
            attempt(os.utime, path)
            attempt(os.setxattr, path, "user.mark", b"1")
        done()
        """
    )


def test_a_fork_bomb_has_no_first_fork(outside: Outside) -> None:
    outside.refuses(
        """
        import platform, subprocess, threading
        for _ in range(50):
            attempt(os.fork)
        for number in {"x86_64": (56, 57, 58, 435), "aarch64": (220, 435)}[platform.machine()]:
            attempt(syscall, number, 17, 0, 0, 0, 0)
        attempt(os.posix_spawn, sys.executable, ["python"], {})
        attempt(subprocess.run, ["/bin/sh", "-c", "true"])
        attempt(os.execv, "/bin/sh", ["sh", "-c", "echo escaped"])
        attempt(threading.Thread(target=print).start)
        done()
        """
    )


def test_a_daemon_does_not_outlive_the_run(outside: Outside) -> None:
    outside.refuses(
        """
        import time
        def daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(0)
        attempt(daemon)
        attempt(os.setsid)
        attempt(os.setpgid, 0, 0)
        done()
        """
    )


@pytest.mark.parametrize(
    "bomb",
    [
        "hoard = bytearray(2 << 30)",
        "hoard = []\nwhile len(hoard) < 2000: hoard.append(bytearray(1 << 20))",
        "import mmap\nhoard = [mmap.mmap(-1, 1 << 26) for _ in range(32)]",
        "hoard = [0]\nfor _ in range(40): hoard += hoard",
    ],
)
def test_a_memory_bomb_meets_its_limit(outside: Outside, bomb: str) -> None:
    end = outside.attacked_by(bomb + "\nprint('escaped')")
    assert end.stdout == "" and end.status == 1
    assert end.ended_by == "memory" or "Cannot allocate memory" in end.stderr


def test_memory_that_limits_do_not_count_is_not_to_be_had(outside: Outside) -> None:
    outside.refuses(
        """
        import platform
        attempt(os.memfd_create, "hoard")
        number = {"x86_64": 29, "aarch64": 194}[platform.machine()]
        attempt(syscall, number, 0, 1 << 30, 0o1600)
        pipes = []
        while len(pipes) < 1000:
            try:
                pipes.append(os.pipe())
            except OSError:
                break
        else:
            escaped.append("pipes")
        done()
        """
    )


def test_a_flood_of_output_is_cut_off(outside: Outside) -> None:
    end = outside.attacked_by("import itertools\nfor _ in range(1 << 16): os.write(1 + _ % 2, b'x' * 4096)")
    assert end.ended_by == "output" and len(end.stdout) + len(end.stderr) <= 2 * SHORT.output_bytes


def test_an_endless_loop_that_ignores_every_signal_ends_with_its_processor_time(outside: Outside) -> None:
    end = outside.attacked_by(
        """
        import signal
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
        """
    )
    assert end.ended_by == "cpu" and end.status == -signal.SIGKILL


def test_a_sleeper_that_blocks_every_signal_ends_with_its_time(outside: Outside) -> None:
    end = outside.attacked_by(
        """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        attempt(os.kill, os.getppid(), 0)
        print("asleep", flush=True)
        time.sleep(600)
        """,
        replace(SHORT, wall_s=1.0),
    )
    assert end.ended_by == "wall" and end.status is None and end.stdout in ("asleep\n", "")


def test_huge_integers_end_with_their_processor_time(outside: Outside) -> None:
    end = outside.attacked_by("sys.set_int_max_str_digits(0)\nprint(len(str(7 ** (1 << 25))))")
    assert end.ended_by == "cpu" and end.stdout == ""


def test_the_node_cannot_be_signalled_traced_or_read(outside: Outside) -> None:
    before = signal.getsignal(signal.SIGUSR1), os.getpriority(os.PRIO_PROCESS, 0)
    outside.refuses(
        """
        import platform, resource, signal
        for process in (node, os.getppid(), 1, -1, 0):
            attempt(os.kill, process, 0)
            attempt(os.kill, process, signal.SIGCONT)
            attempt(os.pidfd_open, process)
            attempt(os.setpriority, os.PRIO_PROCESS, process, 19)
            attempt(os.sched_setaffinity, process, {0})
            attempt(resource.prlimit, process, resource.RLIMIT_NOFILE, (10, 10))
            attempt(open, f"/proc/{process}/environ")
            attempt(open, f"/proc/{process}/mem", "rb+")
            attempt(os.listdir, f"/proc/{process}/fd")
            attempt(os.readlink, f"/proc/{process}/cwd")
            numbers = {"x86_64": (101, 310, 311, 312), "aarch64": (117, 270, 271, 272)}
            for number in numbers[platform.machine()]:
                attempt(syscall, number, 16, process, 0, 0, 0, 0)
        attempt(resource.setrlimit, resource.RLIMIT_AS, (1 << 40, 1 << 40))
        import fcntl
        attempt(fcntl.fcntl, 1, fcntl.F_SETOWN, node)
        attempt(fcntl.ioctl, 0, 0x5412, b"x")
        done()
        """
    )
    assert before == (signal.getsignal(signal.SIGUSR1), os.getpriority(os.PRIO_PROCESS, 0))


def test_nothing_is_inherited(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with outside.secret.open() as held:
        os.set_inheritable(held.fileno(), True)
        end = outside.refuses(
            """
            for descriptor in range(3, 4096):
                attempt(os.fstat, descriptor)
            expected = {"LC_ALL", "LC_CTYPE", "TMPDIR", "PWD", "PYTHONHASHSEED"}
            escaped += [(name, value) for name, value in os.environ.items() if name not in expected]
            escaped += [value for value in sys.argv if value]
            done()
            """
        )
    assert "hf_secret" not in end.stdout


def test_no_right_can_be_gained(outside: Outside) -> None:
    outside.refuses(
        """
        import platform
        for change in (os.setuid, os.seteuid, os.setgid, os.setegid):
            attempt(change, 0)
        attempt(os.setgroups, [0])
        attempt(os.chroot, ".")
        attempt(os.mknod, "disk", 0o60666, os.makedev(254, 0))
        for flags in (0x10000000, 0x00020000, 0x40000000, 0x10020000):
            if libc.unshare(ctypes.c_int(flags)) == 0:
                escaped.append(("unshare", flags))
        for call in (libc.mount, libc.umount2, libc.setns, libc.personality, libc.prctl):
            if call(b"/", b"/", 0, 0, 0) == 0:
                escaped.append(call.__name__)
        done()
        """
    )


def test_the_dark_corners_of_the_kernel_are_shut(outside: Outside) -> None:
    outside.refuses(
        """
        import errno, platform
        newer = range(424, 470)  # io_uring, pidfd, clone3, mount and landlock: the same numbers everywhere
        older = {
            # ptrace, syslog, keys, perf, bpf, userfaultfd, modules, handles, shared memory, unshare, ...
            "x86_64": (29, 41, 42, 49, 50, 53, 68, 101, 103, 133, 155, 157, 161, 165, 175, 240, 246, 248, 249,
                       250, 272, 279, 298, 303, 304, 308, 310, 313, 317, 319, 320, 321, 323, 329, 1000),
            "aarch64": (33, 39, 40, 51, 97, 104, 105, 117, 167, 180, 186, 194, 198, 200, 203, 217, 218, 219,
                        241, 264, 265, 268, 273, 277, 279, 280, 281, 282, 1000),
        }[platform.machine()]
        x32 = [0x40000000 | number for number in (0, 1, 41, 57)] if platform.machine() == "x86_64" else []
        for number in (*newer, *older, *x32):
            if number == 439:
                continue  # faccessat2, which is allowed.
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, (9, 9, 9, 9, 9, 9)))
            if ctypes.get_errno() != errno.EPERM:
                escaped.append((number, ctypes.get_errno()))
        done()
        """
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="a trick of this architecture")
def test_calls_by_the_numbers_of_another_architecture_kill(outside: Outside) -> None:
    """`int 0x80` reaches the kernel with the numbers of 32 bits: 20 is getpid there, and writev here."""
    end = outside.attacked_by(
        """
        import mmap
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000cd80c3"))
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        print("escaped", function(), flush=True)
        """
    )
    assert end.stdout == "" and end.status is not None and end.status < 0


@pytest.mark.parametrize(
    "hoarding",
    [
        "with open('long', 'wb') as file:\n    for _ in range(64): file.write(b'x' * (1 << 20))",
        "for n in range(64):\n    open(str(n), 'wb').write(b'x' * (1 << 19))\n    time.sleep(0.01)",
        "for n in range(5000):\n    open(str(n), 'w').close()\n    time.sleep(0.0005)",
    ],
)
def test_a_disk_cannot_be_filled(outside: Outside, hoarding: str) -> None:
    end = outside.attacked_by(f"import time\n{hoarding}\nprint('escaped')")
    assert end.stdout == ""
    assert end.ended_by == "disk" or "File too large" in end.stderr or "No space left" in end.stderr


def test_its_input_and_its_locks_fill_nothing(outside: Outside) -> None:
    outside.refuses(
        """
        import fcntl
        attempt(os.write, 0, b"x")
        attempt(os.ftruncate, 0, 1 << 20)
        attempt(fcntl.lockf, open("mine", "w"), fcntl.LOCK_EX)
        done()
        """
    )


def test_a_program_that_stops_itself_ends_with_its_time(outside: Outside) -> None:
    end = outside.attacked_by(
        "import signal\nos.kill(os.getpid(), signal.SIGSTOP)", replace(SHORT, wall_s=0.5)
    )
    assert end.ended_by == "wall"


def test_a_crash_of_the_interpreter_is_only_its_own(outside: Outside) -> None:
    end = outside.attacked_by("print('before', flush=True)\nctypes.string_at(0)")
    assert end.stdout == "before\n" and end.status == -signal.SIGSEGV and end.ended_by is None


def test_it_does_not_outlive_who_started_it(isolation: Isolation, tmp_path: Path) -> None:
    """The process of a task is killed with its group, which a sandbox has left."""
    starter = (
        "from swarmnode.extensions.sandbox.isolation import Isolation\n"
        "from swarmnode.extensions.sandbox.sandbox import run\n"
        f"run('import time; time.sleep(60)', isolation={isolation!r})"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-S", "-c", starter], env=environment) as child:
        started = psutil.Process(child.pid)
        while len(within := started.children(recursive=True)) < 2:
            assert child.poll() is None
            time.sleep(0.02)
        child.kill()
    gone, alive = psutil.wait_procs(within, timeout=100)
    assert alive == [] and len(gone) >= 2


def test_two_programs_cannot_reach_each_other_but_by_their_socket(isolation: Isolation) -> None:
    judge = "import os, time; print(os.read(3, 100).decode()); print(os.read(3, 100))"
    spy = f"""{HELPERS}
import signal
found = [text for text in vars(sys).values() if "os.read(3" in str(text)]
import gc
found += [one for one in map(str, gc.get_objects()) if "import os, time; pri" in one and "spy" not in one]
for process in range(os.getpid() - 3, os.getpid() + 3):
    if process != os.getpid():
        attempt(os.kill, process, 0)
        attempt(open, f"/proc/{{process}}/mem")
os.write(1, b"escaped")
os.write(3, repr(escaped + found).encode())
"""
    end = run(judge, beside=spy, isolation=isolation, limits=SHORT)
    assert end.stdout == "[]\nb''\n" and end.stderr == ""


SCRIPT = """
from swarmnode.extensions.sandbox.sandbox import available, run
end = run('import os; print(os.listdir("/tmp"), open("/etc/passwd"))')
print(available().confines, 'PermissionError' in end.stderr or 'FileNotFoundError' in end.stderr)
"""
SYSTEM_PYTHON = "/usr/bin/python3"
"""A Python that everybody may run: that of the tests may lie in somebody's home."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(
    "become",
    [
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
    ],
    ids=["a user", "root without rights, as in many containers"],
)
def test_whoever_runs_the_node_has_a_sandbox(become: list[str], tmp_path: Path) -> None:
    if shutil.which("setpriv") is None or not os.path.exists(SYSTEM_PYTHON):
        pytest.skip("no setpriv, or no Python that everybody may run")
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*become, SYSTEM_PYTHON, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    if "ModuleNotFoundError" in done.stderr or "SyntaxError" in done.stderr:
        pytest.skip("that Python cannot import swarmnode")
    assert done.stdout == "True True\n", done.stderr
