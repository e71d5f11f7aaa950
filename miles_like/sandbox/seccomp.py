"""The system call filter of sandboxes: a classic BPF program (linux/seccomp.h, linux/bpf_common.h).

What it refuses is of no use to an honest program: it would reach the sandbox's first process, which has the same user
(ptrace, prlimit of another process, priorities), survive the program in the kernel (System V and POSIX queues and
segments, keys), take memory that no limit counts (memory files), or is surface of the kernel that a program can do
without (namespaces, mounts, io_uring, bpf, perf, netlink and other socket families).
"""

from __future__ import annotations

import errno
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NAMESPACES = 0x7E020000  # CLONE_NEW* of linux/sched.h, NEWTIME excepted, which clone does not take
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# name -> number on x86_64 and aarch64 (asm/unistd.h)
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_* of linux/audit.h
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_PRLIMIT, _AFFINITY = (302, 261), (203, 122)
_FIRST, _SECOND = 16, 24  # offsets of the low words of the arguments in seccomp_data
_X32 = 0x40000000  # calls of x86_64 under other numbers

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def refused_calls(machine: str) -> dict[str, int]:
    """Name -> number of the calls that are refused whatever their arguments; empty for an unknown machine."""
    known = _ARCHITECTURES.get(machine)
    return {} if known is None else {name: numbers[known[1]] for name, numbers in _REFUSED.items()}


def seccomp_filter(machine: str) -> bytes:
    """The filter for a machine as `platform.machine` names it; b"" for one whose numbers are not known here."""
    if machine not in _ARCHITECTURES:
        return b""
    architecture, i = _ARCHITECTURES[machine]
    refuse, unknown = _error(errno.EPERM), _error(errno.ENOSYS)
    out: list[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_GIVE, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        out += [(_AT_LEAST, 0, 1, _X32), (_GIVE, 0, 0, refuse)]
    for number in refused_calls(machine).values():
        out += [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, refuse)]
    out += [(_EQUAL, 0, 1, _CLONE3[i]), (_GIVE, 0, 0, unknown)]  # glibc then calls clone, whose flags a filter reads
    out += _unless(_CLONE[i], _FIRST, [(_ANY_BIT, _NAMESPACES)], allowed=False, error=refuse)
    out += _unless(_PRLIMIT[i], _FIRST, [(_EQUAL, 0)], allowed=True, error=refuse)
    out += _unless(_AFFINITY[i], _FIRST, [(_EQUAL, 1)], allowed=False, error=refuse)
    families = [(_EQUAL, family) for family in _FAMILIES]
    out += _unless(_SOCKET[i], _FIRST, families, allowed=True, error=_error(errno.EAFNOSUPPORT))
    out += _unless(_IOCTL[i], _SECOND, [(_EQUAL, request) for request in _TERMINAL], allowed=False, error=refuse)
    out.append((_GIVE, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *one) for one in out)


def _error(number: int) -> int:
    return 0x50000 | number  # SECCOMP_RET_ERRNO


def _unless(number: int, at: int, tests: list[tuple[int, int]], *, allowed: bool, error: int) -> list[Instruction]:
    """Of the call `number`: whether one of the tests of its argument holds decides; `allowed`: what follows then."""
    found, other = (_ALLOW, error) if allowed else (error, _ALLOW)
    body: list[Instruction] = [(_LOAD, 0, 0, at)]
    body += [(code, len(tests) - k, 0, operand) for k, (code, operand) in enumerate(tests)]
    body += [(_GIVE, 0, 0, other), (_GIVE, 0, 0, found)]
    return [(_EQUAL, 0, len(body), number), *body]
