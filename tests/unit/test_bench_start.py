# SPDX-License-Identifier: Apache-2.0
"""What the ranks say is read as they say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ub_dynamic.bench import start


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("")
    seen: list[Any] = []
    with start._Reader(path, seen.append) as reader, path.open("a") as file:
        file.write(json.dumps({"row": {"a": 1}}) + "\n" + '{"row": ')
        file.flush()
        file.write('{"a": 2}}\n{"ended in the mid')
    assert seen == [{"row": {"a": 1}}, {"row": {"a": 2}}] == reader.events
