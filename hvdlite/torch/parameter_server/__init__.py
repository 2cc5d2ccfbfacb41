"""Asynchronous training with parameter servers: `hvd.parameter_server.connect()`.

Start the script by `hvdlite-run -np 8 --servers 2 python train.py`: the first two processes serve,
and the other six train. Nobody calls `hvd.init()`.

Example:
    group = hvd.parameter_server.connect()
    if group.serves:
        group.serve(lambda params: torch.optim.SGD(params, lr=0.1 / group.workers))
        raise SystemExit
    replica = group.replica(model.named_parameters())
    for batch in batches:
        loss_of(model, batch).backward()
        replica.step()
"""

from hvdlite.parameter_server.report import Report, ServerReport, WorkerReport
from hvdlite.torch.parameter_server.group import Group, connect
from hvdlite.torch.parameter_server.replica import Replica

__all__ = ["Group", "Replica", "Report", "ServerReport", "WorkerReport", "connect"]
