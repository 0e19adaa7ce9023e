"""The wheel with the program in it."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from .shared import ROOT

CLIENT = ROOT / "clients" / "python"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def build(place: Path, program: Path | None) -> Path:
    """Build a wheel."""
    environment = {**os.environ, "POINTSMAN_PROGRAM": str(program or "")}
    # The build back end is installed already.
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(CLIENT)]
    subprocess.run(command, check=True, env=environment)
    [wheel] = place.glob("*.whl")
    return wheel


def test_the_wheel_installs_the_program(program: Path, tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", program)
    # Other systems have other tags; the tag is honest if pip takes the wheel and the program then runs.
    assert re.fullmatch(r"pointsman-[\d.]+-py3-none-\w+\.whl", wheel.name) and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [record] = [name for name in names if name.endswith(".dist-info/RECORD")]
        recorded = {row[0]: row[1:] for row in csv.reader(archive.read(record).decode().splitlines())}
        assert set(recorded) == names
        for name in names - {record}:
            data = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert recorded[name] == [f"sha256={digest}", str(len(data))], name
        [metadata] = [archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false" in metadata

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python = fresh / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-index", "--no-deps", wheel], check=True)
    # The packages that it needs are those of this environment; its own code must be that of the wheel.
    [packages] = (fresh / "lib").glob("python*/site-packages")
    (packages / "needed.pth").write_text(str(Path(np.__file__).parents[1]))
    environment = {**os.environ, "PATH": f"{fresh / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(["pointsman", "--version"], capture_output=True, text=True, check=True, env=environment).stdout
    code = "import importlib.metadata, pointsman; print(importlib.metadata.version('pointsman'), pointsman.__file__)"
    version, place = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == f"pointsman {version}\n", "the program and the package have the same version"
    assert Path(place).is_relative_to(packages)


@pytest.mark.skipif(sys.platform != "linux", reason="tags of Linux")
def test_the_tag_is_that_of_the_program(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CLIENT)
    import hatch_build

    tag = hatch_build.platform_tag(program)
    found = re.fullmatch(r"(?:manylinux_(\d+)_(\d+)|linux)_(x86_64|aarch64)", tag)
    assert found is not None, tag
    # It runs here, so it cannot need a newer glibc than there is.
    here = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if found[1] is not None:
        assert (int(found[1]), int(found[2])) <= tuple(int(part) for part in here.split()[-1].split("."))

    listing = "(NEEDED)  Shared library: [libc.so.6]\n (NEEDED)  Shared library: [ld-linux-x86-64.so.2]\n"
    header = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little")
    small = tmp_path / "small"
    small.write_bytes(header)
    for listed, expected in [
        (f"{listing} Name: GLIBC_2.2.5 Name: GLIBC_2.38 Name: GLIBC_2.4", "manylinux_2_38_x86_64"),
        (f"{listing} Name: GLIBC_2.3.4", "manylinux_2_17_x86_64"),
        (f"{listing} (NEEDED)  Shared library: [libssl.so.3]\nGLIBC_2.34", "linux_x86_64"),
        ("(NEEDED)  Shared library: [libc.musl-x86_64.so.1]", "linux_x86_64"),
        ("", "linux_x86_64"),
    ]:
        monkeypatch.setattr(hatch_build, "_readelf", lambda program, listed=listed: listed)
        assert hatch_build.platform_tag(small) == expected
    small.write_bytes(header[:18] + (8).to_bytes(2, "little"))
    with pytest.raises(ValueError, match="is for the ELF machine 8: expected one of x86_64, aarch64"):
        hatch_build.platform_tag(small)


def test_the_program_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CLIENT)
    import hatch_build

    hook = object.__new__(hatch_build.ProgramHook)
    for program, problem in [("target/release/pointsman", "is relative"), (str(tmp_path / "none"), "no such file")]:
        monkeypatch.setenv("POINTSMAN_PROGRAM", program)
        with pytest.raises((ValueError, FileNotFoundError), match=problem):
            hook.initialize("standard", {})
    build_data: dict[str, object] = {}
    hook.initialize("editable", build_data)
    assert build_data == {}


def test_without_a_program_the_wheel_fits_every_platform(tmp_path: Path) -> None:
    assert build(tmp_path, None).name.endswith("-py3-none-any.whl")
