"""``TurnLog`` of ``llm_serving.flight.turn_log`` in C."""

from collections.abc import Callable

from llm_serving.flight.counts import Counts
from llm_serving.flight.turn_log import TakenTurns
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult

class TurnLog:
    due: float
    num_steps: int
    def __init__(
        self,
        step_type: type[ScheduledStep],
        answer_type: type[StepResult],
        counts: Callable[[], Counts],
        max_turns: int,
    ) -> None: ...
    def begin(
        self, first_answer: int, latest: ScheduledStep, table_lens: list[int], endings: set[int], keeps_updates: bool, /
    ) -> None: ...
    def answer(self, answer: StepResult, updates: list[RequestUpdate], now: float, /) -> bool: ...
    def step(self, step: ScheduledStep, now: float, /) -> bool: ...
    def end(self, now: float, wakeup: float | None, /) -> int: ...
    def leave(self) -> None: ...
    def take(self) -> TakenTurns | None: ...
