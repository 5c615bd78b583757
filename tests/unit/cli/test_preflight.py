import shutil
from pathlib import Path

import pytest

from cli.stack import preflight
from cli.stack.errors import StackError
from cli.stack.home import Home
from sluice.process import free_port


def test_a_good_home_is_made(tmp_path) -> None:
    preflight.check_home(Home(tmp_path / "new" / ".sluice"))
    assert (tmp_path / "new" / ".sluice").is_dir()
    assert list((tmp_path / "new" / ".sluice").iterdir()) == []


def test_a_full_disk_is_one_line_that_names_the_fix(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=300 << 20))
    with pytest.raises(StackError, match=r"300 MiB of disk left.*SLUICE_HOME"):
        preflight.check_home(Home(tmp_path))


def test_a_home_that_cannot_be_written_is_one_line_that_names_the_fix(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match=r"cannot be written.*SLUICE_HOME"):
        preflight.check_home(Home(tmp_path / "file" / "home"))


@pytest.mark.parametrize("name", ["my home", "a;b", "$x", "it's"])
def test_a_home_that_a_shell_would_misread_is_refused(tmp_path, name) -> None:
    with pytest.raises(StackError, match="set SLUICE_HOME"):
        preflight.check_home(Home(tmp_path / name))


@pytest.mark.parametrize("name", ["sluice.1", "a-b_c", "größe", "x@y"])
def test_ordinary_names_are_taken(tmp_path, name) -> None:
    preflight.check_home(Home(tmp_path / name))


def test_one_port_for_both_is_refused() -> None:
    port = other = free_port()
    while other == port:
        other = free_port()
    preflight.check_public_ports(port, other)
    with pytest.raises(StackError, match=rf"^port {port} is asked for twice: .* --admin-port N$"):
        preflight.check_public_ports(port, port)


def test_a_foreign_platform_is_refused(monkeypatch) -> None:
    preflight.check_platform()
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(StackError, match="needs Linux on x86_64, this is darwin"):
        preflight.check_platform()


def test_missing_wheels_are_named_with_the_fix(monkeypatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "chdb" else object())
    with pytest.raises(StackError, match=r"trace store.*pip install"):
        preflight.check_platform()


def test_missing_parts_of_triton_are_named(monkeypatch) -> None:
    preflight.check_triton("sim")
    monkeypatch.setattr(preflight, "triton_problems", lambda _: ["no libpython: do this"])
    with pytest.raises(StackError, match="no libpython: do this"):
        preflight.check_triton("sim")


def test_the_base_is_the_chosen_one_or_the_shipped_one(tmp_path, monkeypatch) -> None:
    with pytest.raises(StackError, match=r"tokenizer.json.*--base"):
        preflight.find_base(tmp_path)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert preflight.find_base(tmp_path) == tmp_path
    assert preflight.find_base(None).name == "default"
    monkeypatch.setattr(preflight, "_shipped_base", lambda: Path("/nowhere"))
    with pytest.raises(StackError, match="git checkout model_repo/default"):
        preflight.find_base(None)
