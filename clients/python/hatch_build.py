"""Packs the program into the wheel: POINTSMAN_PROGRAM=$PWD/target/release/pointsman pip wheel --no-deps ./clients/python

Without POINTSMAN_PROGRAM the wheel holds the Python package alone and fits every platform. With it, the wheel installs
`pointsman` beside the interpreter, and its tag names the platform that the program runs on, read from the program itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What PEP 600 lets a manylinux wheel expect of the system. Most of them are parts of glibc.
_OF_THE_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|util|resolv|nsl|gcc_s|stdc\+\+|z)|ld-linux[-a-z0-9_]*)\.so\.\d+")
_MACHINES = {62: "x86_64", 183: "aarch64"}
_OLDEST_GLIBC = (2, 17)


class ProgramHook(BuildHookInterface[Any]):
    """Adds the program to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        given = os.environ.get("POINTSMAN_PROGRAM")
        if not given or version == "editable":
            return
        program = Path(given)
        if not program.is_absolute():
            # pip builds in another directory.
            raise ValueError(f"POINTSMAN_PROGRAM = {given} is relative: name the program by its absolute path")
        if not program.is_file():
            raise FileNotFoundError(f"POINTSMAN_PROGRAM = {given}: there is no such file; build it with cargo build --release")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(program)}"
        build_data["shared_scripts"][str(program)] = "pointsman"
        licence = Path(self.root).parents[1] / "LICENSE"
        if licence.is_file():
            build_data["shared_data"][str(licence)] = "share/doc/pointsman/LICENSE"


def platform_tag(program: Path) -> str:
    """Return the platform that a program needs: manylinux_2_34_x86_64, or linux_x86_64 if it needs more than glibc."""
    header = program.read_bytes()[:20]
    if header[:4] != b"\x7fELF":
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    number = int.from_bytes(header[18:20], "little")
    machine = _MACHINES.get(number)
    if machine is None:
        raise ValueError(f"{program} is for the ELF machine {number}: expected one of {', '.join(_MACHINES.values())}")
    listed = _readelf(program)
    libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", listed)
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", listed)]
    # Without a glibc version there is nothing that a manylinux tag could promise: musl, or no readelf.
    if not versions or not all(_OF_THE_SYSTEM.fullmatch(library) for library in libraries):
        return f"linux_{machine}"
    major, minor = max(*versions, _OLDEST_GLIBC)
    return f"manylinux_{major}_{minor}_{machine}"


def _readelf(program: Path) -> str:
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(program)]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except FileNotFoundError:
        return ""
