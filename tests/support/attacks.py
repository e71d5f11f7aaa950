"""Programs that attack a sandbox, and what must come of each: (how it ends, words of its output).

Sources: what runaway and malicious programs do to judges of programming contests and to containers. Each is written to
tell on itself: it prints HELD where the sandbox held, and anything else where not. `ended`: the sandbox ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(what, result):
    print('HELD' if result == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES) else (what, result))
"""
TRIED = """
import os, sys
def held(call, *kinds):
    try:
        print('BROKEN', call())
    except (kinds or (OSError,)) as e:
        print('HELD', type(e).__name__)
"""


@dataclass(frozen=True)
class Attack:
    """ends: "exit", or the status with which the sandbox ends it."""

    name: str
    code: str
    ends: str = "exit"


ATTACKS = [
    # resources
    Attack("memory", TRIED + "held(lambda: len(bytearray(2 << 30)), MemoryError)"),
    Attack("memory that is not caught", "x = [b'x' * 1_000_000 for _ in range(10_000)]", "memory"),
    Attack(
        "memory of many processes",
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20)) * 40
        time.sleep(30)
time.sleep(30)
""",
        "memory",
    ),
    Attack("an endless loop", "while True: pass", "time"),
    Attack("an endless loop that ignores its limit", "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile 1: pass", "time"),
    Attack("sleep", "import time\ntime.sleep(60)", "time"),
    Attack("stopped clocks", "import time\ntime.time = time.monotonic = time.sleep = lambda *_: 0\nwhile True: time.sleep(1)", "time"),
    Attack("a stopped process", "import os\nos.kill(os.getpid(), 19)", "time"),
    Attack(
        "a fork bomb",
        """
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0:
            time.sleep(30)
        n += 1
except OSError:
    pass
print('HELD' if n <= 16 else n)
os._exit(0)
""",
    ),
    Attack("threads", TRIED + """
import threading, time
def many():
    for _ in range(200): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
held(many, RuntimeError)
sys.stdout.flush(); os._exit(0)
"""),
    Attack("a full disk", TRIED + "held(lambda: [open(f'/tmp/{i}', 'wb').write(bytes(1 << 20)) for i in range(64)])"),
    Attack("a large file", TRIED + "held(lambda: os.posix_fallocate(os.open('/tmp/x', 66), 0, 1 << 30))"),
    Attack("full shared memory", TRIED + "held(lambda: [open(f'/dev/shm/{i}', 'wb').write(bytes(1 << 20)) for i in range(64)])"),
    Attack("many files", "for i in range(20_000): open(f'/tmp/{i}', 'w').close()\nprint('HELD')"),
    Attack("endless output", "import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
    Attack("endless output as an error", "import sys\nwhile True: print('x' * 10_000, file=sys.stderr)", "output"),
    Attack("output of a child", "import os\nos.fork()\nwhile True: os.write(1, b'x' * 4096)", "output"),
    Attack(
        "a zip bomb",
        """
