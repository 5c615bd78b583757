"""Passes one option to a program so that no other user of the machine can read it.

All users can read a program's arguments (`ps`), but only its own user can read its environment.
Triton accepts secrets only as arguments. So the agent passes the secret in the environment and
stops the program before its first instruction. Then the agent changes the pointer to the program's
last argument, so that it points to the secret in the environment:

* Before the program begins, the dynamic linker opens the path in LD_PRELOAD. This path is a pipe
  that the agent created. The program waits in this open until the agent also opens the pipe.
* The kernel stores the pointers to arguments and environment on the program's stack, where the
  parent process may change them. The agent also removes both variables from the environment, so
  that child processes do not inherit them.

If the change fails, the program ends, because its last argument is an unknown option.
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
# Longest time until the program opens the pipe, in seconds. An idle machine needs a millisecond.
_OPEN_S = 10.0
_POLL_S = 0.001
_WORD = 8
# Fields of /proc/PID/stat, counted from 1.
_START_STACK, _ENV_START, _ENV_END = 28, 50, 51


class SecretOptionError(OSError):
    """The option could not be passed. The message names the remedy."""


class SecretOption:
    """One secret option of one program.

    The caller appends `arguments` to the command, adds `environment` and `gate` to the environment,
    starts the program, and then calls `hand_over`.
    """

    def __init__(self, option: str, gate: Path) -> None:
        """Store the option and the path of the pipe, which `prepare` creates.

        Args:
            option: Option with its value.
            gate: Path of the pipe, where `prepare` replaces an existing file.
        """
        self._option = option
        self._gate = gate

    def prepare(self, uid: int | None = None) -> None:
        """Create the pipe. Raises OSError if that fails.

        Args:
            uid: User id of the program, or None for the user of this process.
        """
        self._gate.unlink(missing_ok=True)
        os.mkfifo(self._gate, 0o600)
        if uid is not None:
            os.chown(self._gate, uid, -1)

    @property
    def arguments(self) -> Sequence[str]:
        """Arguments that the program has in place of the option. They must be the last ones."""
        return (PLACEHOLDER,)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variable with the option, which must be set when the program starts."""
        return {_OPTION: self._option}

    @property
    def gate(self) -> Mapping[str, str]:
        """Environment variable that stops a program at its start until `hand_over`."""
        return {_GATE: str(self._gate)}

    def hand_over(self, pid: int) -> None:
        """Pass the option to a program that was just started, and let it run. Blocks.

        Raises:
            SecretOptionError: The program ended or hangs, or this kernel forbids the change of its
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
                if error.errno != errno.ENXIO:  # the program has not opened the pipe yet
                    raise SecretOptionError(f"{self._gate}: {error}; start it again") from None
            if not Path(f"/proc/{pid}/stat").exists() or _stat(pid)[0] == "Z":
                raise SecretOptionError(f"process {pid} ended before it began; see its log")
            time.sleep(_POLL_S)
        raise SecretOptionError(
            f"process {pid} did not begin within {_OPEN_S:.0f} s; is the program linked statically?"
        )


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, which are free of spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _turn(pid: int) -> None:
    """Point the last argument to the option, and remove both variables from the environment."""
    fields = _stat(pid)
    stack, env_start, env_end = (int(fields[at - 3]) for at in (_START_STACK, _ENV_START, _ENV_END))
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        words = _Words(memory.fileno())
        count = words.read(stack, 1)[0]
        # the pointers after the arguments and their terminating null
        table = stack + (count + 2) * _WORD
        block = os.pread(memory.fileno(), env_end - env_start, env_start)
        texts = {env_start + at: text for at, text in _texts(block)}
        pointers = words.read(table, len(texts))
        option = next(it for it in pointers if texts[it].startswith(f"{_OPTION}=".encode()))
        ours = (f"{_OPTION}=".encode(), f"{_GATE}=".encode())
        kept = [it for it in pointers if not texts[it].startswith(ours)]
        words.write(stack + count * _WORD, [option + len(_OPTION) + 1])
        words.write(table, kept + [0] * (len(pointers) - len(kept)))


def _texts(block: bytes) -> list[tuple[int, bytes]]:
    """Return the zero-terminated texts of a block, each with its offset."""
    found: list[tuple[int, bytes]] = []
    at = 0
    for text in block.split(b"\0")[:-1]:
        found.append((at, text))
        at += len(text) + 1
    return found


class _Words:
    """Reads and writes 64-bit words of a process' memory."""

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def read(self, at: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"={count}Q", os.pread(self._memory, count * _WORD, at))

    def write(self, at: int, words: Sequence[int]) -> None:
        os.pwrite(self._memory, struct.pack(f"={len(words)}Q", *words), at)
