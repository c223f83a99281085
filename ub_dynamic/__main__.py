# SPDX-License-Identifier: Apache-2.0
"""`python -m ub_dynamic`: the command line, which needs the extra `cli`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


def main() -> int:
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        print(f"python -m ub_dynamic needs {needs}: pip install 'ub_dynamic[cli]'", file=sys.stderr)
        return 2
    try:
        from .cli.app import app

        app(prog_name="python -m ub_dynamic")
    except KeyboardInterrupt:  # while the commands are imported; once one runs, it says what became of it
        return 130
    except OSError as error:
        if error.filename is not None:
            raise
        # A standard stream; what it still holds would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"python -m ub_dynamic: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
