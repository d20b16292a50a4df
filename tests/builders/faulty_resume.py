"""Trainers that restore wrongly, each in one way, for `--resume tests.builders.faulty_resume:<fault>`."""

import random
import time
from collections.abc import Callable

import torch

from tests.builders.trainer import BATCH, PEAK, Run


def faulty(before: Callable[[dict], object] = lambda _: None, after: Callable[[Run], object] = lambda _: None) -> Callable[[int, int], Run]:
    """Return a build function whose runs change the loaded state `before` they restore it, and themselves `after`."""

    class Faulty(Run):
        def restore(self, state: dict) -> None:
            before(state)
            super().restore(state)
            after(self)

    return Faulty


def _each(state: dict, change: Callable[[dict], object]) -> None:
    for entry in state["optim"]["state"].values():
        change(entry)


def _clear_moments(entry: dict) -> None:
    entry["exp_avg"].zero_()
    entry["exp_avg_sq"].zero_()


def _swap(state: dict) -> None:
    entries = state["optim"]["state"]
    entries["up.bias"], entries["norm.bias"] = entries["norm.bias"], entries["up.bias"]


def _round(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.copy_(tensor.bfloat16().float())


def _new_schedule(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = PEAK
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1.0, (step + 1) / 20))


def _advance(run: Run, steps: int) -> None:
    for _ in range(steps):
        run.schedule.step()


def _halve_rates(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def _reseed(run: Run) -> None:
    random.Random(1).shuffle(run.order)


optim_lost = faulty(after=lambda run: run.optimizer.state.clear())
optim_zeroed = faulty(lambda state: _each(state, _clear_moments))
optim_step_zero = faulty(lambda state: _each(state, lambda entry: entry["step"].zero_()))
first_moment_lost = faulty(lambda state: _each(state, lambda entry: entry["exp_avg"].zero_()))
moments_misaligned = faulty(_swap)
moments_bf16 = faulty(lambda state: _each(state, lambda entry: [_round(entry[name]) for name in ("exp_avg", "exp_avg_sq")]))
moments_scaled = faulty(lambda state: _each(state, lambda entry: entry["exp_avg_sq"].mul_(1.5)))
weights_bf16 = faulty(lambda state: [_round(weight) for weight in state["model"].values()])
lr_restart = faulty(after=_new_schedule)
lr_double = faulty(after=lambda run: _advance(run, run.count))
lr_off_by_one = faulty(after=lambda run: _advance(run, 1))
lr_halved = faulty(after=_halve_rates)
rng_lost = faulty(after=lambda run: torch.manual_seed(0))
data_restart = faulty(after=lambda run: setattr(run, "taken", 0))
data_off_by_one = faulty(after=lambda run: setattr(run, "taken", run.taken + BATCH))
data_repeat = faulty(after=lambda run: setattr(run, "taken", run.taken - 4 * BATCH))
data_reseeded = faulty(after=_reseed)
counter_lost = faulty(after=lambda run: setattr(run, "count", 0))


def raises(rank: int, world: int) -> Run:
    """A trainer that cannot be built."""
    raise RuntimeError("the tokenizer is gone")


class LastBit(Run):
    """A trainer on a machine that sums in another order."""

    def step(self, batch: torch.Tensor) -> float:
        """Train on one batch; the loss is off by one unit in the last place of fp32."""
        return float(torch.nextafter(torch.tensor(super().step(batch)), torch.tensor(9.0)))


last_bit_of_the_loss = LastBit
other_world = faulty()  # restores everything; it is the number of ranks that differs


class KeepsTime(Run):
    """A sound trainer whose state also tells the time."""

    def state(self) -> dict[str, object]:
        """Return what is saved."""
        return super().state() | {"clock": time.monotonic()}


keeps_time = KeepsTime
