"""Tests that an option is neither in a program's arguments nor in children's environments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replica.agent.secret_option import PLACEHOLDER, SecretOption, SecretOptionError

_TELL = """
import json, os, subprocess, sys
child = subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout
print(json.dumps({
    "got": sys.argv[1:],
    "shown": open("/proc/self/cmdline").read().split("\\0"),
    "child": child,
    "other": os.environ["OTHER"],
}))
"""


def test_it_arrives_and_no_other_user_and_no_child_sees_it(tmp_path: Path) -> None:
    option = SecretOption("--token=very secret", tmp_path / "gate")
    option.prepare()
    process = subprocess.Popen(
        [sys.executable, "-c", _TELL, "plain", *option.arguments],
        env={"OTHER": "kept", **option.environment, **option.gate},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    option.hand_over(process.pid)
    told = json.loads(process.communicate(timeout=30)[0])
    assert told["got"] == ["plain", "--token=very secret"]
    assert PLACEHOLDER in told["shown"]
    assert "very secret" not in str(told["shown"])
    assert told["other"] == "kept"
    assert "secret" not in told["child"]
    assert "LD_PRELOAD" not in told["child"]
    assert not (tmp_path / "gate").exists()


def test_a_program_that_ends_before_it_begins_is_told(tmp_path: Path) -> None:
    option = SecretOption("--token=x", tmp_path / "gate")
    option.prepare()
    process = subprocess.Popen([sys.executable, "-c", "pass"], env=dict(os.environ))
    process.wait(timeout=30)
    with pytest.raises(SecretOptionError, match="ended before it began"):
        option.hand_over(process.pid)
