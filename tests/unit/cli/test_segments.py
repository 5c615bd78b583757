from cli.stack.segments import mapped_files, orphaned_ids, remove_files, remove_orphans

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


def test_who_made_nothing_leaves_nothing() -> None:
    assert remove_orphans({2**22 + 1}) == []
    assert remove_files([], "no-such-prefix-of-sluice-") == []
    assert mapped_files([2**22 + 1]) == set()
