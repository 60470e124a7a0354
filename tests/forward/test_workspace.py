"""Views of the workspace: made once, right for every length, forgotten where there are too many."""

from __future__ import annotations

import numpy as np
import pytest

from rimuru.forward import workspace as module
from rimuru.forward.workspace import Workspace
from rimuru.ops.reference import ReferenceOps


@pytest.fixture
def workspace() -> Workspace:
    made = Workspace(ReferenceOps(), 10)
    made.need_array("q", 4)
    made.need_array("q", 6)
    made.need_array("gate", 1)
    made.need_act("normed", 32)
    made.allocate(10)
    return made


def test_views_are_kept_and_share_memory(workspace: Workspace) -> None:
    view = workspace.array("q", 3, 4)
    assert view is workspace.array("q", 3, 4) and view.shape == (3, 4)
    assert workspace.act("normed", 5, 32) is workspace.act("normed", 5, 32)
    workspace.array("q", 2, 6)[:] = 7.0
    assert (view == 7.0).all() and workspace.array("q", 4, 4).shape == (4, 4)
    assert np.shares_memory(workspace.vector("gate", 3), workspace.array("gate", 3, 1))
    assert workspace.vector("gate", 3).shape == (3,)


def test_views_are_bounded(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VIEWS", 4)
    for turn in range(3):
        for n_tokens in range(1, 11):
            view = workspace.array("q", n_tokens, 6)
            view[:] = turn + n_tokens
            assert view.shape == (n_tokens, 6) and (workspace.array("q", 1, 6) == turn + n_tokens).all()
            assert workspace.act("normed", n_tokens, 32).f32.shape == (n_tokens, 32)
    assert len(workspace._views) <= 4 and len(workspace._heads) <= 4
