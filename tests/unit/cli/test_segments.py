import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cli.stack.segments import (
    is_attached,
    mapped_files,
    orphaned_ids,
    remove_files,
    remove_orphans,
)

TABLE = """\
       key      shmid perms     size  cpid  lpid nattch   uid   gid  cuid  cgid atime dtime ctime rss swap
   2329135     294918   600       56 10085 10085      0   101   104   101   104 1 1 1 4096 0
   2312366     262151   600       56 19309 19309      3   101   104   101   104 1 1 1 4096 0
   2329287     294925   600       56 11662 24000      0   101   104   101   104 1 1 1 4096 0
"""


def test_only_segments_of_these_dead_and_without_users_are_orphans() -> None:
    assert orphaned_ids(TABLE, {10085, 19309}) == [294918]
    assert orphaned_ids(TABLE, {1}) == []
    assert orphaned_ids("header\n", {1}) == []


def test_a_process_without_segments_leaves_none() -> None:
    assert remove_orphans({2**22 + 1}) == []
    assert remove_files([], "no-such-prefix-of-sluice-") == []
    assert mapped_files([2**22 + 1]) == set()


def test_foreign_segments_count_as_attached_only_while_attached() -> None:
    assert is_attached(TABLE, {19309})
    assert not is_attached(TABLE, {10085, 11662})


CREATOR = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(0, 4096, 0o600)
assert number >= 0 and libc.shmat(number, None, 0) not in (None, ctypes.c_void_p(-1).value)
if os.fork():
    print(os.getpid(), number, flush=True)
    os._exit(0)
sys.stdin.read()
"""


def test_attached_processes_are_waited_for() -> None:
    command = [sys.executable, "-c", CREATOR]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        assert made.stdin is not None
        creator, number = map(int, made.stdout.readline().split())
        table = Path("/proc/sysvipc/shm")
        assert is_attached(table.read_text(), {creator})
        with ThreadPoolExecutor(1) as pool:
            removing = pool.submit(remove_orphans, {creator}, 60.0)
            made.stdin.close()
            assert removing.result() == [number]
        assert orphaned_ids(table.read_text(), {creator}) == []
