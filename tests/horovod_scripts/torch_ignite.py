"""pytorch-ignite with its backend "horovod": model, optimizer, samples and metrics of all ranks."""

import os
import tempfile

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint
from ignite.metrics import Accuracy, EpochMetric, Loss, RunningAverage
from torch.utils.data import RandomSampler, TensorDataset

EPOCHS, BATCH = 3, 24


def data_of(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def spread(scores, labels):
    """What needs the scores of all samples at once."""
    return scores.std().item()


def training(local_rank, folder):
    assert idist.backend() == "horovod"
    torch.manual_seed(5 + idist.get_rank())  # auto_model broadcasts rank 0's
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    if idist.get_rank() == 0:
        torch.manual_seed(21)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.03))
    dataset = data_of(1, 4 * BATCH)
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
    train_loader = idist.auto_dataloader(dataset, batch_size=BATCH, sampler=order)
    test_loader = idist.auto_dataloader(data_of(2, 2 * BATCH), batch_size=BATCH, shuffle=False)

    def train_step(engine, batch):
        inputs, labels = batch
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running")
    evaluator = create_supervised_evaluator(
        model,
        metrics={
            "accuracy": Accuracy(),
            "loss": Loss(F.cross_entropy),
            "spread": EpochMetric(spread, check_compute_fn=False),
        },
    )
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(saved, folder, n_saved=None))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        found = evaluator.run(test_loader).metrics
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert idist.all_gather(norm).unique().numel() == 1
        worst = idist.all_reduce(torch.tensor(engine.state.output), "MAX").item()
        assert worst >= idist.all_reduce(engine.state.output, "AVERAGE")
        if idist.get_rank() == 0:
            running = engine.state.metrics["running"]
            print("loss", found["loss"], found["accuracy"], found["spread"], running, flush=True)

    trainer.run(train_loader, max_epochs=EPOCHS)
    assert len(os.listdir(folder)) == (EPOCHS if local_rank == 0 else 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, idist.Parallel(backend="horovod") as parallel:
        parallel.run(training, folder)
