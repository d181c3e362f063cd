"""Restricts the process with Landlock: permanently limits its access to files and TCP ports, and the signals that it
may send.

The kernel's documentation is ``userspace-api/landlock.rst``. Each version of the interface (ABI) adds kinds of access.
A ruleset names the kinds that it restricts. On an older kernel, the ruleset names only the kinds that this kernel
knows.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

SystemCall = Callable[..., int]
"""Makes a system call. Takes its number and its arguments, and returns its result. Raises OSError if the call fails."""

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls. They are the same on all processors."""
_VERSION_QUERY = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38


class Right(enum.IntFlag):
    """Kinds of access to files, with the kernel's bits."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


_OF_A_FILE = Right.EXECUTE | Right.WRITE_FILE | Right.READ_FILE | Right.TRUNCATE | Right.IOCTL_DEV
"""Kinds of access that a rule for a single file may permit. All other kinds are for folders."""
_TCP_BIND_AND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_FIRST_ABI_OF_TCP, _FIRST_ABI_OF_SCOPES = 4, 6
_NEWER_RIGHTS = ((2, Right.REFER), (3, Right.TRUNCATE), (5, Right.IOCTL_DEV))
"""Access rights that later ABIs of Landlock have added, each with the first ABI that has it."""
_UNREACHABLE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Rule:
    """Permits some kinds of access to a file, or to a folder and everything in it."""

    path: Path
    rights: Right


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Makes a system call and returns its result. Raises OSError if it fails."""
    result: int = _libc().syscall(ctypes.c_long(number), *(_word(each) for each in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def forbid_new_privileges() -> None:
    """Sets ``no_new_privs``: programs that this process starts cannot gain privileges, for example by setuid.

    Linux requires this before Landlock and seccomp. Raises OSError.
    """
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def landlock_abi(call: SystemCall = system_call) -> int:
    """Returns the version (ABI) of Landlock in this kernel, or 0 if Landlock is missing or turned off."""
    try:
        return call(CREATE_RULESET, None, 0, _VERSION_QUERY)
    except OSError as error:
        # A container runtime that forbids Landlock returns EPERM.
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict(rules: Iterable[Rule], *, abi: int, isolates: bool, call: SystemCall = system_call) -> None:
    """Restricts the calling thread, and all threads that it starts, to the files of ``rules``.

    ``isolates`` also forbids executing files, opening TCP connections or ports, and sending signals to processes that
    are not under the same restriction. Rules for missing paths are ignored. Raises OSError.
    """
    restricted = _file_rights(abi)
    if not isolates:
        restricted &= ~Right.EXECUTE
    ruleset = call(CREATE_RULESET, *_sized(_attributes(restricted, abi, isolates)), 0)
    try:
        for rule in rules:
            _add(ruleset, rule, restricted, call)
        call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _file_rights(abi: int) -> Right:
    """Returns the kinds of access to files that an ABI can restrict."""
    rights = Right((1 << 13) - 1)
    for first, right in _NEWER_RIGHTS:
        if abi >= first:
            rights |= right
    return rights


def _attributes(restricted: Right, abi: int, isolates: bool) -> bytes:
    """Returns the bytes of ``struct landlock_ruleset_attr``, with only the fields that version ``abi`` has."""
    fields = [int(restricted)]
    if abi >= _FIRST_ABI_OF_TCP:
        fields.append(_TCP_BIND_AND_CONNECT * isolates)
    if abi >= _FIRST_ABI_OF_SCOPES:
        fields.append(_ABSTRACT_SOCKETS_AND_SIGNALS * isolates)
    return struct.pack(f"={len(fields)}Q", *fields)


def _add(ruleset: int, rule: Rule, restricted: Right, call: SystemCall) -> None:
    try:
        descriptor = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        # A path that does not exist or that this process cannot reach needs no rule.
        if error.errno in _UNREACHABLE:
            return
        raise
    try:
        rights = rule.rights & restricted
        if not rule.path.is_dir():
            rights &= _OF_A_FILE
        if rights:
            call(ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", int(rights), descriptor), 0)
    finally:
        os.close(descriptor)


def _sized(data: bytes) -> tuple[bytes, int]:
    return data, len(data)


def _word(value: int | bytes | None) -> object:
    """Converts an argument of a system call: an integer to a machine word, bytes to a pointer to the bytes."""
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