import io, zipfile
held = io.BytesIO()
with zipfile.ZipFile(held, 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('a', bytes(100 << 20))
zipfile.ZipFile(held).extractall('/tmp')
""",
    ),
    Attack("a number without end", "9 ** 9 ** 9 ** 9", "time"),
    Attack("deep folders", """
import os
for _ in range(1000):
    os.mkdir('d' * 20); os.chdir('d' * 20)
os.chmod('.', 0)
print('HELD')
"""),
    # the host
    Attack("writing /usr", TRIED + "held(lambda: open('/usr/evil', 'w'))"),
    Attack("writing /", TRIED + "held(lambda: open('/evil', 'w'))"),
    Attack("writing /dev", TRIED + "held(lambda: open('/dev/evil', 'w'))"),
    Attack("reading the host", "import os\nprint('HELD' if not {'root', 'home', 'etc', 'work', 'var', 'run'} & set(os.listdir('/')) else os.listdir('/'))"),
    Attack("a link to the host", TRIED + "os.symlink('/proc/1/root/etc/passwd', '/tmp/l')\nheld(lambda: open('/tmp/l').read())"),
    Attack("a link out of the directory", TRIED + "os.symlink('../../../../etc/passwd', '/tmp/l')\nheld(lambda: open('/tmp/l').read())"),
    Attack("the environment", "import os\nprint('HELD' if set(os.environ) <= {'PATH', 'HOME', 'PYTHONHASHSEED', 'LANG', 'PWD'} else os.environ)"),
    Attack("the network", TRIED + "import socket\nheld(lambda: socket.create_connection(('127.0.0.1', PORT), 2))"),
    Attack("a packet socket", TRIED + "import socket\nheld(lambda: socket.socket(17, 3, 0))"),
    Attack("netlink", TRIED + "import socket\nheld(lambda: socket.socket(16, 3, 0))"),
    Attack("set-user-id", TRIED + "held(lambda: os.setuid(0))"),
    Attack("a set-user-id file", "import os, shutil\nshutil.copy('/usr/bin/env', '/tmp/e'); os.chmod('/tmp/e', 0o4755)\nprint('HELD' if os.popen('/tmp/e id -u').read().strip() == str(os.getuid()) != '0' else 'BROKEN')"),
    Attack("mount", CALL + "refused('mount', libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))"),
    Attack("a user namespace", CALL + "refused('unshare', libc.unshare(0x10000000))"),
    Attack("a namespace by clone", CALL + "refused('clone', libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))"),
    Attack("a device", TRIED + "held(lambda: os.mknod('/tmp/d', 0o60666, os.makedev(8, 0)))"),
    # the first process, and other processes
    Attack("other processes", "import os\nprint('HELD' if {n for n in os.listdir('/proc') if n.isdigit()} <= {'1', str(os.getpid())} else os.listdir('/proc'))"),
    Attack("a signal to the first process", "import os\nfor n in (1, 2, 9, 15, 19, 10): os.kill(1, n)\nos.kill(os.getppid(), 9)\nprint('HELD')"),
    Attack("a signal to all", "import os\nos.kill(-1, 9)\nprint('HELD')"),
    Attack("memory of the first process", TRIED + "held(lambda: open('/proc/1/mem', 'rb'))"),
    Attack("descriptors of the first process", TRIED + "held(lambda: os.listdir('/proc/1/fd'))"),
    Attack("arguments of the first process", TRIED + "held(lambda: open('/proc/1/environ').read())"),
    Attack("ptrace", CALL + "refused('ptrace', libc.ptrace(16, 1, 0, 0))"),
    Attack("reading memory across processes", CALL + "refused('process_vm_readv', libc.syscall(310, 1, 0, 0, 0, 0, 0))"),
    Attack("limits of the first process", TRIED + "import resource\nheld(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))"),
    Attack("priority of the first process", TRIED + "held(lambda: os.setpriority(0, 1, 19))"),
    Attack("processors of the first process", TRIED + "held(lambda: os.sched_setaffinity(1, {0}))"),
    Attack("inherited descriptors", "import os\nprint('HELD' if set(map(int, os.listdir('/proc/self/fd'))) <= {0, 1, 2, 3} else os.listdir('/proc/self/fd'))"),
    Attack("writing to what is inherited", TRIED + "held(lambda: [os.write(fd, b'x' * 8) for fd in range(3, 64)])"),
    # what outlives a program
    Attack("an orphan", """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
print('HELD')
"""),
    Attack("a segment of System V", CALL + "refused('shmget', libc.shmget(0, 1 << 20, 0o1666))"),
    Attack("a queue", CALL + "refused('msgget', libc.msgget(77, 0o1666))"),
    Attack("a key", CALL + "refused('add_key', libc.syscall(248, b'user', b'a', b'b', 1, -4))"),
    Attack("a memory file", TRIED + "held(lambda: os.memfd_create('x'))"),
    Attack("hidden files", "open('/tmp/.a', 'w').close()\nimport os\nos.mkdir('/tmp/b'); os.chmod('/tmp/b', 0)\nprint('HELD')"),
    Attack("a keyboard interrupt of the pool", "import os, signal\nos.kill(1, signal.SIGINT)\nos.killpg(0, signal.SIGINT)", "signal-or-exit"),
]  # fmt: skip

# what an honest program sees after an attack in the same slot
PROBE = """
import os, sys
left = [f for d in ('/tmp', '/dev/shm') for f in os.listdir(d)]
others = {n for n in os.listdir('/proc') if n.isdigit()} - {'1', str(os.getpid())}
print('clean' if not left and not others and not sys.stdin.read() else (left, others))
"""
