"""The Trainer of Hugging Face transformers: its defaults, accumulation, checkpoints."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import horovod.torch as hvd
import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BATCH, PASSES = 4, 2


class Sentences(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(9)
        self.tokens = torch.randint(0, 3, (count, 12), generator=generator).cumsum(1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[12 - index % 6 :] = -100  # sentences are not equally long
        return {"input_ids": self.tokens[index], "labels": labels}


class DistributedTrainer(Trainer):
    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            optimizer = super().create_optimizer(*args, **kwargs)
            self.distributed = hvd.DistributedOptimizer(
                optimizer, named_parameters=self.model.named_parameters()
            )
            self.optimizer = self.distributed
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.tokens = self.distributed.weight = num_items_in_batch.item()
        return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs, *args, **kwargs):
        if "grad_norm" in logs:
            loss = torch.tensor(logs["loss"])
            logs["loss"] = hvd.allreduce(loss, name="loss", weight=self.tokens).item()
            if hvd.rank() == 0:
                print("loss", logs["loss"], logs["grad_norm"], logs["learning_rate"])
        super().log(logs, *args, **kwargs)


def make_model():
    torch.manual_seed(17)
    config = GPT2Config(
        vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def train(folder, steps, **options):
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH // hvd.size(),
        gradient_accumulation_steps=PASSES,
        learning_rate=0.02,
        weight_decay=0.1,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_steps=steps,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="steps" if hvd.rank() == 0 else "no",
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    assert arguments.world_size == 1  # it knows of no other rank
    dataset = Sentences(6 * BATCH)
    trainer = DistributedTrainer(
        make_model(),
        arguments,
        train_dataset=Subset(dataset, range(hvd.rank(), len(dataset), hvd.size())),
    )
    trainer.train(**options)


def main():
    hvd.init()
    with tempfile.TemporaryDirectory() as own:
        folder = hvd.broadcast_object(own, root_rank=0)
        train(folder, 3)
        hvd.barrier()
        train(folder, 5, resume_from_checkpoint=os.path.join(folder, "checkpoint-3"))
        hvd.barrier()


if __name__ == "__main__":
    main()
