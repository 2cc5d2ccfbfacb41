"""Train a small network on handwritten digits that are a DataFrame of Spark.

    spark-submit --master 'local[2]' examples/spark_digits.py

Spark writes the images to a folder of Parquet files, and each rank reads its share of the files. On
a cluster the folder is on storage that all executors reach.
"""

import argparse
import tempfile

from pyspark.sql import SparkSession

import hvdlite.spark

EPOCHS = 20
BATCH = 16  # of each rank


def save(session, folder, ranks):
    """Write the training images as one file for each rank; return the test images and digits."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=357, random_state=0)
    train_images, test_images, train_digits, test_digits = parts
    rows = zip(train_images.tolist(), train_digits.tolist(), strict=True)
    table = session.createDataFrame(list(rows), "pixels array<double>, digit long")
    table.repartition(ranks).write.mode("overwrite").parquet(folder)
    return test_images.tolist(), test_digits.tolist()


def read_share(folder, columns):
    """Read this rank's share of a folder of Parquet files: every size-th file."""
    import pyarrow.dataset

    import hvdlite.torch as hvd

    found = pyarrow.dataset.dataset(folder, format="parquet")
    mine = sorted(found.files)[hvd.rank() :: hvd.size()]
    if not mine:
        raise ValueError(f"{len(found.files)} files are too few for {hvd.size()} ranks")
    return pyarrow.dataset.dataset(mine, format="parquet").to_table(columns=columns)


def steps_of_all(batches):
    """Return how many steps every rank can do, where ranks have different numbers of batches."""
    import torch

    import hvdlite.torch as hvd

    return int(hvd.allreduce(torch.tensor(batches), op=hvd.Min, name="steps"))


def train(folder, test):
    """Train on this rank's share of the images; return the share of test images it recognises."""
    import torch
    from torch import nn

    import hvdlite.torch as hvd

    hvd.init()
    table = read_share(folder, ["pixels", "digit"])
    images = torch.tensor(table["pixels"].to_pylist())
    digits = torch.tensor(table["digit"].to_pylist())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    steps = steps_of_all(len(images) // BATCH)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images))
        for chosen in order.split(BATCH)[:steps]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), digits[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(torch.tensor(test[0])).argmax(1) == torch.tensor(test[1])
    return right.float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits with Spark")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where the Parquet files go (default: a temporary folder)")
    arguments = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.folder or f"{temporary}/digits"
        accuracies = hvdlite.spark.run(
            train,
            args=(place, save(spark, place, arguments.ranks)),
            num_proc=arguments.ranks,
        )
    print(f"test accuracy {accuracies[0]:.1%}, the same on all {len(accuracies)} ranks")
    assert len(set(accuracies)) == 1
    spark.stop()
