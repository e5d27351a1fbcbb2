"""Python blocks of the pages and the README are executed, here or by the tests in ``ELSEWHERE``; two are not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..support.launch import ROOT, Mpi, run
from ..support.world.controller import World

PAGES = {"README": ROOT / "README.md"} | {
    path.relative_to(ROOT / "docs").with_suffix("").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))
}
# Blocks that other tests execute, by page: the test, and the number of blocks.
ELSEWHERE = {
    "README": ("tests/launcher/test_api.py", 1),
    "ddp": ("tests/torch/test_ddp_guide.py", 1),
    "horovod": ("tests/torch/test_horovod_page.py", 2),
    "modes": ("tests/mpi/test_own_strategy.py", 1),
    "notebooks": ("tests/launcher/test_notebook.py", 7),
    "programs": ("tests/torch/test_programs.py", 3),
    "python_api": ("tests/launcher/test_api.py", 1),
    "torch_backend": ("tests/torch/test_backend_page.py", 2),
}
NOT_EXECUTED = {
    "architecture": 1,  # an outline of the training loop
    "tensorflow": 1,  # TensorFlow 1, for comparison
}

DIGITS_JOB = """
from mpitrain import Job, data, nn, optim

def job():
    digits = data.mnist()
    model = nn.Sequential(nn.Dense(64, 16), nn.ReLU(), nn.Dense(16, 10))
    return Job(model, nn.SoftmaxCrossEntropy(), {optimizer}, digits.train, validation=digits.validation)
"""
TRAINER = """
import torch
from torch import nn
import mpitrain

torch.manual_seed(0)
inputs = torch.randn(256, 6)
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = nn.Linear(6, 2)
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEPS = """
loader = trainer.loader(dataset, batch_size=8)
for _ in trainer.epochs(1):
    for inputs, labels in loader:
        trainer.backward(loss_of(model(inputs), labels))
        trainer.step()
"""


@dataclass(frozen=True)
class Example:
    """A block of a page, completed to a file that can be run.

    Attributes:
        words: Text that only this block of its page contains.
        before, after: Source that is added before and after the block.
        replaced: Text that replaces ``...`` in the block.
        ranks: Number of ranks; 0 for a file that is executed without MPI.
        status: The expected exit status.
    """

    page: str
    words: str
    before: str = ""
    after: str = ""
    replaced: str = "..."
    ranks: int = 2
    flags: tuple[str, ...] = ()
    status: int = 0


