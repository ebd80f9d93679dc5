"""Start User-Mode Linux on processors it does not know: `python3 scripts/uml.py linux.uml OPTION ..`.

It keeps the floating-point state of its processes in a buffer made for older processors; on those with AMX the host
refuses to take back what does not fit, and the guest ends in a panic at once. Told that this way of asking does not
exist, it uses the older one, which knows nothing beyond SSE. So what runs in the guest should not use AVX: `NO_AVX`
tells the C library and OpenSSL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

NO_AVX = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-AVX_Fast_Unaligned_Load",
    "OPENSSL_ia32cap": "~0x1000000000000000:~0x20",
}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EINVAL
X86_64, PTRACE, PTRACE_GETREGSET, NT_X86_XSTATE = 0xC000003E, 101, 0x4204, 0x202
# Offsets in what a filter sees: the call's number, the architecture, the low halves of its first and third argument.
WANTED = ((4, X86_64), (0, PTRACE), (16, PTRACE_GETREGSET), (32, NT_X86_XSTATE))


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def refuse_xstate() -> None:
    """From now on, for this process and its children, nobody gets the extended state of another process."""
    steps = []
    for index, (offset, value) in enumerate(WANTED):
        to_the_end = 2 * (len(WANTED) - index) - 1
        steps += [(LOAD, 0, 0, offset), (JUMP_IF_EQUAL, 0, to_the_end, value)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


if __name__ == "__main__":
    refuse_xstate()
    os.execvp(sys.argv[1], sys.argv[1:])
