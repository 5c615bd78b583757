"""Gives a program one option that no other user of the machine can read.

A program's arguments are visible to all users (`ps`), its environment to its own user alone. Triton
takes secrets as arguments only. So the option travels in the environment, and the program is held
before its first instruction while the pointer of its last argument is turned to it:

* Before the program begins, the dynamic linker opens the path in LD_PRELOAD. That is a pipe of the
  agent, and a pipe opens only when both of its ends are open, so the program waits for the agent.
* The kernel keeps the pointers to arguments and environment on the program's stack, where its
  parent may change them. Both variables disappear from the environment that children inherit.

A program that was never released ends, because its last argument is an option unknown to it.
"""

import errno
import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PLACEHOLDER = "--option-of-the-environment"
_OPTION = "SLUICE_SECRET_OPTION"
_GATE = "LD_PRELOAD"
_OPEN_S = 10.0  # the program's own start; a millisecond on an idle machine
_POLL_S = 0.001
_WORD = 8
# Fields of /proc/PID/stat, counted from 1.
_START_STACK, _ENV_START, _ENV_END = 28, 50, 51


class SecretOptionError(OSError):
    """The option could not be handed over; the message names the fix."""


class SecretOption:
    """One option of one program.

    Put `arguments` last, `environment` and `gate` into the environment, start it, `hand_over`.
    """

    def __init__(self, option: str, gate: Path) -> None:
        """Prepare.

        Args:
            option: Option with its value.
            gate: Path of a pipe to be made; a file there is replaced.
        """
        self._option = option
        self._gate = gate

    def prepare(self, uid: int | None = None) -> None:
        """Make the pipe; OSError: it cannot be made.

        Args:
            uid: User of the program; None: this process's own.
        """
        self._gate.unlink(missing_ok=True)
        os.mkfifo(self._gate, 0o600)
        if uid is not None:
            os.chown(self._gate, uid, -1)

    @property
    def arguments(self) -> Sequence[str]:
        """Arguments that stand for the option at the end of the command line."""
        return (PLACEHOLDER,)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables with the option, which the program needs at its start or before."""
        return {_OPTION: self._option}

    @property
    def gate(self) -> Mapping[str, str]:
        """Environment variables that hold a program until `hand_over`."""
        return {_GATE: str(self._gate)}

    def hand_over(self, pid: int) -> None:
        """Give a program that was just started its option, and let it run; blocks.

        Raises:
            SecretOptionError: The program ended, hangs, or this kernel forbids the change of its
                memory.
        """
        gate = self._opened(pid)
        try:
            _turn(pid)
        except (OSError, ValueError, struct.error) as error:
            raise SecretOptionError(
                f"the engine's secret cannot be hidden from other users: the memory of process"
                f" {pid} cannot be written ({error}); allow a process to trace its children"
                " (kernel.yama.ptrace_scope below 2, no gVisor), or set AGENT__HIDES_SECRETS=false"
                " on a node whose processes no other user can list"
            ) from None
        finally:
            os.close(gate)
            with suppress(OSError):
                self._gate.unlink()

    def _opened(self, pid: int) -> int:
        end_s = time.monotonic() + _OPEN_S
        while time.monotonic() < end_s:
            try:
                return os.open(self._gate, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no reader yet
                    raise SecretOptionError(f"{self._gate}: {error}; start it again") from None
            if not Path(f"/proc/{pid}/stat").exists() or _stat(pid)[0] == "Z":
                raise SecretOptionError(f"process {pid} ended before it began; see its log")
            time.sleep(_POLL_S)
        raise SecretOptionError(
            f"process {pid} did not begin within {_OPEN_S:.0f} s; is the program linked statically?"
        )


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _turn(pid: int) -> None:
    """Turn the last argument to the option, and take our variables out of the environment."""
    fields = _stat(pid)
    stack, env_start, env_end = (int(fields[at - 3]) for at in (_START_STACK, _ENV_START, _ENV_END))
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        words = _Words(memory.fileno())
        count = words.read(stack, 1)[0]
        table = stack + (count + 2) * _WORD  # behind the arguments and their end
        block = os.pread(memory.fileno(), env_end - env_start, env_start)
        texts = {env_start + at: text for at, text in _texts(block)}
        pointers = words.read(table, len(texts))
        option = next(it for it in pointers if texts[it].startswith(f"{_OPTION}=".encode()))
        ours = (f"{_OPTION}=".encode(), f"{_GATE}=".encode())
        kept = [it for it in pointers if not texts[it].startswith(ours)]
        words.write(stack + count * _WORD, [option + len(_OPTION) + 1])
        words.write(table, kept + [0] * (len(pointers) - len(kept)))


def _texts(block: bytes) -> list[tuple[int, bytes]]:
    """Return the zero-ended texts of a block, and where each begins."""
    found: list[tuple[int, bytes]] = []
    at = 0
    for text in block.split(b"\0")[:-1]:
        found.append((at, text))
        at += len(text) + 1
    return found


class _Words:
    """Words of a process' memory."""

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def read(self, at: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"={count}Q", os.pread(self._memory, count * _WORD, at))

    def write(self, at: int, words: Sequence[int]) -> None:
        os.pwrite(self._memory, struct.pack(f"={len(words)}Q", *words), at)