EXAMPLES = [
    Example("README", "def job(", flags=("--train-steps", "20")),
    Example("index", "def job(", flags=("--train-steps", "20")),
    Example("torch", "def job(", flags=("--train-steps", "20")),
    Example("scripts", "def make_job("),
    Example(
        "scripts",
        "trainer.evaluate(",
        TRAINER + "import torchmetrics\nfrom sklearn.metrics import roc_auc_score\n"
        "from torch.utils.data import DataLoader\n"
        "model, temperature, valid_set = nn.Linear(6, 100), 1.0, dataset\n"
        "trainer = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "loader = trainer.loader(dataset, batch_size=8)\n",
        "assert {'loss', 'auc', 'top5'} <= values.keys()\n",
        "trainer.backward(loss_of(model(inputs), labels)); trainer.step()",
    ),
    Example(
        "job_files",
        "integer_inputs",
        "from mpitrain import nn\n",
        "assert Lookup().integer_inputs and not nn.Layer.integer_inputs\n",
        ranks=0,
    ),
    Example(
        "job_files",
        "roc_auc_score",
        "import numpy as np\nfrom types import SimpleNamespace\nfrom mpitrain import Job, data, nn, optim\n"
        "rows = np.random.default_rng(0).random((64, 6), np.float32)\n"
        "train = data.from_arrays(rows, (rows.sum(1) > 3).astype(np.int64))\n"
        "images, jobs, JobOfTwoClasses = SimpleNamespace(validation=train), [], Job\n"
        "def Job(*parts, **options): jobs.append(JobOfTwoClasses(*parts, **options))\n"
        "def job(): return jobs[0]\n",
        replaced="nn.Sequential(nn.Dense(6, 2)), nn.SoftmaxCrossEntropy(), optim.sgd(0.1), train",
        flags=("--train-steps", "4", "--batch-size", "8", "--stop-metric", "f1_macro:max", "--keep-best"),
    ),
    Example(
        "job_files",
        "groups=",
        "from torch import nn\nfrom mpitrain import Job, data, optim\nrule = \\\n",
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.backbone, self.head = nn.Linear(64, 8), nn.Linear(8, 10)\n"
        "    def forward(self, inputs):\n"
        "        return self.head(self.backbone(inputs).relu())\n"
        "def job(): return Job(Net(), nn.CrossEntropyLoss(), rule, data.mnist().train)\n",
        flags=("--train-steps", "4"),
    ),
    Example("job_files", "class lion", after=DIGITS_JOB.format(optimizer="lion(1e-4)"), flags=("--train-steps", "20")),
    Example(
        "data",
        "image_folder(",
        "import numpy as np\nfrom pathlib import Path\nfrom PIL import Image\nfrom mpitrain import data\n"
        "for index in range(6):\n"
        "    path = Path('train', 'ab'[index % 2], f'{index}.png')\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    Image.fromarray(np.full((300, 280, 3), 40 * index, np.uint8)).save(path)\n",
        "images, labels = train.read_batch(0, 4).examples\n"
        "assert images.shape == (4, 3, 224, 224) and images.max() <= 1 and set(labels) <= {0, 1}\n",
        ranks=0,
    ),
    Example(
        "data",
        "data.stream(",
        "import numpy as np\nfrom pathlib import Path\nfrom mpitrain import Job, data, nn, optim\n"
        "files = [Path(f'{name}.txt') for name in 'abcd']\n"
        "for path in files: path.write_text('1 2 0\\n3 4 1\\n' * 8)\n"
        "def tokenized(line):\n"
        "    *numbers, label = map(int, line.split())\n"
        "    return np.array(numbers, np.float32), label\n",
        "def job():\n    return Job(nn.Sequential(nn.Dense(2, 2)), nn.SoftmaxCrossEntropy(), optim.sgd(0.1), train)\n",
        flags=("--train-steps", "4", "--batch-size", "4"),
    ),
    Example(
        "ddp",
        "updates_tensors_separately",
        "import torch\n",
        "    def __init__(self, params): super().__init__(params, {'lr': 0.1})\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for parameter in group['params']:\n"
        "                parameter.data -= 0.1 * parameter.grad.sign()\n"
        + TRAINER
        + "trainer = mpitrain.Trainer(model, MyOptimizer(model.parameters()))\n"
        + STEPS,
    ),
    Example(
        "ddp",
        "before.pt",
        TRAINER + "loss_of(model(inputs), dataset.tensors[1]).backward()\n"
        "optimizer.step()\n"
        "torch.save({'optimizer': optimizer.state_dict()}, 'before.pt')\n",
        STEPS,
    ),
    Example(
        "ddp",
        "nn.ModuleDict",
        TRAINER + "generator, discriminator = nn.Linear(3, 6), nn.Linear(6, 1)\n"
        "noise = lambda count: torch.randn(count, 3)\n"
        "loss_of = lambda outputs, label: ((outputs - label) ** 2).mean()\n"
        "optimizer_g = torch.optim.Adam(generator.parameters())\n"
        "optimizer_d = torch.optim.Adam(discriminator.parameters())\n",
    ),
    Example("ddp", "trainer.batches(", TRAINER + "trainer = mpitrain.Trainer(model, optimizer)\n"),
    Example(
        "ddp",
        "trainer.steps(",
        TRAINER + "trainer = mpitrain.Trainer(model, optimizer)\n"
        "random_batch = lambda count: (torch.randn(count, 6), torch.zeros(count, dtype=torch.long))\n",
    ),
    Example(
        "ddp",
        "change_parameters",
        TRAINER + "critic = model\ntrainer = mpitrain.Trainer(model, optimizer)\nsteps = iter(trainer.steps(2))\n"
        "def step(): trainer.backward(loss_of(model(inputs), dataset.tensors[1])); trainer.step()\n"
        "next(steps)\nstep()\n",
        "assert all(parameter.abs().max() <= 0.01 for parameter in critic.parameters())\nfor _ in steps: step()\n",
    ),
    Example(
        "programs",
        "stop_requested",
        "import os\nimport signal\nimport sys\nimport torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndevice = torch.device('cpu')\n"
        "def save_and_exit_with_status_75(): sys.exit(75)\n",
        replaced="os.kill(os.getpid(), signal.SIGTERM)",
        status=75,
    ),
    Example("programs", "mpitrain.progress", "batches = range(3)\n"),
    Example(
        "slow_networks",
        "class Signs",
        after=DIGITS_JOB.format(optimizer="optim.sgd(0.1)"),
        flags=("--compress", "block:Signs", "--no-shared-memory", "--train-steps", "20"),
    ),
]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page}-{example.words.strip('(=')}")
def test_a_block_runs(example: Example, world: World, openmpi: Mpi, tmp_path: Path) -> None:
    (code,) = (block for block in blocks(example.page) if example.words in block)
    script = tmp_path / "block.py"
    script.write_text(example.before + code.replace("...", example.replaced) + example.after)
    if example.ranks and example.page != "programs":
        world.train(example.ranks, *example.flags, script, cwd=tmp_path, timeout=120)
        return
    start = ["-m", "mpitrain", "run", "-n", str(example.ranks)] if example.ranks else []
    done = run([str(openmpi.python), *start, str(script)], timeout=120, cwd=tmp_path)
    assert done.returncode == example.status, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_executed(page: str) -> None:
    here = sum(example.page == page for example in EXAMPLES)
    test, elsewhere = ELSEWHERE.get(page, ("", 0))
    assert here + elsewhere + NOT_EXECUTED.get(page, 0) == len(blocks(page))
    assert not test or f"{page}.md" in (ROOT / test).read_text(encoding="utf-8")
