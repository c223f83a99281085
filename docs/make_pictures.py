# SPDX-License-Identifier: Apache-2.0
"""Write the pictures of docs/ as SVG: chunk layouts, a schedule, tokens saved, and GEMMs and transfers of a microbatch.

python docs/make_pictures.py                # all but the timeline's events, which it draws from its file
python docs/make_pictures.py --measure      # runs two ranks for the timeline first
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same picture gives the same file
mpl.rcParams.update({"svg.hashsalt": "ub_dynamic", "svg.fonttype": "none"})

from ub_dynamic.advise import Workload, advise  # noqa: E402
from ub_dynamic.cli import advise_picture, layout_picture, schedule_picture  # noqa: E402
from ub_dynamic.pipeline.timeline import timeline, token_cost  # noqa: E402
from ub_dynamic.shapes import Collective, Method, chunk_layout  # noqa: E402
from ub_dynamic.testing.launch import run_ranks  # noqa: E402

PICTURES = HERE / "pictures"
LAYOUTS: dict[str, tuple[Method, Collective]] = {
    "layout_bulk_ag": ("bulk", "ag"),
    "layout_ring_ag": ("ring_exchange", "ag"),
    "layout_pipeline_rs": ("pipeline", "rs"),
    "layout_ring_rs": ("ring_exchange", "rs"),
}
EVENTS = PICTURES / "timeline.json"
TRACED = """
import sys
import torch
import ub_dynamic as ub
from ub_dynamic.backends.host import ColumnParallelLinear, RowParallelLinear, trace
from ub_dynamic.groups import tensor_parallel_group

torch.set_num_threads(1)
manager = ub.initialize_ub([2048, 1024], tp_size=2, dtype=torch.float32, backend="host")
fc1, fc2 = ColumnParallelLinear(1024, 4096, ub_name="fc1"), RowParallelLinear(4096, 1024, ub_name="fc2")
rows = torch.randn(512, 1024, requires_grad=True)
for _ in range(3):  # the last one counts
    tracer = trace.start()
    with ub.microbatch(1024) as mb:
        out = mb.bind_backward(fc2(fc1(rows)))
    out.square().mean().backward()
trace.stop()
group = tensor_parallel_group(2)
trace.gather_and_save(sys.argv[1], tracer, group)
group.close()
ub.destroy_ub()
"""
_COLOURS = {"fprop": "#3b7ea1", "dgrad": "#2f9e77", "wgrad": "#7a5ba6"}
_TRANSFER, _INK = "#f2a65a", "#222222"


def draw_layouts() -> None:
    for name, (method, collective) in LAYOUTS.items():
        found = chunk_layout(method, collective, (8192, 4096), (3072, 4096), 4, torch.bfloat16)
        layout_picture.draw(found, PICTURES / f"{name}.svg")


def draw_schedule() -> None:
    sizes = [512, 2048, 768, 1024, 1536, 256, 2048, 1024]
    found = timeline("interleaved", 4, 2, len(sizes), token_cost(sizes))
    title = f"interleaved 1F1B: pp 4, vpp 2, T = {', '.join(map(str, sizes))}"
    schedule_picture.draw(found, title, PICTURES / "schedule.svg")


def draw_tokens_saved() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 8000).astype(np.int64)
    workload = Workload(12288, tp=4, cp=1, plan="fixed", documents=8)
    advise_picture.draw(advise([lengths], workload), PICTURES / "tokens_saved.svg")


def measure_timeline() -> None:
    """Record one microbatch on two ranks."""
    program = HERE / "pictures" / "traced.tmp.py"
    program.write_text(TRACED)
    try:
        run_ranks(program, 2, [str(EVENTS)], timeout=300).check()
    finally:
        program.unlink()


def draw_timeline() -> None:
    """The events of the trace file: for each rank a row of GEMMs and one of transfers."""
    events = [event for event in json.loads(EVENTS.read_text())["traceEvents"] if event["ph"] == "X"]
    begin = min(event["ts"] for event in events)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots()
    rows = [(rank, track) for rank in (0, 1) for track in ("GEMM", "transfer")]
    for event in events:
        if event["cat"] in ("GEMM", "transfer"):
            row = rows.index((event["pid"], event["cat"]))
            colour = _TRANSFER if event["cat"] == "transfer" else _colour(event["name"])
            axes.barh(
                row,
                event["dur"] / 1000,
                left=(event["ts"] - begin) / 1000,
                color=colour,
                edgecolor="white",
                linewidth=0.4,
                height=0.8 if event["cat"] == "GEMM" else 0.5,
            )
    axes.set_yticks(range(len(rows)), [f"rank {rank}\n{track}s" for rank, track in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds on two CPU ranks")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _name_operations(axes, events, begin)
    handles = [mpl.patches.Patch(color=colour, label=f"GEMMs of {name}") for name, colour in _COLOURS.items()]
    handles.append(mpl.patches.Patch(color=_TRANSFER, label="transfers"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(PICTURES / "timeline.svg")


def _colour(name: str) -> str:
    return next((colour for part, colour in _COLOURS.items() if part in name), "#999999")


def _name_operations(axes: Any, events: Sequence[dict[str, Any]], begin: float) -> None:
    """TE's name above the GEMMs of each operation of rank 0."""
    spans: dict[str, list[float]] = {}
    for event in events:
        if event["pid"] == 0 and event["cat"] == "GEMM":
            name = re.sub(r" (chunk|block) \d+$", "", event["name"]).replace(" ", "_")
            ends = [event["ts"] - begin, event["ts"] - begin + event["dur"]]
            spans[name] = [min(spans.get(name, ends)[0], ends[0]), max(spans.get(name, ends)[1], ends[1])]
    for name, (first, last) in spans.items():
        axes.text((first + last) / 2000, -0.5, name, ha="center", va="bottom", fontsize=8, color=_INK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="record the timeline anew, on two ranks")
    PICTURES.mkdir(exist_ok=True)
    if parser.parse_args().measure:
        measure_timeline()
    draw_layouts()
    draw_schedule()
    draw_tokens_saved()
    draw_timeline()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
