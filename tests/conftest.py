"""Fixtures of the whole suite. `gpu` tests need a CUDA device and are skipped without one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# In CI the same examples are tried in every run: a change does not fail for what was there before. Elsewhere the search
# goes on; what it finds becomes an @example. Deadlines measure the machine, not the code.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "search")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "append each failure's text to FILE as soon as it is known: a run that is stopped still says what failed"
    parser.addoption("--failures-file", metavar="FILE", help=text)


class _FailuresFile:
    """Lives in the process that gathers reports, also where tests run side by side."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"== {report.nodeid} ({report.when})\n{report.longreprtext}\n")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures-file")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresFile(path))
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    config.addinivalue_line("markers", "alone: measures or fills the GPU's memory; nothing else may use it meanwhile")


def _has_gpu() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # any failure to reach a device means that there is none to test on
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _logging_as_imported() -> None:
    """A command line that a test runs in this process sets up logging; the next test finds it as after an import."""
    logger = logging.getLogger("rimuru")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of handed cases beside the checkout; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "cases").is_dir():
        pytest.skip("the folder ../shared is not there")
    return folder
