# SPDX-License-Identifier: Apache-2.0
"""Every GPU check and measurement in one command: what is right side by side, then what takes time alone.

    python benchmarks/run_te_gpu.py --out results --budget 590 --together 330

Each part is a process of its own with its own timeout, ended with all that it started; the others run whatever
becomes of it. Results are written as soon as a part has them, ``--archive`` keeps one file of all of them and of
every log current.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a machine that has a copy of the tree, and nothing installed

import _one_gpu  # noqa: E402
from _side_by_side import Ended, Part, Runner, shared_daemons  # noqa: E402


def _benchmark(name: str, tp: int, timeout_s: float, *more: str, part: str = "", **options: Any) -> Part:
    """One start of a benchmark program."""
    command = (f"benchmarks/{name}.py", "--tp", str(tp), "--timeout", "{limit}", *more, "--out", "{out}")
    return Part(f"{part or name}-tp{tp}", command, timeout_s, **{"result": name, "ranks": tp, **options})


def _older(tp: int) -> Part:
    name = "te_bits_older"
    more = ("--overlap", "default", "ring_rs", "dgrad_ring", "--name", name)
    return _benchmark("te_bits", tp, 320, *more, part=name, result=name, older_te=True, gpu=tp // 4)


def _pytest(name: str, ranks: int, *files: str, gpu: int = 0, **env: str) -> Part:
    flags = ("-s", "-v", "--tb=short", "-p", "no:cacheprovider", "--basetemp", "{out}/tmp")
    # Bits and memory have programs of their own here.
    leave = ("-k", "not bits_ and not take_no_memory and not again_and_again")
    settings = tuple({"UB_DYNAMIC_TEST_PATIENCE": "3", **env}.items())
    return Part(name, ("-m", "pytest", *flags, *leave, *files), 320, ranks=ranks, gpu=gpu, env=settings)


def _megatron(result: str, ranks: int, *more: str) -> Part:
    """Needs megatron-core; its times need the GPU alone."""
    command = ("benchmarks/megatron_gpu.py", "--timeout", "{limit}", *more, "--out", "{out}")
    return Part(result, command, 300, result=result, ranks=ranks, alone=True)


def _tp_step(hidden: int, tp: int, seconds: str) -> Part:
    """The steps of te_step for another H, of zeros: at H = 8192 a GPU is at its power limit otherwise. The smallest T
    is one at which the GPU is the limit, not the host."""
    name = f"tp_step_h{hidden}"
    more = (
        "--capacity",
        str(131072 if hidden < 4096 else 16384),
        "--hidden",
        str(hidden),
        "--seconds",
        seconds,
        "--steps-alone",
        "--operands",
        "zeros",
        "--name",
        name,
    )
    return _benchmark("te_step", tp, 200, *more, part=name, result=name, alone=True, gpu=tp // 4)


PARTS: tuple[Part, ...] = (
    _benchmark("te_bits", 4, 320),
    _benchmark("te_bits", 2, 320, gpu=1),
    _benchmark("te_stress", 4, 150),
    _benchmark("te_stress", 2, 120, gpu=1),
    _benchmark("attnres_gpu", 4, 90),
    _benchmark("te_memcheck", 2, 300, gpu=1, mps=False),
    _pytest("tests-tp4", 4, "tests/gpu/test_te.py", UB_DYNAMIC_TEST_TP="4"),
    _pytest("tests-tp2", 2, "tests/gpu/test_te.py", gpu=1, UB_DYNAMIC_TEST_TP="2"),
    _benchmark("cp_te", 4, 120),
    _benchmark("cp_te", 2, 100, gpu=1),
    _benchmark("te_graphs", 4, 90),
    _benchmark("te_graphs", 2, 90, gpu=1),
    _pytest("tests-one", 1, "tests/gpu/test_packing_gpu.py", "tests/gpu/test_cp_kernels_gpu.py", gpu=1),
    _older(2),
    _older(4),
    _benchmark("cp_hierarchical_gpu", 4, 100, result="cp_hierarchical"),
    _benchmark("cp_hierarchical_gpu", 2, 100, gpu=1, result="cp_hierarchical"),
    # times, and memory of the whole device
    _megatron("megatron_tp2", 2),
    _megatron("megatron_tp2pp2", 4, "--pp", "2"),
    _benchmark("te_step", 2, 320, "--seconds", "{step}", alone=True),
    _benchmark("te_step", 4, 320, "--seconds", "{step}", alone=True, gpu=1),
    _tp_step(2048, 2, "{small}"),
    _tp_step(2048, 4, "{small}"),
    _tp_step(8192, 2, "{step}"),
    _tp_step(8192, 4, "{step}"),
    _benchmark("te_set_shape", 2, 50, "--no-mps", alone=True),
    _benchmark("te_reinit", 2, 45, "--no-mps", alone=True),
    _benchmark("te_policy", 2, 120, result="policy", alone=True),
    _benchmark("te_policy", 4, 150, result="policy", alone=True, gpu=1),
    _benchmark("te_set_shape", 4, 55, "--no-mps", alone=True, gpu=1),
    _benchmark("te_reinit", 4, 55, "--no-mps", alone=True, gpu=1),
    _benchmark("cp_hierarchical_gpu", 4, 110, part="cp_hierarchical_gpu_alone", result="cp_hierarchical", alone=True),
    _benchmark(
        "cp_hierarchical_gpu", 2, 90, part="cp_hierarchical_gpu_alone", result="cp_hierarchical", alone=True, gpu=1
    ),
)


class Collector:
    """Merges the results of all starts of a program, says what is in them, and keeps the archive current."""

    def __init__(self, out: Path, archive: Path | None, older_te: Path | None) -> None:
        self.out, self.lines, self.failed = out, [], False  # type: tuple[Path, list[str], bool]
        self._archive, self._older_te, self._archived = archive, older_te, time.monotonic()

    def take(self, ended: Ended) -> None:
        try:
            figures = "not run: no time left" if ended.status is None else self._merge(ended.part)
        except Exception as error:  # the other parts go on
            figures = f"its result cannot be merged: {error!r}"
        status = "-" if ended.status is None else ended.status
        self.lines.append(f"{ended.part.name:26} {status:>4} {ended.seconds:6.0f} s  {figures}")
        self.failed |= ended.status != 0
        print(self.lines[-1], flush=True)
        if ended.status and ended.log is not None:
            print(ended.log.read_bytes()[-3000:].decode(errors="replace"), flush=True)
        self.archive()

    def _merge(self, part: Part) -> str:
        if part.result is None:
            return ""
        written = self._written(part.result)
        if not written:
            return ""
        target = self.out / f"{self._name(part.result)}.json"
        if len(written) == 1:
            shutil.copyfile(written[0], target)
        else:
            program = importlib.import_module(Path(part.command[0]).stem)
            _one_gpu.merge(written, program.figures, target)
        record = json.loads(target.read_text())
        if record["name"] != target.stem:
            target.write_text(json.dumps({**record, "name": target.stem}, indent=1) + "\n")
        if part.result == "te_step":
            self._steps_alone(record)
        return ", ".join(f"{k} {v:.4g}" for k, v in record["figures"].items())

    def _steps_alone(self, record: dict[str, Any]) -> None:
        """The steps of te_step by the name that those of other H have."""
        steps = [row for row in record["rows"] if row["kind"] == "step"]
        if steps:
            name = f"tp_step_h{steps[0]['hidden']}"
            figures = importlib.import_module("te_step").figures(steps)
            figures["failed_starts"] = record["figures"].get("failed_starts", 0)
            made = {**record, "name": name, "figures": figures, "rows": steps}
            (self.out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")

    def _written(self, result: str) -> list[Path]:
        """The file of each start; where one was run again with nothing beside it, and ended well, that one."""
        found: dict[str, Path] = {}
        for path in sorted((self.out / "parts").glob(f"*/{result}.json")):
            start = path.parent.name.replace("_alone", "")
            complete = not json.loads(path.read_text())["figures"].get("failed_starts", 0)
            if start not in found or ("_alone" in path.parent.name and complete):
                found[start] = path
        return list(found.values())

    def _name(self, result: str) -> str:
        """``te_bits_older`` with the version that ran, as in ``te_bits_te211``."""
        version = re.search(r"(\d+)\.(\d+)", str(self._older_te))
        if not result.endswith("_older") or version is None:
            return result
        return result.replace("_older", f"_te{version[1]}{version[2]}")

    def now_and_then(self) -> None:
        if time.monotonic() - self._archived > 20:
            self.archive()

    def archive(self) -> None:
        self._archived = time.monotonic()
        if self._archive is not None:
            partial = self._archive.with_name(self._archive.name + ".tmp")
            with tarfile.open(partial, "w:gz") as tar:
                tar.add(self.out, arcname=self.out.name)
            partial.replace(self._archive)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of result files and logs")
    parser.add_argument("--only", nargs="+", choices=names, help="these parts alone")
    parser.add_argument("--skip", nargs="+", choices=names, default=[])
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--together", type=float, default=330, help="seconds for the parts that run side by side")
    parser.add_argument("--step", type=float, default=85, help="seconds for each start of te_step")
    parser.add_argument("--small", type=float, default=60, help="seconds for each start of tp_step_h2048")
    parser.add_argument("--older-te", type=Path, help="the env.sh of another version, whose path names it")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the folder, made anew after each part")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.budget
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if part.name in (options.only or names) and part.name not in options.skip]
    chosen = [part for part in chosen if options.older_te is not None or not part.older_te]
    if importlib.util.find_spec("megatron") is None:
        chosen = [part for part in chosen if not part.name.startswith("megatron")]
        print("left out: what needs megatron-core, which is not installed", flush=True)
    collector = Collector(out, options.archive, options.older_te)
    words = {"{step}": f"{options.step:g}", "{small}": f"{options.small:g}"}
    runner = Runner(out, collector.take, words, options.older_te)
    together = [part for part in chosen if not part.alone]
    daemons = shared_daemons(runner.gpus) if together else contextlib.nullcontext()
    with daemons:
        runner.phase(together, min(end, time.monotonic() + options.together), collector.now_and_then)
    runner.phase([part for part in chosen if part.alone], end - 8, collector.now_and_then)
    print("\nsummary", *collector.lines, sep="\n")
    return int(collector.failed)


if __name__ == "__main__":
    raise SystemExit(main())
