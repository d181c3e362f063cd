"""Trains with AdamW, warm-up, cosine decay and gradient clipping. Exports the weights at intervals."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from performance.terminal import progress_bar

from .data import Batch
from .model import TinyLlama


@dataclass(frozen=True)
class TrainingPlan:
    """The length and the learning rates of a training. The training ends after ``steps`` or ``minutes``, whichever is
    first.

    The last fraction ``long_share`` of the training uses rows of ``long_length`` tokens instead of ``length``. A step
    has the same number of tokens in both parts. Short rows cost less time for each token.
    """

    steps: int
    minutes: float = math.inf
    batch: int = 4
    length: int = 256
    long_length: int = 512
    long_share: float = 0.15
    learning_rate: float = 1e-3
    warmup_steps: int = 150
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    eval_every: int = 200
    eval_batches: int = 16
    export_every_minutes: float = 4.0


@dataclass
class History:
    """The measured losses as (step, nats per token). A training loss is the mean since the previous evaluation."""

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


class TrainStep(nn.Cell):
    """One training step as a graph: loss, gradients clipped by their global norm, and update of the weights."""

    def __init__(self, network: TinyLlama, optimizer: nn.Optimizer, clip_norm: float) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.loss_and_gradients = ops.value_and_grad(network, None, optimizer.parameters)

    def construct(self, tokens: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        """Updates the weights and returns the loss before the update."""
        loss, gradients = self.loss_and_gradients(tokens, documents, labels)
        gradients = ops.clip_by_global_norm(gradients, self.clip_norm)
        return ops.depend(loss, self.optimizer(gradients))


def make_optimizer(network: TinyLlama, plan: TrainingPlan) -> nn.AdamWeightDecay:
    """Returns AdamW (Loshchilov and Hutter, 2019) with weight decay for matrices, and without it for norms."""
    matrices = [p for p in network.trainable_params() if p.ndim > 1]
    vectors = [p for p in network.trainable_params() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return nn.AdamWeightDecay(groups, learning_rate=plan.learning_rate, beta1=0.9, beta2=0.98, eps=1e-8)


def learning_rate(plan: TrainingPlan, step: int, progress: float) -> float:
    """Returns the rate of a step: linear warm-up, then a cosine from the peak to 1 % of the peak.

    ``progress`` is the completed fraction of the training, 0 to 1.
    """
    decay = 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * progress))
    return plan.learning_rate * decay * min(1.0, (step + 1) / plan.warmup_steps)


def to_tensors(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(Tensor(np.ascontiguousarray(part)) for part in batch)


def evaluate(network: TinyLlama, held_out: list[Batch]) -> float:
    """Returns the mean loss over the held-out batches, in nats per token."""
    return float(np.mean([float(network(*to_tensors(batch)).asnumpy()) for batch in held_out]))


class Trainer:
    """Trains ``network`` by a plan, on streams of short and long rows. Calls ``export`` at intervals and at the end."""

    def __init__(
        self,
        network: TinyLlama,
        plan: TrainingPlan,
        train: tuple[Iterator[Batch], Iterator[Batch]],
        held_out: list[Batch],
        export: Callable[[], None],
    ) -> None:
        self.network = network
        self.plan = plan
        self.short_rows, self.long_rows = train
        self.held_out = held_out
        self.export = export
        self.history = History()
        self.optimizer = make_optimizer(network, plan)
        self.train_step = TrainStep(network, self.optimizer, plan.clip_norm)
        self.recent: list[float] = []

    def run(self) -> History:
        """Trains to the end of the plan and exports the weights. Ctrl-C ends the training early; the weights are
        exported, too.
        """
        tokens_per_step = self.plan.batch * self.plan.length
        start = exported = time.monotonic()
        done = 0
        with progress_bar() as bar:
            task = bar.add_task("steps", total=self.plan.steps, note="")
            try:
                while done < self.plan.steps:
                    minutes = (time.monotonic() - start) / 60
                    if minutes >= self.plan.minutes:
                        break
                    note = self.step(done, minutes)
                    done += 1
                    seconds = time.monotonic() - start
                    bar.update(task, completed=done, note=f"{note}, {done * tokens_per_step / seconds:.0f} tokens/s")
                    if (time.monotonic() - exported) / 60 >= self.plan.export_every_minutes:
                        self.measure(done)
                        self.export()
                        exported = time.monotonic()
            except KeyboardInterrupt:
                print("Interrupted: exporting what has been learned.")
            self.measure(done)
        self.export()
        return self.history

    def step(self, step: int, minutes: float) -> str:
        """Runs one update, and an evaluation if it is due. Returns a note for the progress bar."""
        progress = max(step / self.plan.steps, minutes / self.plan.minutes)
        rate = learning_rate(self.plan, step, progress)
        batch = next(self.short_rows if progress < 1 - self.plan.long_share else self.long_rows)
        self.optimizer.learning_rate.set_data(Tensor(rate, ms.float32))
        self.recent.append(float(self.train_step(*to_tensors(batch)).asnumpy()))
        note = f"loss {np.mean(self.recent[-20:]):.3f}, learning rate {rate:.1e}"
        if (step + 1) % self.plan.eval_every == 0:
            self.measure(step + 1)
        return note

    def measure(self, step: int) -> None:
        """Records the mean training loss since the last evaluation, and the loss on held-out text."""
        if not self.recent:
            return
        self.history.train.append((step, float(np.mean(self.recent))))
        self.history.held_out.append((step, evaluate(self.network, self.held_out)))
        self.recent = []
        print(
            f"step {step}: train loss {self.history.train[-1][1]:.4f}, held-out loss {self.history.held_out[-1][1]:.4f}"
        )
