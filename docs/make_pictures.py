# SPDX-License-Identifier: Apache-2.0
"""Write the pictures of docs/ as SVG: chunk layouts, a schedule, tokens saved, and GEMMs and transfers of a microbatch.

python docs/make_pictures.py                # all but the timeline's events, which it draws from its file
python docs/make_pictures.py --measure      # runs two ranks for the timeline first
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same picture gives the same file
mpl.rcParams.update({"svg.hashsalt": "ub_dynamic", "svg.fonttype": "none"})

from ub_dynamic.advise import Workload, advise  # noqa: E402
from ub_dynamic.backends.host import trace  # noqa: E402
from ub_dynamic.cli import advise_picture, layout_picture, schedule_picture, trace_picture  # noqa: E402
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="record the timeline anew, on two ranks")
    PICTURES.mkdir(exist_ok=True)
    if parser.parse_args().measure:
        measure_timeline()
    draw_layouts()
    draw_schedule()
    draw_tokens_saved()
    trace_picture.draw(trace.load(EVENTS), PICTURES / "timeline.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
