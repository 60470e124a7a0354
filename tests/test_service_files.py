"""tools/rimuru.service and tools/Containerfile: systemd accepts the unit, and both run commands of this version."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

from rimuru.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
UNIT, CONTAINER = ROOT / "tools/rimuru.service", ROOT / "tools/Containerfile"


class Sections(dict):  # type: ignore[type-arg]
    """Keys that may be given several times are joined by lines."""

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, dict_type=Sections, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the container file, continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", CONTAINER.read_text()).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip() and not line.startswith("#")]  # type: ignore[misc]


def values_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_unit_runs_a_command_of_this_version() -> None:
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0] == "%h/.local/bin/rimuru" and words[-1] == "$RIMURU_ARGS"
    assert "RIMURU_ARGS=" in service["Environment"].splitlines()
    args = build_parser().parse_args([*words[1:-1], "--api-key", "k"])
    assert (args.command, args.model, args.host, args.api_key) == ("serve.serve", "${MODEL}", "127.0.0.1", ["k"])


def test_the_unit_stops_as_the_server_does() -> None:
    """SIGTERM to the server alone, which drains; exit code 2 (bad input) is not tried again."""
    service = unit()["Service"]
    assert service["KillMode"] == "mixed" and "KillSignal" not in service and int(service["TimeoutStopSec"]) >= 60
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / ".local/bin/rimuru"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    shutil.copy(UNIT, tmp_path)
    folders = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    environment = {**os.environ, **folders, "SYSTEMD_LOG_LEVEL": "warning"}
    command = ["systemd-analyze", "--user", "verify", str(tmp_path / UNIT.name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if "initialize manager" in result.stderr:
        pytest.skip("systemd cannot look at units here")
    assert (result.returncode, result.stderr) == (0, "")


def test_the_container_runs_a_command_of_this_version() -> None:
    (entry,) = values_of("ENTRYPOINT")
    words = json.loads(entry)
    args = build_parser().parse_args([*words[1:], "/models/model.gguf"])
    assert words[0] == "rimuru" and (args.command, args.host) == ("serve.serve", "0.0.0.0")
    assert values_of("EXPOSE") == [str(args.port)] and values_of("STOPSIGNAL") == ["SIGTERM"]
    (health,) = values_of("HEALTHCHECK")
    code = json.loads(health[health.index("[") :])[2]
    assert f":{args.port}/health" in code
    compile(code, "healthcheck", "exec")


def test_the_container_installs_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for sources in (value.split()[:-1] for value in values_of("COPY")):
        assert all((ROOT / source).exists() for source in sources), sources
    (extras,) = (value.removeprefix("EXTRAS=") for value in values_of("ARG"))
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (image,) = values_of("FROM")
    found = re.search(r"python:3\.(\d+)-slim$", image)
    assert found is not None and 10 <= int(found[1]) <= 13


def test_the_container_user_owns_its_caches() -> None:
    """A volume at a path that the image lacks would be root's, and nothing compiled would be kept."""
    steps = instructions()
    (volume,) = values_of("VOLUME")
    made = steps.index(("RUN", f"mkdir {volume}"))
    assert steps.index(("USER", "rimuru")) < made < steps.index(("VOLUME", volume))
    variables = dict(part.split("=") for value in values_of("ENV") for part in value.split())
    caches = [value for name, value in variables.items() if name.endswith("_CACHE_DIR")]
    assert len(caches) == 2 and all(value.startswith(f"{volume}/") for value in caches)
    (mounted,) = re.findall(r" -v [^:]+:([^: ]+)", CONTAINER.read_text())
    assert variables["RIMURU_MODELS"] == mounted
