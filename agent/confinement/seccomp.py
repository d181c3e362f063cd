"""Installs a seccomp filter, so that the kernel refuses system calls that no agent needs.

The filter refuses all sockets except UNIX sockets. It also refuses reading and changing other processes, io_uring
(which would bypass the filter), and changes of the kernel and of mounts. A refused call fails with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
import sys

from agent.confinement.landlock import SystemCall, system_call

# Operation codes of classic BPF (linux/filter.h). An instruction has a code, two jump distances and an operand. The
# first distance is for a test that is true, the second for a test that is false.
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in bytes in struct seccomp_data: number of the system call, processor, low half of the first argument.
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_SET_MODE_FILTER = 1
# SECCOMP_FILTER_FLAG_TSYNC and SECCOMP_FILTER_FLAG_SPEC_ALLOW of linux/seccomp.h
_ALL_THREADS, _NO_SPECULATION_PENALTY = 1, 4
_X32_BIT = 0x40000000
"""Bit of the numbers of system calls in x86-64's second interface (x32). The filter refuses all of these calls."""

# For each processor: its audit number, the number of the call seccomp(2), and the number of the call socket(2).
_MACHINES = {"x86_64": (0xC000003E, 317, 41), "aarch64": (0xC00000B7, 277, 198)}

_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
}
"""Names of the refused system calls, with their numbers on x86-64 and on 64-bit Arm."""


def can_filter() -> bool:
    """Returns True if the filter supports this processor. Each architecture has its own numbers of system calls."""
    return _machine() is not None


def refuse_system_calls(call: SystemCall = system_call) -> None:
    """Installs the filter in all threads of this process, and in all threads that they start. Raises OSError.

    The process must have called ``forbid_new_privileges``.
    """
    machine = _machine()
    if machine is None:
        raise OSError(errno.ENOSYS, f"there is no filter for the processor {platform.machine()}")
    program = _program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    call(_MACHINES[machine][1], _SET_MODE_FILTER, _ALL_THREADS | _NO_SPECULATION_PENALTY, header)


def _machine() -> str | None:
    name = platform.machine()
    return name if name in _MACHINES and sys.maxsize > 2**32 and sys.byteorder == "little" else None


def _program(machine: str) -> bytes:
    """Returns the filter as BPF instructions. Its last two instructions are "allow" and "refuse"."""
    arch, _, socket_number = _MACHINES[machine]
    column = list(_MACHINES).index(machine)
    refused = sorted(numbers[column] for numbers in _REFUSED.values())
    lines: list[tuple[int, int, int, int]] = []
    first_test = 6
    allow = first_test + 1 + len(refused)
    refuse = allow + 1

    def jump(code: int, operand: int, *, yes: int | None = None, no: int | None = None) -> None:
        """Adds a conditional jump: to instruction ``yes`` if the test is true, else to instruction ``no``.

        None means the next instruction.
        """
        here = len(lines) + 1
        lines.append((code, 0 if yes is None else yes - here, 0 if no is None else no - here, operand))

    lines.append((_LOAD, 0, 0, _ARCH_OFFSET))
    jump(_JUMP_EQUAL, arch, no=refuse)
    lines.append((_LOAD, 0, 0, _NUMBER_OFFSET))
    jump(_JUMP_EQUAL, socket_number, no=first_test)
    lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET))
    jump(_JUMP_EQUAL, socket.AF_UNIX, yes=allow, no=refuse)
    jump(_JUMP_AT_LEAST, _X32_BIT, yes=refuse)
    for number in refused:
        jump(_JUMP_EQUAL, number, yes=refuse)
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
