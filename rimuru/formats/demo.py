"""The model that ships with the package: `demo` stands for its file wherever a model is named."""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "demo"
_FOLDER = Path(__file__).resolve().parents[1] / "demo"


def is_demo(name: str | Path) -> bool:
    """True where `name` means the packaged model; a file or folder of that name in the current folder comes first."""
    return str(name) == DEMO_NAME and not Path(name).exists()


def model_path(name: str | Path) -> Path:
    """The path that a model's name means."""
    return _FOLDER / "demo.gguf" if is_demo(name) else Path(name)


def held_out_path() -> Path:
    """Stories that the demo model was not trained on, `<|endoftext|>` behind each; UTF-8."""
    return _FOLDER / "held_out.txt"
