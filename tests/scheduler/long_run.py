"""Random interleavings for as long as one likes: ``python tests/scheduler/long_run.py [STEPS] [SEED]``.

What ``test_state_machine`` does in seconds, until so many steps were scheduled (a million by default, some minutes):
every policy, batching mode, preemption, admission and cache, aborts, failed steps, lost agents. Ends with exit code 1
and the seed of the first run that went wrong.
"""

from __future__ import annotations

import random
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(TESTS / "scheduler")]

from simulation import Simulation  # noqa: E402
from test_state_machine import random_limits, random_requests  # noqa: E402

from llm_serving.scheduler.batching.base import BatchingStrategy  # noqa: E402
from llm_serving.scheduler.limits import SchedulerLimits  # noqa: E402
from llm_serving.scheduler.policy import AdmissionKind, Policy, PreemptionKind  # noqa: E402


def any_limits(rng: random.Random) -> SchedulerLimits:
    """Everything that can be chosen, chosen at random."""
    page_attention = rng.random() < 0.9
    return random_limits(
        rng,
        policy=rng.choice(list(Policy)),
        batching=rng.choice(list(BatchingStrategy)),
        batch_size=rng.choice([None, 1, 4]),
        decode_steps_ahead=rng.randrange(4),
        page_attention=page_attention,
        prefix_cache=page_attention and rng.random() < 0.6,
        preemption=rng.choice(list(PreemptionKind)),
        num_host_blocks=rng.choice([0, 2, 10, 100]),
        admission=rng.choice(list(AdmissionKind)),
        predict_output_length=rng.random() < 0.5,
    )


def act(simulation: Simulation, rng: random.Random) -> None:
    """Something happens: mostly steps, now and then an abort, a failure, a lost agent."""
    choice = rng.random()
    if choice < 0.3:
        simulation.schedule()
    elif choice < 0.55:
        simulation.run()
    elif choice < 0.8:
        if simulation.answers:
            simulation.answer()
    elif choice < 0.95:
        simulation.now += rng.choice([0.001, 0.02])
    elif choice < 0.98 and simulation.requests:
        simulation.end(rng.choice(list(simulation.requests)))
        if rng.random() < 0.5:
            simulation.drop_void_steps()
    elif choice < 0.99 and simulation.device.queue:
        simulation.fail_step("the step failed")
    elif choice > 0.995 and simulation.requests:
        simulation.lose_agent()


def run(seed: int) -> int:
    """One simulation from first request to quiet; how many steps it took."""
    rng = random.Random(seed)
    limits = any_limits(rng)
    simulation = Simulation(limits)
    for request in random_requests(rng, limits.max_model_len):
        request.arrival_time = simulation.now
        simulation.add(request)
        for _ in range(rng.randrange(20)):
            act(simulation, rng)
    simulation.finish()
    return len(simulation.steps)


def main() -> int:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    steps = 0
    while steps < wanted:
        try:
            steps += run(seed)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} went wrong, after {steps} steps: python {Path(__file__).name} 1 {seed}")
            return 1
        seed += 1
    print(f"{steps} steps in {seed} runs, every text that of its request alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
