"""Make the picture of docs/live.md: the charts of a report on a job with a straggler.

    python benchmarks/report_charts.py docs/live_report.svg

Three ranks train; rank 2 reads its batches 20 ms later than the others from the tenth second on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = """
import time
import torch
import hvdlite.torch as hvd
hvd.init()
began = time.monotonic()
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
batch = torch.randn(64, 256)
for _ in range(800):
    time.sleep(0.02)  # reading a batch
    if hvd.rank() == 2 and time.monotonic() - began > 10:
        time.sleep(0.02)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    hvd.observe(samples=len(batch))
"""


def main(picture: Path) -> None:
    """Train with a report, and keep its charts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "out.html"
        run = [sys.executable, "-m", "hvdlite.launch", "--report", str(report), "-np", "3"]
        subprocess.run([*run, sys.executable, "-c", TRAINING], check=True)
        text = report.read_text()
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    picture.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
